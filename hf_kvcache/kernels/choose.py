"""A step that reads chosen units of tokens: estimates of all units, the choice, and attention, in the C++ kernel.

Units are tokens or runs of tokens. What they are estimated by lies in planes of its own, or is the stored keys. Units
are read where they lie, in their stored form: other ones for each row and KV head.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from . import native, structs
from .decode import Call, Segment

_NO_STOP = 2**62


class Units(NamedTuple):
    """What is chosen from.

    Attributes:
        segment: what estimates the units, one "token" each, by its keys alone.
        query: float32 `[B, Hkv, G, dim]`: what the units are estimated with.
        bias: float32 `[B, Hkv, G]`, added to all estimates, or None.
        unit: tokens a unit.
        length: units a row.
        blocks: int64 `[B, N]`: where each block of units of a row lies.
        block_units: units a block.
    """

    segment: Segment
    query: torch.Tensor
    bias: torch.Tensor | None
    unit: int
    length: int
    blocks: np.ndarray
    block_units: int


class Amount(NamedTuple):
    """`count` units at most; with `top_p`, until what is read has this share of the estimated attention.

    Query heads agree by the mean of their shares, or by the largest.
    """

    count: int
    top_p: float | None
    is_mean: bool


def summary_segment(store: structs.Store, ids: np.ndarray, per_slot: int, length: int, alive: tuple) -> Segment:
    """Keys alone, `per_slot` of them a slot of their planes; `ids` int64 `[B, N]` says where the slots lie."""
    ids = np.ascontiguousarray(ids)
    struct = structs.Segment(ids=ids.ctypes.data, ids_row=ids.shape[1], unit=per_slot, group_length=per_slot)
    struct.key, struct.length, struct.stop = store, length, _NO_STOP
    return Segment(struct, 1, (ids, *alive))


def chosen_segment(planes: Sequence[torch.Tensor], dims: Sequence[int], unit: int) -> Segment:
    """Units of `unit` tokens that lie in planes of keys and of values `[H, slots, D]`, to be chosen."""
    struct = structs.Segment(unit=unit, group_length=unit, stop=_NO_STOP)
    struct.key, struct.value = (structs.run_store(p, dim, unit) for p, dim in zip(planes, dims, strict=True))
    return Segment(struct, planes[0].shape[0], tuple(planes))


class Chosen:
    """Attention to what is read anyway and to the units that are chosen.

    Args:
        call: all segments; the last one is that of the chosen units, without ids.
        units: what is chosen from.
        first_sink: int64 `[B]`, first slot of the sinks of each row, or None: 0.
        num_sinks: no unit with one of them is chosen; with `sinks_are_apart`, none with nothing else.
    """

    def __init__(
        self,
        call: Call,
        units: Units,
        *,
        first_sink: torch.Tensor | None,
        num_sinks: int,
        sinks_are_apart: bool,
    ):
        self.call, self.units = call, units
        rows, heads, queries, dim = units.query.shape
        self._query = units.query.float().contiguous()
        self._segment = units.segment.struct
        self._estimate = structs.Call(rows=rows, heads=heads, queries=queries, num_segments=1, scaling=1.0)
        self._estimate.num_threads, self._estimate.query = call.struct.num_threads, self._query.data_ptr()
        self._estimate.segments = ctypes.addressof(self._segment)
        self.struct = struct = structs.Choice(unit=units.unit, num_units=units.length, num_sinks=num_sinks)
        struct.attention, struct.estimate = ctypes.addressof(call.struct), ctypes.addressof(self._estimate)
        if units.bias is not None:
            self._bias = units.bias.float().contiguous()
            struct.bias = self._bias.data_ptr()
        if first_sink is not None:
            struct.first_sink = first_sink.data_ptr()
        struct.sinks_are_apart = sinks_are_apart
        self._blocks = blocks = np.ascontiguousarray(units.blocks)
        struct.blocks, struct.blocks_row, struct.block_units = blocks.ctypes.data, blocks.shape[1], units.block_units

    def attend(self, amount: Amount, *, hides: bool, keeps_scores: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose and attend.

        Args:
            amount: of units.
            hides: whether a mask, sinks or a row with fewer units leave out some of what is chosen.
            keeps_scores: the estimates of the chosen units, which are tokens, are their scores.

        Returns:
            `[B, 1, Hq, Dv]` in float32, and the first slot of each chosen unit, int64 `[B, Hkv, K]`, -1 for none.
        """
        rows, heads, queries, _ = self.units.query.shape
        struct, segment = self.struct, self.call.segments[len(self.call.segments) - 1]
        struct.count, struct.top_p, struct.is_mean = amount.count, amount.top_p or 0.0, amount.is_mean
        ids, slots = torch.empty(2, rows, heads, amount.count, dtype=torch.int64)
        struct.ids, struct.slots = ids.data_ptr(), slots.data_ptr()
        if keeps_scores:
            scores = torch.empty(rows, heads, queries, amount.count)
            struct.scores = segment.scores = scores.data_ptr()
            segment.scores_row = amount.count
        library = native.library()
        library.hf_kvcache_choose(ctypes.byref(struct))
        segment.ids, segment.ids_row, segment.ids_head = ids.data_ptr(), heads * amount.count, amount.count
        segment.length = struct.taken * self.units.unit
        if hides or amount.top_p is not None:
            segment.slots = slots.data_ptr()
        library.hf_kvcache_decode(ctypes.byref(self.call.struct))
        return self.call.output, slots[..., : struct.taken]
