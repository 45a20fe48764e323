"""Eviction over all layers of a cache: when a prompt begins and ends, and policies that compare layers."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from . import compat
from .evicting_layer import EvictingLayer
from .policies.reconstruction import Reconstruction
from .policies.selection import best_of_all_layers


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
    scores = _reconstruct(model, cache, input_ids)
    held = [layer.held() for layer in layers]
    protected = [
        layer.finish(score.masked_fill(part.slots < past - count, torch.inf), part)
        for layer, score, part in zip(layers, scores, held, strict=True)
    ]
    budget = torch.stack([layer.budget().to(first.device) for layer in layers])  # [layers, B]
    for layer, keep in zip(layers, best_of_all_layers(protected, budget), strict=True):
        layer.evict(keep=keep)


@torch.no_grad()
def _reconstruct(model: Any, cache: Any, input_ids: torch.Tensor) -> list[torch.Tensor]:
    """Scores `[B, Hkv, n]` of what each evicting layer holds."""
    # Windows and states read along in copies, which are small; evicting layers store nothing while they score.
    copies = [layer.fork() if evicting_layers([layer]) else copy.deepcopy(layer) for layer in cache.layers]
    reading = type(cache)(copies, cache.recipe, cache.model)
    layers = evicting_layers(reading.layers)
    for layer in layers:
        layer.reconstruction = Reconstruction(layer.held())
    first_slot, past = layers[0].first_slot, layers[0].seen
    skipped = past - input_ids.shape[1]
    for begin in range(0, input_ids.shape[1], layers[0].policy.chunk_length):
        chunk = input_ids[:, begin : begin + layers[0].policy.chunk_length]
        slots = torch.arange(past + chunk.shape[1], device=first_slot.device)
        # A token is padding in the second reading where it was in the first.
        is_real = torch.where(slots < past, slots, slots - past + begin + skipped) >= first_slot[:, None]
        positions = slots[past:] - first_slot[:, None]
        inputs = {"input_ids": chunk, "use_cache": True, compat.CACHE_ARG: reading}
        inputs["position_ids"] = positions.to(chunk.device)
        if not bool(is_real.all()):
            inputs["attention_mask"] = is_real.to(chunk.device).long()
        model.get_decoder()(**inputs)
    return [layer.reconstruction.most for layer in layers]
