"""A step that reads chosen units of tokens: estimates of all units, the choice, and attention, in the C++ kernel.

Units are tokens or runs of tokens. What they are estimated by lies in planes of its own, or is the stored keys. Units
are read where they lie, in their stored form: other ones for each row and KV head.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..codecs.base import StoredForm
from . import native, structs
from .decode import NO_STOP, Call, Segment, dense_segment, set_coded_stores


class Units(NamedTuple):
    """What is chosen from, and how much.

    Attributes:
        unit: tokens a unit.
        length: units a row.
        blocks: int64 `[B, N]`: where each block of units of a row lies, as in the segment of the chosen units.
        block_units: units a block.
        count: units that are chosen, at most.
        top_p: choose until what is read has this share of the estimated attention; None: choose `count`.
        is_mean: query heads agree by the mean of their shares; else by the largest.
    """

    unit: int
    length: int
    blocks: np.ndarray
    block_units: int
    count: int
    top_p: float | None
    is_mean: bool


class Rest(NamedTuple):
    """What stands for units that are not read: a value `[B, Hkv, 1, Dv]`, and its share of their estimated mass."""

    value: torch.Tensor
    share: float


class UnitSinks(NamedTuple):
    """First slot of each row (int64 `[B]`, or None: 0) and number of the tokens that no unit is chosen for.

    Where they are stored apart, units with other tokens besides may be chosen.
    """

    first_slot: torch.Tensor | None
    count: int
    are_apart: bool


def chosen_segment(planes: Sequence[torch.Tensor], dims: Sequence[int], unit: int) -> Segment:
    """Units of `unit` tokens that lie in planes of keys and of values `[H, slots, D]`, to be chosen."""
    struct = structs.Segment(unit=unit, group_length=unit, stop=NO_STOP)
    struct.key, struct.value = (structs.run_store(p, dim, unit) for p, dim in zip(planes, dims, strict=True))
    return Segment(struct, planes[0].shape[0], tuple(planes))


def unread_segment(dims: Sequence[int], unit: int, num_heads: int) -> Segment:
    """Units of `unit` tokens to be chosen, and no more than that."""
    struct = structs.Segment(unit=unit, group_length=unit)
    struct.key.dim, struct.value.dim = dims
    return Segment(struct, num_heads, ())


def coded_units(forms: Sequence[StoredForm], planes: Sequence[torch.Tensor], group_length: int, unit: int) -> Segment:
    """Units of `unit` tokens of encoded groups, without the sinks among them, to be chosen; see `coded_segment`."""
    struct = structs.Segment(unit=unit, hides_sinks=1, stop=NO_STOP)
    set_coded_stores(struct, forms, planes, group_length)
    return Segment(struct, planes[0].shape[0], (*planes, *forms))


class ChosenCall:
    """Attention to what is read anyway and to the units that are chosen, ready for any number of queries.

    It keeps no tensor alive that segments and the estimate point into, but their ids and slots.

    Args:
        exact: what is read anyway.
        chosen: where the units lie, without ids.
        estimate: what units are estimated by.
        units: what is chosen from.
        unit_sinks: what is not chosen.
        rows: of a query, and its heads.
        sinks: as for `decode.attend`.
        keeps_scores: the estimates of the chosen units, which are tokens, are their scores.
        rest: what stands for the units that are not read; None: nothing.
        alive: copies that the estimate points into, and that nothing else keeps.
    """

    def __init__(
        self,
        exact: Sequence[Segment],
        chosen: Segment,
        estimate: structs.Estimate,
        units: Units,
        unit_sinks: UnitSinks,
        *,
        rows: int,
        num_heads: int,
        sinks: tuple[torch.Tensor, int] | None = None,
        keeps_scores: bool = False,
        rest: Rest | None = None,
        alive: Sequence[torch.Tensor] = (),
    ):
        last = [] if rest is None else [dense_segment((rest.value, rest.value))]
        self.call = Call([*exact, chosen, *last], rows=rows, num_heads=num_heads, sinks=sinks)
        self._num_exact = len(exact)
        self._rest = self.call.segments[len(exact) + 1] if last else None
        self._exact_length = sum(segment.struct.length for segment in exact)
        self._shape = (rows, self.call.struct.heads, units.count)
        self._keeps_scores = keeps_scores
        self._alive = [part for segment in exact for part in segment.alive if isinstance(part, np.ndarray)]
        self._alive += [units.blocks, *alive]
        self._chosen = segment = self.call.segments[len(exact)]
        segment.ids_row, segment.ids_head = self._shape[1] * units.count, units.count
        self.struct = choice = structs.Choice(estimate=estimate, attention=ctypes.addressof(self.call.struct))
        choice.unit, choice.num_units, choice.count = units.unit, units.length, units.count
        choice.blocks, choice.blocks_row = units.blocks.ctypes.data, units.blocks.strides[0] // 8
        choice.block_units, choice.top_p, choice.is_mean = units.block_units, units.top_p or 0.0, units.is_mean
        choice.rest_share = 0.0 if rest is None else rest.share
        choice.num_sinks, choice.sinks_are_apart = unit_sinks.count, unit_sinks.are_apart
        if unit_sinks.first_slot is not None:
            choice.first_sink = unit_sinks.first_slot.data_ptr()
        # Whether a row may have fewer units than `count`, or sinks among those that are chosen.
        self._is_uneven = units.top_p is not None or unit_sinks.first_slot is not None

    def extend(self, index: int, length: int) -> None:
        """A segment that is read anyway has become `length` tokens long."""
        segment = self.call.segments[index]
        self._exact_length += length - segment.length
        segment.length = length

    def attend(
        self, query: torch.Tensor, scaling: float | None, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose and attend; arguments and errors as for `decode.attend`.

        Returns:
            `[B, 1, Hq, Dv]` in the query's dtype, and the first slot of each unit, int64 `[B, Hkv, K]`, -1 for none.
        """
        slots = self._run(native.library().hf_kvcache_read, query, scaling, mask)
        output = self.call.output.to(query.dtype)
        self.call.output = None  # of this step only
        return output, slots

    def choose(self, query: torch.Tensor, scaling: float | None, mask: torch.Tensor | None) -> torch.Tensor:
        """As `attend`, without attending: the slots alone."""
        slots = self._run(native.library().hf_kvcache_choose, query, scaling, mask)
        self.call.output = None
        return slots

    def _run(
        self, function: Callable, query: torch.Tensor, scaling: float | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if self._rest is not None:  # as visible as the newest token
            exact = self.call.segments[: self._num_exact]
            self._rest.slot = max(segment.slot + segment.length for segment in exact) - 1
        self.call.take(query, scaling, mask)
        choice, segment = self.struct, self._chosen
        found = torch.empty(2, *self._shape, dtype=torch.int64)
        choice.ids = segment.ids = found.data_ptr()
        choice.slots = choice.ids + found.stride(0) * 8
        segment.slots = choice.slots if mask is not None or self._is_uneven else None
        if self._keeps_scores:
            scores = torch.empty(*self._shape[:2], self.call.struct.queries, self._shape[2])
            choice.scores = segment.scores = scores.data_ptr()
            segment.scores_row = self._shape[2]
        if self._rest is not None:
            rest = torch.empty(*self._shape[:2], self.call.struct.queries)  # scores
            choice.rest = self._rest.scores = rest.data_ptr()
            self._rest.scores_row = 1
        function(ctypes.byref(choice))
        self.call.query = self.call.mask = None  # of this step only
        return found[1, :, :, : choice.taken]

    @property
    def read_length(self) -> int:
        """Tokens that each row and head has read in the last run, units that do not count included."""
        return self._exact_length + self.struct.taken * self.struct.unit
