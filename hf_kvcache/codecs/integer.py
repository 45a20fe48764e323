"""KIVI quantization: asymmetric integers, keys a channel over groups of tokens, values a token over groups of channels.

Stores `nbits + 32 / q_group_size` bits a value: the codes, and a float16 scale and zero point a group. Keys have a few
large channels, so their range is shared along tokens; values have none, so theirs is shared along channels.
Not for fewer than 4 bits where quality matters: see the rotated codec.
Paper: Liu et al. 2024, KIVI, https://arxiv.org/abs/2402.02750 (section 3).
Differs from the paper: ranges may be shrunk where that lowers the squared error (`clip_search`), and sinks are exact.
"""

import torch

from ..blocks.arena import Plane
from .base import Codec, Shape, StoredForm
from .packing import pack, unpack

# Shrunken ranges that are tried; the best by squared error is kept.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
_LARGEST = torch.finfo(torch.float16).max


def quantize(states: torch.Tensor, nbits: int, shrinks: tuple[float, ...]) -> tuple[torch.Tensor, ...]:
    """Codes (uint8), scale and zero point (float16) of groups that lie along the last axis of `states`."""
    low, high = states.amin(-1, keepdim=True), states.amax(-1, keepdim=True)
    best, best_error = None, None
    for shrink in shrinks:
        middle, half = (low + high) / 2, (high - low) / 2 * shrink
        scale = (2 * half / (2**nbits - 1)).clamp(1e-6, _LARGEST).half().float()
        zero = (middle - half).clamp(-_LARGEST, _LARGEST).half().float()
        codes = ((states - zero) / scale).round_().clamp_(0, 2**nbits - 1)
        error = (codes * scale + zero - states).square_().sum(-1, keepdim=True)
        if best is None:
            best, best_error = (codes, scale, zero), error
        else:
            is_better = error < best_error
            best = tuple(torch.where(is_better, new, old) for new, old in zip((codes, scale, zero), best, strict=True))
            best_error = torch.minimum(error, best_error)
    codes, scale, zero = best
    return codes.to(torch.uint8), scale.half().squeeze(-1), zero.half().squeeze(-1)


class _IntegerCodec(Codec):
    is_by_channel: bool

    def __init__(self, nbits: int, *, group_length: int, q_group_size: int, clip_search: bool):
        self.nbits = nbits
        self.group_length = group_length
        self.q_group_size = q_group_size
        self.shrinks = _SHRINKS if clip_search else _SHRINKS[:1]

    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        values = self.group_length * shape.dim
        ranges = values // self.q_group_size
        return (
            Plane(shape.num_heads, values * self.nbits // 8, torch.uint8),
            Plane(shape.num_heads, ranges, torch.float16),
            Plane(shape.num_heads, ranges, torch.float16),
        )

    def stored_form(self, shape: Shape) -> StoredForm:
        return StoredForm(
            planes=("codes", "scale", "zero"),
            element="int8" if self.nbits == 8 else "codes",
            bits=self.nbits,
            dim=shape.dim,
            block=self.q_group_size,
            by_channel=self.is_by_channel,
        )


class KeyIntegerCodec(_IntegerCodec):
    """A range for each channel over `q_group_size` tokens: codes `[D, tokens]`, scale and zero point `[D]` a group."""

    is_by_channel = True

    def __init__(self, nbits: int, *, q_group_size: int, clip_search: bool):
        super().__init__(nbits, group_length=q_group_size, q_group_size=q_group_size, clip_search=clip_search)

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        grouped = states.float().unflatten(2, (-1, self.group_length)).transpose(-1, -2)  # [B, H, n, D, G]
        codes, scale, zero = quantize(grouped, self.nbits, self.shrinks)
        return [pack(codes, self.nbits).flatten(-2), scale, zero]

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        codes, scale, zero = encoded
        grouped = unpack(codes.unflatten(-1, (shape.dim, -1)), self.nbits).float()
        states = grouped * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)
        return states.transpose(-1, -2).flatten(2, 3).to(shape.dtype)


class ValueIntegerCodec(_IntegerCodec):
    """A range for each token over `q_group_size` channels: codes `[tokens, D]` and ranges `[tokens, D / group]`."""

    is_by_channel = False

    def __init__(self, nbits: int, *, group_length: int, q_group_size: int, clip_search: bool):
        super().__init__(nbits, group_length=group_length, q_group_size=q_group_size, clip_search=clip_search)

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        grouped = states.float().unflatten(2, (-1, self.group_length)).unflatten(-1, (-1, self.q_group_size))
        codes, scale, zero = quantize(grouped, self.nbits, self.shrinks)
        return [pack(codes.flatten(-2), self.nbits).flatten(-2), scale.flatten(-2), zero.flatten(-2)]

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        codes, scale, zero = (plane.unflatten(-1, (self.group_length, -1)) for plane in encoded)
        grouped = unpack(codes, self.nbits).float().unflatten(-1, (-1, self.q_group_size))
        states = grouped * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)
        return states.flatten(-2).flatten(2, 3).to(shape.dtype)
