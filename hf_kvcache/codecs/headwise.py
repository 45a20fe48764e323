"""Different codecs for different heads of one layer: heads that predictions depend on get more bits.

Stores what its parts store. Decoded a slice at a time in each step, also where its parts could be multiplied as they
are: choose a width for each layer where time matters. Tokens that a policy keeps are read in each part's own form.
"""

from collections.abc import Sequence

import torch

from ..blocks.arena import Plane
from .base import Codec, Shape


class HeadwiseCodec(Codec):
    """One part for each codec that occurs, with the heads that it encodes; its planes follow each other.

    Args:
        codecs: one for each KV head, in groups of as many tokens. Heads given the same object share a part.
    """

    def __init__(self, codecs: Sequence[Codec]):
        self.group_length = codecs[0].group_length
        assert all(codec.group_length == self.group_length for codec in codecs), "heads are encoded together"
        self.num_heads = len(codecs)
        self.codecs = tuple(codecs)
        self.parts = [
            (codec, [head for head, other in enumerate(codecs) if other is codec]) for codec in dict.fromkeys(codecs)
        ]

    def of_head(self, head: int) -> Codec:
        return self.codecs[head]

    def _planes_of_parts(self, shape: Shape) -> list[tuple[Plane, ...]]:
        return [codec.planes(shape._replace(num_heads=len(heads))) for codec, heads in self.parts]

    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        return tuple(plane for planes in self._planes_of_parts(shape) for plane in planes)

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        return [plane for codec, heads in self.parts for plane in codec.encode(states[:, heads])]

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        decoded, begin = [], 0
        for (codec, heads), planes in zip(self.parts, self._planes_of_parts(shape), strict=True):
            part = encoded[begin : begin + len(planes)]
            decoded.append(codec.decode(part, shape._replace(num_heads=len(heads))))
            begin += len(planes)
        return self._in_order(decoded)

    def decode_units(self, planes, groups, offsets, unit, shape):
        decoded, begin = [], 0
        for (codec, heads), own in zip(self.parts, self._planes_of_parts(shape), strict=True):
            part, begin = planes[begin : begin + len(own)], begin + len(own)
            own_shape = shape._replace(num_heads=len(heads))
            decoded.append(codec.decode_units(part, groups[:, heads], offsets[:, heads], unit, own_shape))
        return self._in_order(decoded)

    def unit_bytes(self, unit, shape):
        return sum(codec.unit_bytes(unit, shape._replace(num_heads=len(heads))) for codec, heads in self.parts)

    def _in_order(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The heads of all parts, `[B, H, T, D]`, one after the other again."""
        order = torch.tensor([head for _, heads in self.parts for head in heads], device=parts[0].device)
        return torch.cat(parts, dim=1)[:, order.argsort()]
