"""Encoded groups of tokens, exact sinks, and an exact tail: what a quantized cache holds."""

import numpy as np
import torch

from ..blocks import Arena, BlockTable, load_table, table_state
from ..codecs.base import Codec, Shape
from ..layers.attending_layer import AttendingLayer
from ..layers.layer import LayerContext
from ..layers.layer_state import LayerState
from ..layers.sinks import Sinks
from ..rotary import Rotary
from .head_runs import HeadRun, head_runs


class CodedStore(AttendingLayer):
    """Groups of encoded tokens, then an exact tail of `residual_length` to `residual_length + group_length` tokens.

    Slots `[0, coded_length)` are encoded, `[coded_length, seen)` exact in blocks; the sinks of each row are kept
    exactly besides, and their encoded copies are never read.

    Args:
        context: where the blocks come from.
        key_codec: encodes keys; None where a subclass calls `_set_codecs` at the first update.
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
        key_codec: Codec | None,
        value_codec: Codec | None,
        residual_length: int,
        num_sink_tokens: int,
        rotary: Rotary | None = None,
    ):
        super().__init__(context)
        if key_codec is not None:
            self._set_codecs(key_codec, value_codec)
        self.residual_length = residual_length
        self.num_sink_tokens = num_sink_tokens
        self.rotary = rotary
        self._clear()

    def _set_codecs(self, key_codec: Codec, value_codec: Codec) -> None:
        assert key_codec.group_length == value_codec.group_length, "keys and values are encoded together"
        self.codecs = (key_codec, value_codec)
        self.group_length = key_codec.group_length

    def _clear(self) -> None:
        self.coded: BlockTable | None = None
        self.sinks: Sinks | None = None
        self.shapes: tuple[Shape, ...] = ()
        self.runs: list[HeadRun] = []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        states = (key_states, value_states)
        self.shapes = tuple(Shape(s.shape[1], s.shape[-1], s.dtype) for s in states)
        planes = [codec.planes(shape) for codec, shape in zip(self.codecs, self.shapes, strict=True)]
        self._num_key_planes = len(planes[0])
        self.runs = head_runs(self.codecs, self.shapes)
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

    # --- encoding

    def _encode(self, tail: list[torch.Tensor], groups: int) -> None:
        if groups:
            states = [state[:, :, : groups * self.group_length] for state in tail]
            states = self.sinks.covered(states, self.coded_length)
            states[0] = self._turn(states[0], self.coded_length, -1)
            encoded = [codec.encode(state) for codec, state in zip(self.codecs, states, strict=True)]
            self.coded.append([*encoded[0], *encoded[1]])

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

    # --- contract

    def _states(self) -> list[torch.Tensor]:
        coded = self._decode(self.coded.start, self.coded.stop)
        return [torch.cat(pair, dim=2) for pair in zip(coded, self.table.materialize(), strict=True)]

    def _take_back(self, count: int) -> None:
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

    def select_rows(self, rows: np.ndarray) -> None:
        if self.table is not None:
            self.coded.select_rows(rows)
            self.sinks.select_rows(rows)
        super().select_rows(rows)

    def fork(self) -> "CodedStore":
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
