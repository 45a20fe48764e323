"""Query-aware sparse reads over encoded tokens (techniques 7 and 8): a step decodes only what its query needs.

Tokens are stored as `coded_layer` stores them. A step reads the sinks, the exact tail and the encoded units of the
largest estimated mass: pages of `block_size` tokens of a codec's group, by summaries of their keys; or single tokens.
Those are chosen by scores with the encoded keys themselves, which needs no further bytes and leaves only values unread;
or, where keys would have to be decoded to be scored, by the 2-bit copy of `index`. Of a group, the chosen units alone
are decoded, also where its tokens were encoded together. The cache is complete: this saves reads on top of what the
codec saves. Prompts, and all forwards of several tokens, read everything.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from ..attention import can_merge, few_products
from ..kernels import decode, native, structs
from ..kernels.choose import ChosenCall, Units, UnitSinks, coded_units, unread_segment
from ..masks import as_float32, as_mask_for, restrict_mask, visible
from ..quantization.coded_layer import SLICE_LENGTH
from ..quantization.head_runs import HeadRun
from .sparse_coded_store import SparseCodedStore


class SparseCodedLayer(SparseCodedStore):
    """Attends to the sinks, the exact tail, and the encoded units that a query needs."""

    def _attend(self, base: Callable, module: nn.Module, query, tail, mask, args: tuple, kwargs: dict):
        tail_length = tail[0].shape[2]
        if query.shape[2] > 1 or self.budget.reads_all(self.coded_length, self.reader.unit, tail_length):
            return super()._attend(base, module, query, tail, mask, args, kwargs)
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        count = min(
            self.budget.num_units(self.coded_length, self.reader.unit, tail_length),
            self.coded_length // self.reader.unit,
        )
        has_kernel = self._has_kernel(query, mask)
        if has_kernel and self._have_forms and can_merge(base, kwargs):
            return self._attend_chosen(query, tail, mask, scale, count), None
        choose = self._choose_in_kernel if has_kernel and len(self.runs) == 1 else self._choose
        units, is_read = choose(query, tail, mask, scale, count)
        self._count_read(tail, [units.shape[2]] * len(self.runs))
        states, own = self._gathered(module, query, tail, mask, units, is_read)
        return self._attend_gathered(base, module, query, states, own, args, kwargs)

    def _has_kernel(self, query, mask) -> bool:
        """Whether the kernel scores all units: by their summaries, or by keys in their stored form."""
        is_scored = self.summaries is not None or all(run.forms[0] is not None for run in self.runs)
        if not is_scored or not decode.can_serve(query, mask, [shape.dim for shape in self.shapes]):
            return False
        if native.library() is None:
            native.warn_of_no_library()
        return native.library() is not None

    def _attend_chosen(self, query, tail, mask, scale: float, count: int) -> torch.Tensor:
        """All by the decode kernel, in its stored form; a call a run of heads."""
        mask = None if mask is None else as_float32(mask)
        outputs, taken = [], []
        for run in self.runs:
            planes = run.planes_of(self.coded.arena.planes)
            chosen = coded_units(run.forms, planes, self.group_length, self.reader.unit)
            own = run.queries(query, self.shapes[0].num_heads)
            output, slots = self._call(run, chosen, own, tail, count).attend(own, scale, mask)
            outputs.append(output)
            taken.append(slots.shape[2])
        self._count_read(tail, taken)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _choose_in_kernel(self, query, tail, mask, scale: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_choose`."""
        unit, run = self.reader.unit, self.runs[0]
        chosen = unread_segment([shape.dim for shape in self.shapes], unit, self.shapes[0].num_heads)
        mask = None if mask is None else as_float32(mask)
        query = run.queries(query, self.shapes[0].num_heads)
        slots = self._call(run, chosen, query, tail, count).choose(query, scale, mask)
        return slots.clamp(min=0) // unit, slots >= 0

    def _call(self, run: HeadRun, chosen, query, tail, count: int) -> ChosenCall:
        """Of these heads and their queries, to sinks, tail and units of `chosen`."""
        coded, unit, budget, size = self.coded, self.reader.unit, self.budget, self.group_length
        sinks = (self.sinks.first_slot, self.num_sink_tokens)
        fitted = [constant.contiguous() for constant in run.states(self.fitted)]
        return ChosenCall(
            self._exact_segments(run, tail),
            chosen,
            self._estimate(run, fitted),
            Units(
                *(unit, self.coded_length // unit, coded.block_ids, size // unit, count),
                *(budget.top_p, budget.group == "mean"),
            ),
            UnitSinks(*sinks, are_apart=True),
            rows=query.shape[0],
            num_heads=query.shape[1],
            sinks=sinks,
            keeps_scores=self.reader.reads_keys,
            alive=fitted,
        )

    def _estimate(self, run: HeadRun, fitted: list[torch.Tensor]) -> structs.Estimate:
        """What the units of these heads are estimated by: summaries of their keys, or the keys as they are stored."""
        size, estimated = self.group_length, self.summaries
        if estimated is None:
            estimated = self.coded
            planes = run.planes_of(estimated.arena.planes)[: len(run.planes[0])]
            estimate = structs.Estimate(key=structs.coded_store(run.forms[0], planes, size), per_slot=size)
        else:
            planes = [plane[run.heads] for plane in estimated.arena.planes]
            blocks = size // self.reader.block_size
            estimate = self.reader.estimate(planes, fitted, run.shapes[0].dim, blocks)
        structs.set_ids(estimate, estimated.block_ids)
        return estimate

    def _count_read(self, tail: list[torch.Tensor], taken: list[int]) -> None:
        """Note that each head of each run reads so many units, the summaries or keys of all, and what is exact."""
        unit, read = self.reader.unit, 0
        for run, units in zip(self.runs, taken, strict=True):
            of_run = list(zip(run.codecs, run.shapes, strict=True))
            keys, values = (codec.group_bytes(shape) * self.coded.length for codec, shape in of_run)
            most = [units * codec.unit_bytes(unit, shape) for codec, shape in of_run]
            # Keys by which units are chosen are all read.
            read += keys if self.reader.reads_keys else min(keys, most[0])
            read += min(values, most[1])
        if self.summaries is not None:
            read += self.summaries.length * self.summaries.arena.block_bytes
        exact = sum(state.nbytes for state in tail) + self.sinks.nbytes
        self.read_bytes = round(self.batch_size * read) + exact

    # --- the same without the kernel

    def _choose(self, query, tail, mask, scale: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Units `[B, H, K]` and which of them to read."""
        rows, heads, unit = query.shape[0], self.shapes[0].num_heads, self.reader.unit
        packed = query.view(rows, heads, -1, query.shape[-1]) * scale
        if self.summaries is None:
            slices = self._slices()
            scores = torch.cat([few_products(packed, self._decode(*part)[0]) for part in slices], dim=3)
        else:
            blocks = self.group_length // self.reader.block_size
            summaries = [plane.unflatten(3, (blocks, -1)).flatten(2, 3) for plane in self.summaries.materialize()]
            scores = self.reader.scores(packed, summaries, self.fitted)
        first = self.sinks.first_slot[:, None]
        units = torch.arange(scores.shape[3], device=self.device)
        is_hidden = (units * unit >= first) & ((units + 1) * unit <= first + self.num_sink_tokens)
        exact, seen = [self.sinks.states[0], tail[0]], self._exact_seen(mask)
        if mask is not None:
            is_hidden = is_hidden | ~visible(mask[:, 0, 0, : self.coded_length]).unflatten(1, (-1, unit)).any(dim=2)
        scores.masked_fill_(is_hidden[:, None, None], -math.inf)
        anyway = torch.cat([few_products(packed, keys) for keys in exact], dim=3)
        anyway.masked_fill_(~seen[:, None, None], -math.inf)
        return self.budget.choose(scores, anyway.logsumexp(dim=-1), count)

    def _exact_seen(self, mask: torch.Tensor | None) -> torch.Tensor:
        """Whether a step sees each of the sinks, which are in the tail at first, and of the tail: `[B, S + n]`."""
        sinks = self.sinks.slots
        tail = torch.arange(self.coded_length, self.seen, device=self.device).expand(len(sinks), -1)
        slots = torch.cat([sinks, tail], dim=1)
        is_there = torch.cat([sinks < self.coded_length, torch.ones_like(tail, dtype=torch.bool)], dim=1)
        return is_there if mask is None else is_there & self._columns(visible(mask), slots)

    def _columns(self, mask: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The columns of a mask `[B or 1, 1, 1, T]` that belong to slots `[B, ...]`, as these."""
        flat = slots.flatten(1).clamp(max=mask.shape[-1] - 1)
        return mask[:, 0, 0].expand(len(flat), -1).gather(1, flat).view(slots.shape)

    def _slices(self) -> list[tuple[int, int]]:
        """The encoded groups, as many at a time as are decoded together."""
        step = max(1, SLICE_LENGTH // self.group_length)
        return [(start, min(start + step, self.coded.stop)) for start in range(0, self.coded.stop, step)]

    def _gathered(self, module, query, tail, mask, units: torch.Tensor, is_read: torch.Tensor):
        """Keys and values of sinks, chosen units and tail `[B, H, n, D]`, and their mask `[B, H, 1, n]`."""
        unit, heads = self.reader.unit, units.shape[1]
        slots = self._slots_of(units)
        states = [
            torch.cat(parts, dim=2) for parts in zip(self.sinks.states, self._decoded_units(units), tail, strict=True)
        ]
        first = self.sinks.first_slot[:, None, None]
        is_sink = (slots >= first) & (slots < first + self.num_sink_tokens)
        is_there = is_read.repeat_interleave(unit, dim=2) & ~is_sink
        exact = self._exact_seen(None).unsqueeze(1).expand(-1, heads, -1)
        count = self.num_sink_tokens
        allowed = torch.cat([exact[..., :count], is_there, exact[..., count:]], dim=2).unsqueeze(2)
        if mask is None:
            return states, as_mask_for(module, allowed, query.dtype)
        exact_slots = torch.cat(
            [self.sinks.slots, torch.arange(self.coded_length, self.seen, device=self.device).expand(len(slots), -1)], 1
        )
        exact_slots = exact_slots.unsqueeze(1).expand(-1, heads, -1)
        every = torch.cat([exact_slots[..., :count], slots, exact_slots[..., count:]], dim=2)
        return states, restrict_mask(module, self._columns(mask, every).unsqueeze(2), allowed, query.dtype)

    def _decoded_units(self, units: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values `[B, H, K * unit, D]` of the chosen units, and of nothing else."""
        unit, size = self.reader.unit, self.group_length
        first, split = units * unit, self._num_key_planes
        groups = self.coded.device_ids[:, None].expand(-1, units.shape[1], -1).gather(2, first // size)
        planes = self.coded.arena.planes
        keys, values = (
            codec.decode_units(part, groups, first % size, unit, shape)
            for codec, part, shape in zip(self.codecs, (planes[:split], planes[split:]), self.shapes, strict=True)
        )
        if self.rotary is not None:
            # A head of a row is a row of its own, with positions of its own.
            positions = (self._slots_of(units) - self.sinks.first_slot[:, None, None]).clamp(min=0)
            turned = self.rotary.turn(keys.flatten(0, 1).unsqueeze(1), positions.flatten(0, 1))
            keys = turned.view(keys.shape).to(keys.dtype)
        return [keys, values]

    def _slots_of(self, units: torch.Tensor) -> torch.Tensor:
        """The slots `[B, H, K * unit]` of units `[B, H, K]`."""
        unit = self.reader.unit
        return (units.unsqueeze(3) * unit + torch.arange(unit, device=self.device)).flatten(2)
