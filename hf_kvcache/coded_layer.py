"""KV quantization (technique 8): old tokens of a layer in a codec's few bits, sinks and the newest tokens exact.

Cuts bytes a value. Approximate; how much is the codec's business (`hf_kvcache.codecs`). A group of tokens is encoded
once, when it leaves the exact tail, and its bytes never change again. A prompt attends in full precision before it is
encoded. A decode step reads the stored form: dense keys and values of the whole context never exist.
Paper: Liu et al. 2024, KIVI, https://arxiv.org/abs/2402.02750.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from .attending_layer import AttendingLayer
from .attention import Piece, attend_merged, can_merge
from .blocks import Arena, BlockTable, load_table, table_state
from .codecs.base import Codec, Shape, StoredForm
from .kernels import decode, native, triton_kernel
from .layer import LayerContext, check_crop
from .layer_state import LayerState
from .masks import join_masks, restrict_mask
from .rotary import Rotary
from .sinks import Sinks

# Tokens decoded at a time where the kernel cannot read the stored form.
SLICE_LENGTH = 2048


class CodedLayer(AttendingLayer):
    """Groups of encoded tokens, then an exact tail of `residual_length` to `residual_length + group_length` tokens.

    Slots `[0, coded_length)` are encoded, `[coded_length, seen)` exact in blocks; the sinks of each row are kept
    exactly besides, and their encoded copies are never read.

    Args:
        context: where the blocks come from.
        key_codec: encodes keys.
        value_codec: encodes values, in groups of as many tokens.
        residual_length: newest tokens that stay exact. Tokens, at least 0.
        num_sink_tokens: first real tokens of each row that stay exact. Tokens, at least 0.
        rotary: given for a key codec of keys as they were before their rotary embedding.
    """

    name = "a quantized cache"

    def __init__(
        self,
        context: LayerContext,
        *,
        key_codec: Codec,
        value_codec: Codec,
        residual_length: int,
        num_sink_tokens: int,
        rotary: Rotary | None = None,
    ):
        super().__init__(context)
        assert key_codec.group_length == value_codec.group_length, "keys and values are encoded together"
        self.codecs = (key_codec, value_codec)
        self.group_length = key_codec.group_length
        self.residual_length = residual_length
        self.num_sink_tokens = num_sink_tokens
        self.rotary = rotary
        self._clear()

    def _clear(self) -> None:
        self.coded: BlockTable | None = None
        self.sinks: Sinks | None = None
        self.shapes: tuple[Shape, ...] = ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        states = (key_states, value_states)
        self.shapes = tuple(Shape(s.shape[1], s.shape[-1], s.dtype) for s in states)
        planes = [codec.planes(shape) for codec, shape in zip(self.codecs, self.shapes, strict=True)]
        self._num_key_planes = len(planes[0])
        # One slot of this arena is one group of tokens.
        arena = Arena(self.context.pool(self.device), (*planes[0], *planes[1]), block_size=1)
        self.coded = BlockTable(arena, key_states.shape[0])
        self.sinks = Sinks(states, self.num_sink_tokens)

    @property
    def coded_length(self) -> int:
        """The slot where the exact tail begins: those before it are encoded."""
        return 0 if self.coded is None else self.coded.stop * self.group_length

    @property
    def stored_length(self) -> int:
        return super().stored_length + (0 if self.coded is None else self.coded.length * self.group_length)

    @property
    def tables(self) -> list[BlockTable]:
        return [] if self.table is None else [self.table, self.coded]

    @property
    def marginal_bits(self) -> float:
        return 8 * self.coded.arena.block_bytes / (self.group_length * self.values_per_token)

    # --- forward

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

    def _encode(self, tail: list[torch.Tensor], groups: int) -> None:
        if groups:
            states = [state[:, :, : groups * self.group_length] for state in tail]
            states = self.sinks.covered(states, self.coded_length)
            states[0] = self._turn(states[0], self.coded_length, -1)
            encoded = [codec.encode(state) for codec, state in zip(self.codecs, states, strict=True)]
            self.coded.append([*encoded[0], *encoded[1]])

    def _attend(self, base, module, query, tail, mask, args: tuple, kwargs: dict):
        coded_length = self.coded_length
        self.read_bytes = sum(state.nbytes for state in tail)
        if not coded_length:
            return base(module, query, *tail, self._own_mask(module, query, mask, 0, self.seen), *args, **kwargs)
        self.read_bytes += self.coded.length * self.coded.arena.block_bytes * self.batch_size + self.sinks.nbytes
        scaling = kwargs.get("scaling")
        if not can_merge(base, kwargs):
            return self._attend_dense(base, module, query, tail, mask, args, kwargs)
        forms = [codec.stored_form(shape) for codec, shape in zip(self.codecs, self.shapes, strict=True)]
        if None not in forms and decode.can_serve(query, mask, [form.dim for form in forms]):
            if native.library() is not None:
                return self._attend_stored(forms, module, query, tail, mask, scaling), None
            native.warn_of_no_library()
        if None not in forms and (kernel := triton_kernel(query.device)) and kernel.can_serve(query, mask):
            return self._attend_in_triton(kernel, forms, module, query, tail, mask, scaling), None
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

    def _encoded(self, start: int, stop: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        first = self.coded.start
        planes = [plane[:, :, start - first : stop - first] for plane in self.coded.materialize()]
        return planes[: self._num_key_planes], planes[self._num_key_planes :]

    def _decode(self, start: int, stop: int) -> list[torch.Tensor]:
        """Keys and values `[B, H, (stop - start) * group_length, D]` of the encoded groups `[start, stop)`."""
        encoded = self._encoded(start, stop)
        keys, values = (c.decode(e, s) for c, e, s in zip(self.codecs, encoded, self.shapes, strict=True))
        return [self._turn(keys, start * self.group_length, 1), values]

    def _turn(self, keys: torch.Tensor, start: int, direction: int) -> torch.Tensor:
        """Take away (-1) or put back (1) the rotary embedding of the slots from `start`, if keys are coded without it.

        A position is the distance from the row's first real token. Were it another in the model, the two turns would
        still undo each other.
        """
        if self.rotary is None:
            return keys
        slots = torch.arange(start, start + keys.shape[2], device=keys.device)
        positions = (slots - self.sinks.first_slot[:, None]).clamp(min=0)
        return self.rotary.turn(keys, direction * positions).to(keys.dtype)

    def _attend_stored(self, forms: list[StoredForm], module, query, tail, mask, scaling) -> torch.Tensor:
        """One softmax over encoded groups, tail and sinks, each read where and as it is stored."""
        coded, coded_length, sinks = self.coded, self.coded_length, None
        segments = [
            decode.coded_segment(forms, coded.arena.planes, coded.block_ids, self.group_length, slot=self._coded_slot),
            decode.dense_segment(tail, slot=coded_length),
        ]
        if self.num_sink_tokens:
            sinks = (self.sinks.first_slot, self.num_sink_tokens)
            segments.append(decode.dense_segment(self.sinks.states, first_slot=sinks[0], stop=coded_length))
        mask = self._own_mask(module, query, mask, 0, self.seen)
        return decode.attend(query, segments, scaling=scaling, mask=mask, sinks=sinks)

    def _attend_in_triton(self, kernel, forms: list[StoredForm], module, query, tail, mask, scaling) -> torch.Tensor:
        """The encoded groups by the kernel, sinks and tail as they are, merged."""
        attended = kernel.attend_coded(
            query,
            forms,
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

    # --- contract

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys as attention sees them, decoded: a copy, for looking at."""
        return self._whole(0)

    @property
    def values(self) -> torch.Tensor | None:
        return self._whole(1)

    def _whole(self, index: int) -> torch.Tensor | None:
        if self.table is None:
            return None
        return torch.cat(
            [self._decode(self.coded.start, self.coded.stop)[index], self.table.materialize()[index]], dim=2
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        count = check_crop(self, tokens_to_remove)
        if self.table is None:
            return
        left = self.seen - count
        if left >= self.coded_length:
            self.table.crop(count)
        else:
            # Part of a group stays: it goes back to the tail as attention has seen it, decoded.
            groups, rest = divmod(left, self.group_length)
            kept = [state[:, :, :rest] for state in self._decode(groups, groups + 1)]
            self.coded.crop(self.coded.stop - groups)
            self.table.restart(left - rest)
            self.table.append(kept)
        self.seen = left
        self.sinks.take_back(left)
        self._give_back_memory()

    def select_rows(self, rows: np.ndarray) -> None:
        if self.table is not None:
            self.coded.select_rows(rows)
            self.sinks.select_rows(rows)
        super().select_rows(rows)

    def fork(self) -> "CodedLayer":
        forked = super().fork()
        if self.table is not None:
            forked.coded, forked.sinks = self.coded.fork(), self.sinks.fork()
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        if self.table is not None:
            self.coded = self.coded.to(self.context.pool(device))
            self.sinks.to(device)

    def state(self) -> LayerState:
        state = super().state()
        if self.table is not None:
            state.put("coded", table_state(self.coded))
            state.put("sinks", self.sinks.state())
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        if self.table is not None:
            load_table(self.coded, state.part("coded"))
            self.sinks.load_state(state.part("sinks"))
            self._give_back_memory()

    def reset(self) -> None:
        super().reset()
        self._clear()
