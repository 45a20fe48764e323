"""Measure a calibration: passes over a short text, with layers that look at keys and queries go by.

Takes as long as a few prompts of 1,000 tokens, once a model, and the memory of a backward pass over 1,024 tokens.
"""

from collections.abc import Callable
from importlib import resources
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import compat
from ..build import make_cache
from ..cache import KVCache
from ..codecs.statistics import LayerStatistics
from ..layers.attending_layer import AttendingLayer
from ..layers.block_layer import BlockLayer
from ..layers.layer import LayerContext
from ..layers.states import HybridLayer
from ..model_layers import attention_modules
from ..rotary import Rotary, find_rotary
from .calibration import Calibration
from .observed_layer import NUM_SKIPPED, ObservedLayer
from .probed_layer import ProbedLayer, backward

MAX_TOKENS = 2048
# A backward pass keeps what every layer computed.
MAX_BACKWARD_TOKENS = 1024
# Fewer tokens cannot show in which directions keys vary.
MIN_TOKENS = NUM_SKIPPED + 60

_CANNOT_TURN = "cannot calibrate the keys of this model: {reason}. Use cache 'turboquant', which needs no calibration."


def default_text() -> str:
    """The library's own text: prose, dialogue, tables, code, letters, mathematics, four languages; 2,000 tokens."""
    return resources.files(__package__).joinpath("text.txt").read_text(encoding="utf-8")


@torch.inference_mode(False)  # a backward pass is not possible in it
@torch.no_grad()
def calibrate(model: PreTrainedModel, tokenizer_or_ids: Any, *, text: str | None = None) -> Calibration:
    """Measure what the cache `"transform"` needs to know of a model: two forward passes and one backward pass.

    Args:
        model: a decoder-only model with rotary position embeddings, in eval mode.
        tokenizer_or_ids: the model's tokenizer, or token ids `[1, T]` of a text of your own.
        text: what to tokenize; by default a text of many kinds that comes with the library. The first 2,048 tokens
            are used, and 1,024 of them for the backward pass.

    Raises:
        ValueError: if there are too few tokens, both ids and a text, a model in training mode, or numbers that are
            not finite.
        NotImplementedError: if the model's keys cannot be turned back to before their rotary embedding.
    """
    ids = token_ids(tokenizer_or_ids, text).to(model.device)
    if model.training:
        raise ValueError("the model is in training mode, where its keys are not those it generates with: model.eval().")
    rotaries = _rotaries(model)
    cache, observed = cache_with(model, lambda context: ObservedLayer(context, rotaries[context.layer_idx]))
    # The decoder alone: logits of a whole text would take gigabytes.
    model.base_model(input_ids=ids, use_cache=True, **{compat.CACHE_ARG: cache})
    layers = {index: layer.statistics for index, layer in observed.items()}
    importance = _measure_importance(model, ids[:, :MAX_BACKWARD_TOKENS], layers, rotaries)
    layers = {index: layers[index]._replace(importance=importance[index]) for index in layers}
    return Calibration(layers, num_tokens=ids.shape[1])


def _measure_importance(
    model: PreTrainedModel, ids: torch.Tensor, layers: dict[int, LayerStatistics], rotaries: dict[int, Rotary]
) -> dict[int, torch.Tensor]:
    """Of each layer, how much the error of one coefficient changes the model's predictions, `[H]`.

    Only keys of the first half are disturbed, and only queries some way after them count: near keys stay exact.
    """
    cache, probed = cache_with(model, ProbedLayer)
    half = ids.shape[1] // 2
    begin = half + ids.shape[1] // 8
    gradients = backward(model, ids, cache, list(probed.values()), begin)
    old = slice(NUM_SKIPPED, half)
    return {
        index: layer.importance(gradient, layers[index], rotaries[index], old, begin)
        for (index, layer), gradient in zip(probed.items(), gradients, strict=True)
    }


def token_ids(tokenizer_or_ids: Any, text: str | None) -> torch.Tensor:
    """Token ids `[1, T]`, at most 2,048: those given, or of a text, by default of the library's own."""
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
    return ids[:, :MAX_TOKENS].clone()  # also out of inference mode


def _part(layer: Any) -> Any:
    return layer.attention if isinstance(layer, HybridLayer) else layer


def _rotaries(model: PreTrainedModel) -> dict[int, Rotary]:
    """The rotation of each full-attention layer."""
    modules, rotaries = attention_modules(model), {}
    for index, layer in enumerate(make_cache(model).layers):
        if not isinstance(part := _part(layer), BlockLayer):
            continue
        if not part.context.takes_over:
            raise NotImplementedError(_CANNOT_TURN.format(reason=f"layer {index} does not show them to its cache"))
        rotaries[index] = find_rotary(model, modules[index], part.context.layer_type, refusal=_CANNOT_TURN)
    return rotaries


def cache_with(
    model: PreTrainedModel, build: Callable[[LayerContext], AttendingLayer]
) -> tuple[KVCache, dict[int, Any]]:
    """A cache whose full-attention layers measure instead of storing, and those layers by index."""
    cache = make_cache(model)
    measuring = {}
    for index, layer in enumerate(cache.layers):
        if not isinstance(part := _part(layer), BlockLayer):
            continue
        measuring[index] = build(part.context)
        if isinstance(layer, HybridLayer):
            layer.attention = measuring[index]
        else:
            cache.layers[index] = measuring[index]
    return cache, measuring
