"""The decode kernel's call for a step of a layer that reads sparsely: what is read anyway, what is chosen from."""

from typing import TYPE_CHECKING

import numpy as np

from ..kernels import decode, structs
from ..kernels.choose import ChosenCall, Rest, Units, UnitSinks, chosen_segment

if TYPE_CHECKING:
    from .sparse_layer import SparseReadLayer


def chosen_call(
    layer: "SparseReadLayer", candidates: int, count: int, sink_units: int, num_heads: int
) -> ChosenCall | None:
    """The call, whose second segment is what follows the candidates; None if the reader has no words for the kernel.

    Args:
        layer: with tokens, summaries and first slots.
        candidates: tokens a row that are chosen from.
        count: units that are chosen, at most.
        sink_units: units that the sinks of a row lie in, at most.
        num_heads: of queries.
    """
    arena, estimated, unit = layer.table.arena, layer.estimated, layer.reader.unit
    dims, per_block = [spec.dim for spec in arena.specs], arena.block_size // unit
    estimate = layer.reader.estimate(estimated.arena.planes, layer.fitted, dims[0])
    if estimate is None:
        return None
    structs.set_ids(estimate, estimated.block_ids)
    budget, first = layer.budget, layer.first.slots if layer.first.is_padded else None
    return ChosenCall(
        [_sinks(layer, candidates, sink_units, dims), _recent(layer, candidates, dims)],
        chosen_segment(arena.planes, dims, unit),
        estimate,
        Units(
            unit=unit,
            length=candidates // unit,
            blocks=layer.table.block_ids,
            block_units=per_block,
            count=count,
            top_p=budget.top_p,
            is_mean=budget.group == "mean",
        ),
        UnitSinks(first, budget.num_sink_tokens, are_apart=False),
        rows=layer.batch_size,
        num_heads=num_heads,
        rest=Rest(layer.mean_value, layer.reader.unread) if layer.reader.unread else None,
    )


def _recent(layer: "SparseReadLayer", candidates: int, dims: list[int]) -> decode.Segment:
    """What follows the candidates, which end a block."""
    arena, ids = layer.table.arena, layer.table.block_ids[:, candidates // layer.table.arena.block_size :]
    length = layer.seen - candidates
    return decode.run_segment(arena.planes, ids, dims, arena.block_size, slot=candidates, length=length)


def _sinks(layer: "SparseReadLayer", candidates: int, sink_units: int, dims: list[int]) -> decode.Segment:
    """The units that sinks lie in, which padding lets begin at other slots in each row."""
    arena, ids, unit = layer.table.arena, layer.table.block_ids, layer.reader.unit
    size, length = arena.block_size, sink_units * unit
    if not layer.first.is_padded:
        return decode.run_segment(arena.planes, ids, dims, size, length=length)
    first = layer.first.slots.numpy()[:, None]
    units = first // unit + np.arange(sink_units)
    is_read = (units * unit < first + layer.budget.num_sink_tokens) & (units < candidates // unit)
    slots = np.where(is_read, units * unit, 0)
    places = np.take_along_axis(ids, slots // size, axis=1) * (size // unit) + slots % size // unit
    return decode.run_segment(arena.planes, places, dims, unit, length=length, slots=np.where(is_read, slots, -1))
