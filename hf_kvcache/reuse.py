"""Does a filled cache belong to this prompt? Checked on the keys of the first layer, which no other token could give.

The first layer's key of a token depends only on the token and its position. Running the model up to that layer's
`update` and no further costs its projections, a small part of the prefill that the cache saves.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache

from . import compat
from .build import make_cache
from .cache import KVCache
from .layers.layer import KVLayer

# Rounding differs a little between batch shapes, by about 1% in bfloat16; another token differs by far more.
TOLERANCE = 0.05


class _Found(Exception):
    """Not an error: ends the forward once the keys are known."""

    def __init__(self, keys: torch.Tensor):
        super().__init__()
        self.keys = keys


class _KeyProbe(Cache):
    """An empty cache whose first update ends the forward with the keys it was given."""

    def update(self, key_states: torch.Tensor, *args, **kwargs):
        raise _Found(key_states)


def check_same_prompt(model: Any, cache: KVCache, input_ids: torch.Tensor, model_kwargs: dict) -> None:
    """Compare the first layer's cached keys with those of `input_ids` `[B, T]`.

    Raises:
        ValueError: if they belong to other tokens.
    """
    first = cache.layers[0]
    if not isinstance(first, KVLayer):
        return  # a first layer without keys (Mamba) has nothing to compare
    start, stored = first.comparable_keys()
    if not stored.shape[2]:
        return
    past = start + stored.shape[2]
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    inputs = {
        "input_ids": input_ids[:, start:past],
        compat.CACHE_ARG: _KeyProbe(make_cache(model).layers),
        "use_cache": True,
    }
    if positions is not None:
        inputs["position_ids"] = positions[..., start:past]
    elif start:
        inputs["position_ids"] = torch.arange(start, past, device=input_ids.device)[None]
    try:
        with torch.no_grad():
            model(**inputs)
    except _Found as found:
        expected = found.keys.float()
    error = (stored.float() - expected).norm(dim=(1, 3)) / expected.norm(dim=(1, 3)).clamp(min=1e-6)  # [B, T]
    if mask is not None:
        error = error * mask[:, start:past].to(error.device)
    differs = error > TOLERANCE
    # One sync a generate() call: what follows depends on it.
    if differs.any():
        position = start + int(differs.any(0).int().argmax())
        raise ValueError(
            f"the cache holds another text than this prompt: they differ from token {position} on (of "
            f"{cache.num_tokens_seen} cached). "
            f"Crop the cache to the common part, cache.crop({position} - cache.get_seq_length()), or use a new one."
        )
