"""8-bit floating point (e4m3) with a scale for each token and head.

Stores `8 + 16 / D` bits a value. Near-lossless, and the cheapest to decode. A scale a token keeps late outliers from
being clipped, which one scale frozen at the first tokens does.
Paper: Micikevicius et al. 2022, FP8 formats for deep learning, https://arxiv.org/abs/2209.05433.
"""

import torch

from ..blocks.arena import Plane
from .base import Codec, Shape, StoredForm

GROUP_LENGTH = 32
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Fp8Codec(Codec):
    """`[tokens, D]` float8 values and a float16 scale a token."""

    group_length = GROUP_LENGTH

    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        return (
            Plane(shape.num_heads, self.group_length * shape.dim, torch.float8_e4m3fn),
            Plane(shape.num_heads, self.group_length, torch.float16),
        )

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        grouped = states.float().unflatten(2, (-1, self.group_length))  # [B, H, n, G, D]
        scale = (grouped.abs().amax(-1, keepdim=True) / _LARGEST).clamp(6e-8, 65504).half()
        scaled = (grouped / scale.float()).clamp(-_LARGEST, _LARGEST)
        return [scaled.to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)]

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        values, scale = encoded
        grouped = values.unflatten(-1, (self.group_length, -1)).float() * scale.float().unsqueeze(-1)
        return grouped.flatten(2, 3).to(shape.dtype)

    def stored_form(self, shape: Shape) -> StoredForm:
        return StoredForm(planes=("codes", "scale"), element="float8", bits=8, dim=shape.dim, block=shape.dim)
