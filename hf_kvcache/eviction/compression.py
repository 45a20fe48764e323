"""Eviction over all layers of a cache: when a prompt begins and ends, and policies that compare layers."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import compat
from ..policies.base import Held
from ..policies.duo_attention import InductionProbe
from ..policies.reconstruction import ForwardDone, Reconstruction
from ..policies.selection import best_of_all_layers
from .evicting_layer import EvictingLayer


def evicting_layers(layers: Sequence[Any]) -> list[EvictingLayer]:
    """Those of a cache's layers that evict, in their order; the attention part of hybrid layers included."""
    parts = [getattr(layer, "attention", layer) for layer in layers]
    return [part for part in parts if isinstance(part, EvictingLayer)]


def reconstruct_and_evict(model: Any, cache: Any, input_ids: torch.Tensor) -> None:
    """Read `input_ids` `[B, T]`, the newest tokens of `cache`, a second time, and keep what that needed.

    Raises:
        ValueError: if there are more ids than tokens seen.
    """
    layers = evicting_layers(cache.layers)
    first = layers[0]
    past, count = first.seen, input_ids.shape[1]
    if input_ids.shape[0] != first.batch_size or count > past:
        raise ValueError(
            f"compress() was given ids of shape {tuple(input_ids.shape)} and the cache holds {first.batch_size} "
            f"sequences of {past} tokens: give the ids of the prompt, padding included, or of its newest part."
        )
    if first.plan.budget.keeps_all(past):
        return
    # The newest tokens stay anyway: nobody has to find them.
    ids = input_ids[:, : max(1, count - first.plan.num_recent_tokens)]
    reads = _read_again(model, cache, ids, past - count, first.policy.new_reading, first.policy.chunk_length)
    for layer, read in zip(layers, reads, strict=True):
        layer.note_reading(read)
    held = [layer.held() for layer in layers]
    scores = [
        read.most.masked_fill(part.slots < past - count, torch.inf) for read, part in zip(reads, held, strict=True)
    ]
    _keep_best(layers, held, scores)


def evict_together(layers: Sequence[EvictingLayer]) -> None:
    """Evict from all layers, whose tokens share one budget, by the scores of their policies."""
    if layers[0].plan.budget.keeps_all(layers[0].seen):
        return
    held = [layer.scored() for layer in layers]
    _keep_best(layers, *map(list, zip(*held, strict=True)))


def _keep_best(layers: Sequence[EvictingLayer], held: Sequence[Held], scores: Sequence[torch.Tensor]) -> None:
    protected = [layer.finish(score, part) for layer, score, part in zip(layers, scores, held, strict=True)]
    budget = torch.stack([layer.budget().to(layers[0].device) for layer in layers])  # [layers, B]
    for layer, keep in zip(layers, best_of_all_layers(protected, budget), strict=True):
        layer.evict(keep=keep)


_head_scores: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# Random tokens that are read twice to see which heads look up the first reading.
_PROBE_LENGTH = 256


def retrieval_scores(model: Any, make_cache: Callable[[], Any]) -> list[list[float]]:
    """How well each KV head of each evicting layer looks up what came before: measured once a model.

    Args:
        model: the model.
        make_cache: makes an empty cache of it whose full-attention layers evict.
    """
    if model not in _head_scores:
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        ids = torch.randint(vocabulary, (1, _PROBE_LENGTH), generator=generator).to(model.device)
        cache = make_cache()
        with torch.no_grad():
            model.get_decoder()(input_ids=ids, use_cache=True, **{compat.CACHE_ARG: cache})
        probes = _read_again(model, cache, ids, 0, InductionProbe, _PROBE_LENGTH)
        _head_scores[model] = [probe.strength.tolist() for probe in probes]
    return _head_scores[model]


@torch.no_grad()
def _read_again(
    model: Any, cache: Any, input_ids: torch.Tensor, start: int, kind: Callable[..., Reconstruction], chunk_length: int
) -> list[Reconstruction]:
    """What a second reading of slots from `start` on, `chunk_length` at a time, shows in each evicting layer."""
    reading = copy.copy(cache)
    first = evicting_layers(cache.layers)[0]
    first_slot, past = first.first_slot, first.seen
    reads: list[Reconstruction] = []
    for offset in range(0, input_ids.shape[1], chunk_length):
        chunk = input_ids[:, offset : offset + chunk_length]
        begin = start + offset
        reading.layers = [_read_along(layer) for layer in cache.layers]
        layers = evicting_layers(reading.layers)
        reads = reads or [kind(layer.held(), is_last=layer is layers[-1]) for layer in layers]
        slots = torch.arange(past + chunk.shape[1], device=first_slot.device)
        # A token is padding in the second reading where it was in the first.
        is_real = torch.where(slots < past, slots, slots - past + begin) >= first_slot[:, None]
        # A chunk follows the first reading at once, however much padding stands between them.
        positions = slots[past:] - (first_slot + (first_slot - begin).clamp(min=0))[:, None]
        inputs = {"input_ids": chunk, "use_cache": True, compat.CACHE_ARG: reading}
        inputs["position_ids"] = positions.clamp(min=0).to(chunk.device)
        is_padded = not bool(is_real.all())
        if is_padded:
            inputs["attention_mask"] = is_real.to(chunk.device).long()
        for layer, read in zip(layers, reads, strict=True):
            read.begin_chunk(begin, ~is_real[:, past:].to(layer.device) if is_padded else None)
            layer.reconstruction = read
        with contextlib.suppress(ForwardDone):
            model.get_decoder()(**inputs)
    return reads


def _read_along(layer: Any) -> Any:
    """A layer that stands at the end of the prompt as `layer` does, and may go on from there.

    Evicting layers store nothing while they score. Windows and states do, in copies, which are small: a fork would have
    its window's room made in the memory of the cache.
    """
    return layer.fork() if evicting_layers([layer]) else copy.deepcopy(layer)
