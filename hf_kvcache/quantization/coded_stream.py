"""What a model stores of its tokens beside keys and values, encoded: old ones in groups, each once, and an exact tail.

Cuts bytes a value (technique 8). Approximate; how much is the codec's business.
"""

import itertools
from collections.abc import Callable, Sequence

import torch

from ..blocks import Arena, BlockTable, load_table, table_state
from ..codecs.base import Codec, Shape
from ..layers.layer import LayerContext
from ..layers.layer_state import LayerState
from ..native.stream import Stream


class CodedStream(Stream):
    """Old tokens encoded in groups, each once, and an exact tail; decoded as a whole when they are read.

    Args:
        context: of the layer it belongs to.
        make_codecs: from the last dimension of each tensor to its codec, of which all groups have the same length.
        residual_length: newest tokens that stay exact, with those that fill no group yet. At least 0.
    """

    def __init__(self, context: LayerContext, *, make_codecs: Callable[..., Sequence[Codec]], residual_length: int):
        super().__init__(context)
        self.make_codecs = make_codecs
        self.residual_length = residual_length
        self.coded: BlockTable | None = None

    @property
    def start(self) -> int:
        return 0

    @property
    def tables(self) -> list[BlockTable]:
        return [] if self.table is None else [self.table, self.coded]

    @property
    def bytes_per_token(self) -> float:
        return 0.0 if self.coded is None else self.coded.arena.block_bytes / self.group_length

    @property
    def _coded_length(self) -> int:
        return self.coded.stop * self.group_length

    def _make(self, states: Sequence[torch.Tensor]) -> None:
        # Before anything is made: it raises where an encoding does not fit.
        self.codecs = tuple(self.make_codecs(*(state.shape[-1] for state in states)))
        super()._make(states)
        self.group_length = self.codecs[0].group_length
        self.shapes = tuple(Shape(s.shape[1], s.shape[-1], s.dtype) for s in states)
        planes = [codec.planes(shape) for codec, shape in zip(self.codecs, self.shapes, strict=True)]
        self._counts = [len(of_codec) for of_codec in planes]
        # One slot of this arena is one group of tokens.
        arena = Arena(self.context.pool(states[0].device), tuple(itertools.chain(*planes)), block_size=1)
        self.coded = BlockTable(arena, states[0].shape[0])

    def _store(self, states: list[torch.Tensor]) -> None:
        groups = max(0, self.table.length + states[0].shape[2] - self.residual_length) // self.group_length
        if not groups:
            self.table.append(states)
            return
        # Encoded from the states at hand: a prompt is never stored in full precision.
        tail = [torch.cat(pair, dim=2) for pair in zip(self.table.materialize(), states, strict=True)]
        old = [state[:, :, : groups * self.group_length] for state in tail]
        encoded = [codec.encode(state) for codec, state in zip(self.codecs, old, strict=True)]
        self.coded.append([plane for planes in encoded for plane in planes])
        self.table.restart(self._coded_length)
        self.table.append([state[:, :, groups * self.group_length :] for state in tail])

    def _decode(self, first: int) -> list[torch.Tensor]:
        """The tokens of the encoded groups from group `first` on."""
        planes, decoded = [plane[:, :, first:] for plane in self.coded.materialize()], []
        for codec, count, shape in zip(self.codecs, self._counts, self.shapes, strict=True):
            decoded.append(codec.decode(planes[:count], shape))
            planes = planes[count:]
        return decoded

    def read(self, begin: int | None = None) -> list[torch.Tensor]:
        tail = self.table.materialize()
        if self.coded.length:
            tail = [torch.cat(pair, dim=2) for pair in zip(self._decode(0), tail, strict=True)]
        return tail if not begin else [state[:, :, begin:] for state in tail]

    def crop(self, count: int) -> None:
        if self.table is None:
            return
        left = self.stop - count
        if left >= self._coded_length:
            self.table.crop(count)
            return
        # Part of a group stays: it goes back to the tail as it was read, decoded.
        groups, rest = divmod(left, self.group_length)
        kept = [state[:, :, :rest] for state in self._decode(groups)]
        self.coded.crop(self.coded.stop - groups)
        self.table.restart(left - rest)
        self.table.append(kept)

    def fork(self) -> "CodedStream":
        forked = super().fork()
        forked.coded = None if self.coded is None else self.coded.fork()
        return forked

    def to(self, device: torch.device, context: LayerContext) -> None:
        super().to(device, context)
        if self.coded is not None:
            self.coded = self.coded.to(context.pool(device))

    def state(self) -> LayerState:
        state = LayerState()
        if self.table is not None:
            state.put("tail", table_state(self.table))
            state.put("coded", table_state(self.coded))
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state.part("tail"), device)
        if self.table is not None:
            load_table(self.coded, state.part("coded"))

    def reset(self) -> None:
        super().reset()
        self.coded = None
