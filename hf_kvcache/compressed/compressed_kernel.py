"""The decode kernel's call for a step of compressed attention: what is read anyway, what is chosen from, summaries."""

from typing import TYPE_CHECKING

import numpy as np

from ..kernels import decode, structs
from ..kernels.choose import chosen_segment
from ..kernels.clusters import ClusterBudget, ClusterCall, ClusterIds

if TYPE_CHECKING:
    from .compressed_layer import CompressedLayer


def cluster_call(layer: "CompressedLayer", num_heads: int) -> ClusterCall:
    """The call, whose second segment is what follows the first block border behind the clustered tokens.

    Args:
        layer: with closed segments.
        num_heads: of queries.
    """
    arena, table, (clusters, members) = layer.table.arena, layer.table, layer.sides.values()
    dims, size = [spec.dim for spec in arena.specs], arena.block_size
    planes = clusters.arena.planes
    means = [planes[0:2], planes[2:4]] if layer.store.is_rounded else [planes[:1], planes[1:2]]
    summaries = structs.Segment(unit=size, group_length=size, stop=decode.NO_STOP)
    structs.set_ids(summaries, clusters.block_ids)
    summaries.key, summaries.value = (
        structs.run_store(codes, dim, size, *scale) for (codes, *scale), dim in zip(means, dims, strict=True)
    )
    budget, border = layer.budget, layer.border
    recent = decode.run_segment(
        arena.planes, table.block_ids[:, border // size :], dims, size, slot=border, length=layer.seen - border
    )
    return ClusterCall(
        [_single(layer, border, dims), recent],
        chosen_segment(arena.planes, dims, 1),
        decode.Segment(summaries, arena.specs[0].num_heads, ()),
        layer.mean_key,
        clusters.length,
        layer.store.columns(planes, members.arena.planes[0]),
        ClusterIds(clusters.block_ids, members.block_ids, table.block_ids, size),
        ClusterBudget(
            budget.num_units(layer.clustered_length, 1), budget.top_p, budget.group == "mean", spread=layer.spread
        ),
        rows=layer.batch_size,
        num_heads=num_heads,
    )


def _single(layer: "CompressedLayer", border: int, dims: list[int]) -> decode.Segment:
    """Sinks, other ones in each row, and what follows the clustered tokens up to a block border: token by token."""
    table, size = layer.table, layer.table.arena.block_size
    slots, is_read = (part.numpy() for part in layer.exact_slots(border))
    places = np.take_along_axis(table.block_ids, slots // size, axis=1) * size + slots % size
    seen = np.where(is_read, slots, -1)
    return decode.run_segment(table.arena.planes, places, dims, 1, length=slots.shape[1], slots=seen)
