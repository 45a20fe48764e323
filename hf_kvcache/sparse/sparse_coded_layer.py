"""Query-aware sparse reads over encoded tokens (techniques 7 and 8): a step decodes only what its query needs.

Tokens are stored as `coded_layer` stores them. A step reads the sinks, the exact tail and the encoded units of the
largest estimated mass: pages of `block_size` tokens of a codec's group, by summaries of their keys; or single tokens,
by scores with the encoded keys themselves, which needs no further bytes. Only values are left unread then.
The cache is complete: this saves reads on top of what the codec saves. Prompts, and all forwards of several tokens,
read everything.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from ..attention import can_merge, few_products
from ..codecs.base import StoredForm
from ..kernels import decode, native, structs
from ..kernels.choose import ChosenCall, Units, UnitSinks, coded_units
from ..masks import as_float32, as_mask_for, restrict_mask, visible
from ..quantization.coded_layer import SLICE_LENGTH
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
        forms = [codec.stored_form(shape) for codec, shape in zip(self.codecs, self.shapes, strict=True)]
        if can_merge(base, kwargs) and self._has_kernel(query, mask, forms):
            return self._attend_chosen(forms, query, tail, mask, scale, count), None
        units, is_read = self._choose(query, tail, mask, scale, count)
        self._count_read(tail, units.shape[2])
        states, own = self._gathered(module, query, tail, mask, units, is_read)
        return self._attend_gathered(base, module, query, states, own, args, kwargs)

    def _has_kernel(self, query, mask, forms: list[StoredForm | None]) -> bool:
        if None in forms or not decode.can_serve(query, mask, [form.dim for form in forms]):
            return False
        if native.library() is None:
            native.warn_of_no_library()
        return native.library() is not None

    def _attend_chosen(self, forms, query, tail, mask, scale: float, count: int) -> torch.Tensor:
        """All by the decode kernel, in its stored form."""
        coded, unit, budget = self.coded, self.reader.unit, self.budget
        sinks = (self.sinks.first_slot, self.num_sink_tokens)
        exact = [
            decode.dense_segment(tail, slot=self.coded_length),
            decode.dense_segment(self.sinks.states, first_slot=sinks[0], stop=self.coded_length),
        ]
        pages = self.group_length // unit
        if self.summaries is None:
            key = structs.coded_store(forms[0], coded.arena.planes[: self._num_key_planes], self.group_length)
            estimate, estimated = structs.Estimate(key=key, per_slot=self.group_length), coded
        else:
            estimated = self.summaries
            estimate = self.reader.estimate(estimated.arena.planes, self.fitted, forms[0].dim, pages)
        structs.set_ids(estimate, estimated.block_ids)
        call = ChosenCall(
            exact if self.num_sink_tokens else exact[:1],
            coded_units(forms, coded.arena.planes, self.group_length, unit),
            estimate,
            Units(
                *(unit, self.coded_length // unit, coded.block_ids, pages, count),
                *(budget.top_p, budget.group == "mean"),
            ),
            UnitSinks(*sinks, are_apart=True),
            rows=self.batch_size,
            num_heads=query.shape[1],
            sinks=sinks,
            keeps_scores=self.reader.reads_keys,
        )
        output, slots = call.attend(query, scale, None if mask is None else as_float32(mask))
        self._count_read(tail, slots.shape[2])
        return output

    def _count_read(self, tail: list[torch.Tensor], units: int) -> None:
        """Note that each row and head reads so many units, the summaries or keys of all, and what is exact."""
        unit, of_codecs = self.reader.unit, list(zip(self.codecs, self.shapes, strict=True))
        keys, values = (codec.group_bytes(shape) * self.coded.length for codec, shape in of_codecs)
        most = [units * codec.unit_bytes(unit, shape) for codec, shape in of_codecs]
        # Keys by which units are chosen are all read.
        read = keys if self.reader.reads_keys else min(keys, most[0])
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
