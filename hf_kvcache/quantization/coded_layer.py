"""KV quantization (technique 8): old tokens of a layer in a codec's few bits, sinks and the newest tokens exact.

Cuts bytes a value. Approximate; how much is the codec's business (`hf_kvcache.codecs`). A group of tokens is encoded
once, when it leaves the exact tail, and its bytes never change again. A prompt attends in full precision before it is
encoded. A decode step reads the stored form: dense keys and values of the whole context never exist.
Paper: Liu et al. 2024, KIVI, https://arxiv.org/abs/2402.02750.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..attention import Piece, attend_merged, can_merge
from ..kernels import decode, native, triton_kernel
from ..masks import join_masks, restrict_mask
from .coded_store import CodedStore
from .head_runs import HeadRun

# Tokens decoded at a time where the kernel cannot read the stored form.
SLICE_LENGTH = 2048


class CodedLayer(CodedStore):
    """Attends to what a `CodedStore` holds: in its stored form where a kernel can read it, else a slice at a time."""

    def _attend_and_store(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        return self._advance(states, mask, lambda tail: self._attend(base, module, query, tail, mask, args, kwargs))

    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        states = self._prepare(key_states, value_states)
        self.seen += states[0].shape[2]
        self._advance(states, None, lambda tail: None)

    def _advance(self, states: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None, run: Callable):
        """Store the new tokens, `run` on the exact tail that they end, and encode what has left it."""
        count = states[0].shape[2]
        self.sinks.capture(states, self.seen - count, mask)
        surplus = self.table.length + count - self.residual_length
        groups = 0 if self.record_past else max(0, surplus // self.group_length)
        if groups <= 2:
            self.table.append(states)
            tail = self.table.materialize()
            output = run(tail)
            self._encode(tail, groups)
            self.table.drop_front(self.coded_length)
        else:
            # A prompt: encode it from the states at hand, so that it is never stored in full precision.
            tail = [torch.cat(pair, dim=2) for pair in zip(self.table.materialize(), states, strict=True)]
            output = run(tail)
            self._encode(tail, groups)
            self.table.restart(self.coded_length)
            self.table.append([state[:, :, groups * self.group_length :] for state in tail])
        return output

    def _attend(self, base, module, query, tail, mask, args: tuple, kwargs: dict):
        coded_length = self.coded_length
        self.read_bytes = sum(state.nbytes for state in tail)
        if not coded_length:
            return base(module, query, *tail, self._own_mask(module, query, mask, 0, self.seen), *args, **kwargs)
        self.read_bytes += self.coded.length * self.coded.arena.block_bytes * self.batch_size + self.sinks.nbytes
        scaling = kwargs.get("scaling")
        if not can_merge(base, kwargs):
            return self._attend_dense(base, module, query, tail, mask, args, kwargs)
        if self._have_forms and decode.can_serve(query, mask, [shape.dim for shape in self.shapes]):
            if native.library() is not None:
                return self._attend_stored(module, query, tail, mask, scaling), None
            native.warn_of_no_library()
        is_alike = self._have_forms and len(self.runs) == 1
        if is_alike and (kernel := triton_kernel(query.device)) and kernel.can_serve(query, mask):
            return self._attend_in_triton(kernel, module, query, tail, mask, scaling), None
        return attend_merged(query, self._pieces(module, query, tail, mask), scaling), None

    def _attend_dense(self, base, module, query, tail, mask, args: tuple, kwargs: dict):
        """For attention with its own softmax (softcap, sink logits): decode this layer, attend, forget."""
        groups = [group[0] for group in self._pieces(module, query, tail, mask)]
        keys, values = (torch.cat([getattr(p, name) for p in groups], dim=2) for name in ("key", "value"))
        joined = join_masks(module, query, [p.mask for p in groups], [p.key.shape[2] for p in groups])
        return base(module, query, keys, values, joined, *args, **kwargs)

    def _pieces(self, module, query, tail, mask) -> Iterator[list[Piece]]:
        """Sinks and tail, then the encoded tokens a slice at a time; each row is in every group of pieces."""
        yield from self._exact_pieces(module, query, tail, mask)
        size = self.group_length
        step = max(1, SLICE_LENGTH // size)
        for start in range(self.coded.start, self.coded.stop, step):
            stop = min(start + step, self.coded.stop)
            own = self._own_mask(module, query, mask, start * size, stop * size)
            if start * size < self.sinks.end and self.num_sink_tokens:
                own = restrict_mask(module, own, self._without_sinks(start * size, stop * size, query), query.dtype)
            yield [Piece(*self._decode(start, stop), own)]

    def _exact_pieces(self, module, query, tail, mask) -> Iterator[list[Piece]]:
        coded_length = self.coded_length
        if self.num_sink_tokens:
            own = None if mask is None else self.sinks.own_mask(mask)
            is_coded = (self.sinks.slots < coded_length)[:, None, None, :].expand(-1, 1, query.shape[2], -1)
            whole = own is None and self.sinks.end <= coded_length
            yield [Piece(*self.sinks.states, None if whole else restrict_mask(module, own, is_coded, query.dtype))]
        yield [Piece(*tail, self._own_mask(module, query, mask, coded_length, self.seen))]

    def _own_mask(self, module, query, mask, start: int, stop: int) -> torch.Tensor | None:
        """What the queries see of the slots `[start, stop)`."""
        return None if mask is None else mask[..., start:stop]

    def _without_sinks(self, start: int, stop: int, query: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(start, stop, device=self.device)
        first = self.sinks.first_slot[:, None]
        allowed = (slots < first) | (slots >= first + self.num_sink_tokens)
        return allowed[:, None, None, :].expand(-1, 1, query.shape[2], -1)

    @property
    def _have_forms(self) -> bool:
        """Whether a kernel can read all heads as they are stored."""
        return all(form is not None for run in self.runs for form in run.forms)

    def _attend_stored(self, module, query, tail, mask, scaling) -> torch.Tensor:
        """One softmax over encoded groups, tail and sinks, each read as it is stored; a call for each run of heads."""
        mask = self._own_mask(module, query, mask, 0, self.seen)
        sinks = (self.sinks.first_slot, self.num_sink_tokens) if self.num_sink_tokens else None
        outputs = []
        for run in self.runs:
            coded, size = self.coded, self.group_length
            planes = run.planes_of(coded.arena.planes)
            segments = [
                decode.coded_segment(run.forms, planes, coded.block_ids, size, slot=self._coded_slot),
                *self._exact_segments(run, tail),
            ]
            own = run.queries(query, self.shapes[0].num_heads)
            outputs.append(decode.attend(own, segments, scaling=scaling, mask=mask, sinks=sinks))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _exact_segments(self, run: HeadRun, tail: list[torch.Tensor]) -> list[decode.Segment]:
        """The tail of these heads, and their sinks, those that are in the tail at first left out."""
        coded_length = self.coded_length
        segments = [decode.dense_segment(run.states(tail), slot=coded_length)]
        if self.num_sink_tokens:
            sinks, first = run.states(self.sinks.states), self.sinks.first_slot
            segments.append(decode.dense_segment(sinks, first_slot=first, stop=coded_length))
        return segments

    def _attend_in_triton(self, kernel, module, query, tail, mask, scaling) -> torch.Tensor:
        """The encoded groups by the kernel, sinks and tail as they are, merged."""
        attended = kernel.attend_coded(
            query,
            self.runs[0].forms,
            self.coded.arena.planes,
            self.coded.block_ids,
            self.group_length,
            slot=self._coded_slot,
            scaling=scaling,
            mask=self._own_mask(module, query, mask, 0, self.seen),
            sinks=(self.sinks.first_slot, self.num_sink_tokens) if self.num_sink_tokens else None,
        )
        return attend_merged(query, self._exact_pieces(module, query, tail, mask), scaling, [attended])

    @property
    def _coded_slot(self) -> int:
        """The slot of the first token that is encoded."""
        return self.coded.start * self.group_length
