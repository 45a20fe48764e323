"""Forced tokens after what a cache holds, in the steps in which the cache does what it is there for."""

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import KVCache
from ..compat import CACHE_ARG


def step_length(cache: Cache, otherwise: int) -> int:
    """Tokens a forward: one where sparse reads are measured, as any longer forward reads everything."""
    reads_sparsely = isinstance(cache, KVCache) and cache.recipe.fills("reading") and not cache.evicts
    return 1 if reads_sparsely else otherwise


def forced_logits(model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, T, vocabulary]` of forced tokens `[B, T]`."""
    parts = input_ids.split(step_length(cache, input_ids.shape[1]), dim=1)
    return torch.cat([model(part, use_cache=True, **{CACHE_ARG: cache}).logits for part in parts], dim=1)
