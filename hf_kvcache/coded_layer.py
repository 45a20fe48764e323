"""KV quantization (technique 8): old tokens of a layer in a codec's few bits, sinks and the newest tokens exact.

Cuts bytes a value. Approximate; how much is the codec's business (`hf_kvcache.codecs`). A group of tokens is encoded
once, when it leaves the exact tail, and its bytes never change again. A prompt attends in full precision before it is
encoded. A decode step reads the stored form: dense keys and values of the whole context never exist.
Paper: Liu et al. 2024, KIVI, https://arxiv.org/abs/2402.02750.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from .attending_layer import AttendingLayer
from .attention import Piece, attend_merged, can_merge
from .blocks import Arena, BlockTable
from .codecs.base import Codec, FusedKeyCodec, FusedValueCodec, Shape
from .kernels.compiled import CannotCompileError, is_usable
from .layer import LayerContext, check_crop
from .masks import join_masks, restrict_mask, visible
from .rotary import Rotary
from .sinks import Sinks

# Tokens decoded at a time where the stored form cannot be multiplied as it is.
SLICE_LENGTH = 2048
# Below this many coded tokens a compiled kernel costs more than it saves.
MIN_FUSED_LENGTH = 256


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
        """Tokens a row that are encoded."""
        return 0 if self.coded is None else self.coded.length * self.group_length

    @property
    def stored_length(self) -> int:
        return self.coded_length + super().stored_length

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
            return base(module, query, *tail, mask, *args, **kwargs)
        self.read_bytes += self.coded.length * self.coded.arena.block_bytes * self.batch_size + self.sinks.nbytes
        scaling = kwargs.get("scaling")
        if not can_merge(base, kwargs):
            return self._attend_dense(base, module, query, tail, mask, args, kwargs)
        if query.shape[2] == 1 and self._can_fuse(coded_length):
            with contextlib.suppress(CannotCompileError):
                return self._attend_fused(query, tail, mask, scaling), None
        return attend_merged(query, self._pieces(module, query, tail, mask), scaling), None

    def _attend_dense(self, base, module, query, tail, mask, args: tuple, kwargs: dict):
        """For attention with its own softmax (softcap, sink logits): decode this layer, attend, forget."""
        groups = [group[0] for group in self._pieces(module, query, tail, mask)]
        keys, values = (torch.cat([getattr(p, name) for p in groups], dim=2) for name in ("key", "value"))
        joined = join_masks(module, query, [p.mask for p in groups], [p.key.shape[2] for p in groups])
        return base(module, query, keys, values, joined, *args, **kwargs)

    def _pieces(self, module, query, tail, mask) -> Iterator[list[Piece]]:
        """Sinks, then the encoded tokens a slice at a time, then the tail; each row is in every group of pieces."""
        coded_length, size = self.coded_length, self.group_length
        if self.num_sink_tokens:
            own = None if mask is None else self.sinks.own_mask(mask)
            is_coded = (self.sinks.slots < coded_length)[:, None, None, :].expand(-1, 1, query.shape[2], -1)
            whole = own is None and self.sinks.end <= coded_length
            yield [Piece(*self.sinks.states, None if whole else restrict_mask(module, own, is_coded, query.dtype))]
        step = max(1, SLICE_LENGTH // size)
        for start in range(0, self.coded.length, step):
            stop = min(start + step, self.coded.length)
            own = None if mask is None else mask[..., start * size : stop * size]
            if start * size < self.sinks.end and self.num_sink_tokens:
                own = restrict_mask(module, own, self._without_sinks(start * size, stop * size, query), query.dtype)
            yield [Piece(*self._decode(start, stop), own)]
        yield [Piece(*tail, None if mask is None else mask[..., coded_length : self.seen])]

    def _without_sinks(self, start: int, stop: int, query: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(start, stop, device=self.device)
        first = self.sinks.first_slot[:, None]
        allowed = (slots < first) | (slots >= first + self.num_sink_tokens)
        return allowed[:, None, None, :].expand(-1, 1, query.shape[2], -1)

    def _encoded(self, start: int, stop: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        planes = [plane[:, :, start:stop] for plane in self.coded.materialize()]
        return planes[: self._num_key_planes], planes[self._num_key_planes :]

    def _decode(self, start: int, stop: int) -> list[torch.Tensor]:
        """Keys and values `[B, H, (stop - start) * group_length, D]` of some encoded groups."""
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

    def _can_fuse(self, coded_length: int) -> bool:
        is_fused = isinstance(self.codecs[0], FusedKeyCodec) and isinstance(self.codecs[1], FusedValueCodec)
        return is_fused and is_usable() and coded_length >= MIN_FUSED_LENGTH and self.sinks.end <= coded_length

    def _attend_fused(self, query, tail, mask, scaling: float | None) -> torch.Tensor:
        """One softmax over sinks, encoded groups and tail, with the encoded ones multiplied in their stored form."""
        rows, heads, _, dim = query.shape
        kv_heads, coded_length = self.shapes[0].num_heads, self.coded_length
        packed = query.view(rows, kv_heads, -1, dim) * (dim**-0.5 if scaling is None else scaling)
        keys, values = self._encoded(0, self.coded.length)
        coded_scores = self.codecs[0].scores(packed, keys)
        if mask is not None:
            coded_scores.masked_fill_(~visible(mask[..., :coded_length]), float("-inf"))
        if self.num_sink_tokens:
            index = self.sinks.slots[:, None, None, :].expand(-1, *coded_scores.shape[1:3], -1)
            coded_scores.scatter_(-1, index, float("-inf"))
        scores = [coded_scores]
        exact = [self.sinks.states, tail] if self.num_sink_tokens else [tail]
        masks = (
            [self.sinks.own_mask(mask), mask[..., coded_length : self.seen]][-len(exact) :] if mask is not None else []
        )
        for index, (key, _) in enumerate(exact):
            product = torch.matmul(packed, key.transpose(-1, -2)).float()
            scores.append(product.masked_fill_(~visible(masks[index]), float("-inf")) if masks else product)
        lengths = [score.shape[-1] for score in scores]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1).split(lengths, dim=-1)
        output = self.codecs[1].mix(weights[0], values)
        for weight, (_, value) in zip(weights[1:], exact, strict=True):
            output = output + torch.matmul(weight.to(value.dtype), value).float()
        return output.to(query.dtype).view(rows, 1, heads, -1)

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
        return torch.cat([self._decode(0, self.coded.length)[index], self.table.materialize()[index]], dim=2)

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
            self.coded.crop(self.coded.length - groups)
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

    def reset(self) -> None:
        super().reset()
        self._clear()
