"""Different codecs for different heads of one layer: heads that predictions depend on get more bits.

Stores what its parts store. The decode kernel is called for each run of neighbouring heads that are encoded alike.
"""

from collections.abc import Iterator, Sequence

import torch

from ..blocks.arena import Plane
from .base import Codec, Shape


class HeadwiseCodec(Codec):
    """Runs of neighbouring heads with a codec each; their planes follow each other.

    Args:
        codecs: one for each KV head, in groups of as many tokens.
        starts: the heads that runs begin with, ascending from 0; within a run codecs are the same.
    """

    def __init__(self, codecs: Sequence[Codec], starts: Sequence[int]):
        self.group_length = codecs[0].group_length
        assert all(codec.group_length == self.group_length for codec in codecs), "heads are encoded together"
        self.num_heads = len(codecs)
        self.codecs = tuple(codecs)
        self.parts = [(codecs[i], slice(i, j)) for i, j in zip(starts, [*starts[1:], len(codecs)], strict=True)]

    def of_head(self, head: int) -> Codec:
        return self.codecs[head]

    def runs(self, shape: Shape) -> list[tuple[slice, Codec, Shape]]:
        return [(heads, codec, shape._replace(num_heads=heads.stop - heads.start)) for codec, heads in self.parts]

    def _runs_with(self, planes: Sequence, shape: Shape) -> Iterator[tuple[slice, Codec, Shape, Sequence]]:
        """The runs, each with those of `planes` that are its own."""
        begin = 0
        for heads, codec, own_shape in self.runs(shape):
            stop = begin + len(codec.planes(own_shape))
            yield heads, codec, own_shape, planes[begin:stop]
            begin = stop

    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        return tuple(plane for _, codec, own_shape in self.runs(shape) for plane in codec.planes(own_shape))

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        return [plane for codec, heads in self.parts for plane in codec.encode(states[:, heads])]

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        runs = self._runs_with(encoded, shape)
        return torch.cat([codec.decode(own, own_shape) for _, codec, own_shape, own in runs], dim=1)

    def decode_units(self, planes, groups, offsets, unit, shape):
        decoded = [
            codec.decode_units(own, groups[:, heads], offsets[:, heads], unit, own_shape)
            for heads, codec, own_shape, own in self._runs_with(planes, shape)
        ]
        return torch.cat(decoded, dim=1)
