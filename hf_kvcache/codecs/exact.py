"""Tokens as they are, a group of them at a time: the codec of tokens that are not encoded."""

import torch

from ..blocks.arena import Plane
from .base import Codec, Shape

GROUP_LENGTH = 16


class ExactCodec(Codec):
    """`[B, H, n * 16, D]` as `[B, H, n, 16 * D]`; decoding is a view."""

    group_length = GROUP_LENGTH

    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        return (Plane(shape.num_heads, GROUP_LENGTH * shape.dim, shape.dtype),)

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        return [states.unflatten(2, (-1, GROUP_LENGTH)).flatten(3)]

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        return encoded[0].unflatten(-1, (GROUP_LENGTH, -1)).flatten(2, 3)
