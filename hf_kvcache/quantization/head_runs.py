"""Neighbouring heads of a layer that are encoded alike: what one call of the decode kernel reads."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..codecs.base import Codec, Shape, StoredForm


class HeadRun(NamedTuple):
    """Heads, how their keys and values are encoded, and which planes of a store are those of either."""

    heads: slice
    codecs: tuple[Codec, ...]
    shapes: tuple[Shape, ...]
    planes: tuple[range, ...]

    @property
    def forms(self) -> list[StoredForm | None]:
        """Of keys and values; they are no memory of a cache, and so not held."""
        return [codec.stored_form(shape) for codec, shape in zip(self.codecs, self.shapes, strict=True)]

    def planes_of(self, planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of all `planes`, those of these heads' keys, then of their values."""
        return [planes[index] for part in self.planes for index in part]

    def states(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of `[B, H, ...]` of all heads, these heads: views."""
        return [state[:, self.heads] for state in states]

    def queries(self, query: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Of queries `[B, Hq, ...]` of all `num_heads` KV heads, those of these: a view."""
        each = query.shape[1] // num_heads
        return query[:, self.heads.start * each : self.heads.stop * each]


def head_runs(codecs: Sequence[Codec], shapes: Sequence[Shape]) -> list[HeadRun]:
    """The runs of a layer, whose planes are those of the key codec and then those of the value codec."""
    runs, begin = [], [0, len(codecs[0].planes(shapes[0]))]
    for parts in zip(*(codec.runs(shape) for codec, shape in zip(codecs, shapes, strict=True)), strict=True):
        heads, of_run, own_shapes = zip(*parts, strict=True)
        assert heads[0] == heads[1], "keys and values have the same runs"
        planes = []
        for side, (codec, shape) in enumerate(zip(of_run, own_shapes, strict=True)):
            stop = begin[side] + len(codec.planes(shape))
            planes.append(range(begin[side], stop))
            begin[side] = stop
        runs.append(HeadRun(heads[0], of_run, own_shapes, tuple(planes)))
    return runs
