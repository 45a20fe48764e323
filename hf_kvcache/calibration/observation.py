"""Measure a calibration: one forward pass over a short text, with layers that look at keys and queries go by.

Takes as long as a prompt of 2,000 tokens, once a model, and `2 + D` float32 numbers for each dimension of each head.
"""

from importlib import resources
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import compat
from ..block_layer import BlockLayer
from ..cache import KVCache, make_cache
from ..model_layers import attention_modules
from ..rotary import find_rotary
from ..states import HybridLayer
from .calibration import Calibration
from .observed_layer import NUM_SKIPPED, ObservedLayer

MAX_TOKENS = 2048
# Fewer tokens cannot show in which directions keys vary.
MIN_TOKENS = NUM_SKIPPED + 60

_CANNOT_TURN = "cannot calibrate the keys of this model: {reason}. Use cache 'turboquant', which needs no calibration."


def default_text() -> str:
    """The library's own text: prose, dialogue, tables, code, letters, mathematics, four languages; 2,000 tokens."""
    return resources.files(__package__).joinpath("text.txt").read_text(encoding="utf-8")


@torch.no_grad()
def calibrate(model: PreTrainedModel, tokenizer_or_ids: Any, *, text: str | None = None) -> Calibration:
    """Measure what the cache `"transform"` needs to know of a model. One forward pass.

    Args:
        model: a decoder-only model with rotary position embeddings, in eval mode.
        tokenizer_or_ids: the model's tokenizer, or token ids `[1, T]` of a text of your own.
        text: what to tokenize; by default a text of many kinds that comes with the library. The first 2,048 tokens
            are used.

    Raises:
        ValueError: if there are too few tokens, both ids and a text, a model in training mode, or numbers that are
            not finite.
        NotImplementedError: if the model's keys cannot be turned back to before their rotary embedding.
    """
    ids = _token_ids(tokenizer_or_ids, text)
    if model.training:
        raise ValueError(
            "the model is in training mode, in which its keys are not those it generates with: model.eval()."
        )
    cache = _observing_cache(model)
    # The decoder alone: logits of a whole text would take gigabytes.
    model.base_model(input_ids=ids.to(model.device), use_cache=True, **{compat.CACHE_ARG: cache})
    parts = {i: part for i, layer in enumerate(cache.layers) if isinstance(part := _part(layer), ObservedLayer)}
    layers = {i: part.statistics for i, part in parts.items()}
    return Calibration(layers, num_tokens=ids.shape[1])


def _token_ids(tokenizer_or_ids: Any, text: str | None) -> torch.Tensor:
    if isinstance(tokenizer_or_ids, torch.Tensor):
        if text is not None:
            raise ValueError("token ids and a text were both given: give one of them.")
        ids = tokenizer_or_ids
        if ids.ndim != 2 or ids.shape[0] != 1 or ids.is_floating_point():
            raise ValueError(f"token ids of shape {tuple(ids.shape)} and {ids.dtype} were given: give integers [1, T].")
    else:
        ids = tokenizer_or_ids(default_text() if text is None else text, return_tensors="pt").input_ids
    if ids.shape[1] < MIN_TOKENS:
        raise ValueError(f"the text has {ids.shape[1]} tokens: give at least {MIN_TOKENS}, better 2,000.")
    return ids[:, :MAX_TOKENS]


def _part(layer: Any) -> Any:
    return layer.attention if isinstance(layer, HybridLayer) else layer


def _observing_cache(model: PreTrainedModel) -> KVCache:
    """A cache whose full-attention layers measure instead of storing."""
    cache = make_cache(model)
    modules = attention_modules(model)
    for index, layer in enumerate(cache.layers):
        part = _part(layer)
        if not isinstance(part, BlockLayer):
            continue
        if not part.context.takes_over:
            raise NotImplementedError(_CANNOT_TURN.format(reason=f"layer {index} does not show them to its cache"))
        rotary = find_rotary(model, modules[index], part.context.layer_type, refusal=_CANNOT_TURN)
        observed = ObservedLayer(part.context, rotary)
        if isinstance(layer, HybridLayer):
            layer.attention = observed
        else:
            cache.layers[index] = observed
    return cache
