"""Tokens of encoded groups decoded without the others of their groups: what sparse reads need where no kernel serves.

A *unit* is a run of consecutive tokens of a group: one, or a page. Bytes of other tokens are not touched, but where
they share a byte with it.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .packing import look_up, unpack

if TYPE_CHECKING:
    from .base import StoredForm

# Bytes that are taken at a time, and what holds them.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def take_rows(plane: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    """Of `plane`, contiguous and cut into rows of `length`, the `rows` `[...]`: `[..., length]`."""
    return plane.view(-1, length).index_select(0, rows.flatten()).view(*rows.shape, length)


class PackedUnits(NamedTuple):
    """Where units of codes that are packed along the tokens of a group (`packing`) lie in the first row of their group.

    Attributes:
        index: int64 `[..., W]`: the words, of as many bytes of one segment as are units of this length.
        shift: int64 `[..., W]`: of their codes, in bits.
        size: bytes of a word.
        width: bits of a code.
    """

    index: torch.Tensor
    shift: torch.Tensor
    size: int
    width: int

    @classmethod
    def of(cls, begin: torch.Tensor, offsets: torch.Tensor, unit: int, width: int, group_length: int) -> "PackedUnits":
        """Of units of `unit` tokens at `offsets` `[..., K]` of groups that begin at the bytes `begin` `[..., K]`."""
        length = group_length * width // 8  # bytes of a row, each with a code of as many segments
        size = math.gcd(unit, length, 8)
        if size < unit:  # a unit of several words
            offsets = (offsets.unsqueeze(-1) + torch.arange(0, unit, size, device=offsets.device)).flatten(-2)
            begin = begin.repeat_interleave(unit // size, dim=-1)
        return cls((begin + offsets % length) // size, offsets // length * width, size, width)

    def take(self, plane: torch.Tensor, rows: torch.Tensor, of: Callable) -> torch.Tensor:
        """The codes of other rows of the same groups, uint8 `[..., n, K * unit]`.

        Args:
            plane: uint8, contiguous.
            rows: int64 `[n]`: the byte that each row begins with, in its group.
            of: makes of `[..., W]` what belongs to each row, which broadcasts with `[..., n, W]`.
        """
        index = of(self.index) + (rows // self.size)[:, None]
        words = plane.view(-1).view(_WORDS[self.size]).index_select(0, index.flatten()).view(index.shape)
        # Bits of other tokens that are shifted in from the byte above are masked like the others.
        words >>= of(self.shift.to(words.dtype))
        return words.unsqueeze(-1).view(torch.uint8).flatten(-2).bitwise_and_(2**self.width - 1)


def decode_stored(
    form: "StoredForm", planes: Sequence[torch.Tensor], groups: torch.Tensor, offsets: torch.Tensor, unit: int
) -> torch.Tensor:
    """Values `[B, H, K * unit, D]` (float32) of units, as `Codec.decode_units` says, by the form that they lie in."""
    of = dict(zip(form.planes, planes, strict=True))
    codes, dim = of["codes"], form.dim
    width = 2 if form.bits == 3 else form.bits
    size = codes.shape[2] * 8 // (width * dim)  # tokens a group
    heads = torch.arange(codes.shape[0], device=groups.device)[:, None]
    groups = heads * codes.shape[1] + groups  # of all heads, [B, H, K]
    rows = (groups * size + offsets) // unit

    def of_tokens(plane: torch.Tensor) -> torch.Tensor:
        return take_rows(plane, rows, plane.shape[2] * unit // size).unflatten(-1, (unit, -1)).flatten(2, 3)

    if form.by_channel:
        where = PackedUnits.of(groups * codes.shape[2], offsets, unit, width, size)
        starts = torch.arange(dim, device=groups.device) * (size * width // 8)
        found = where.take(codes, starts, lambda words: words.unsqueeze(2)).transpose(2, 3)
        ranges = [take_rows(of[name], groups, dim).repeat_interleave(unit, dim=2) for name in ("scale", "zero")]
    else:
        found = of_tokens(codes.view(torch.uint8))
        found = found.view(codes.dtype) if form.element == "float8" else unpack(found, width)
        if "high" in of:
            found = found | unpack(of_tokens(of["high"]), 1) << 2
        names = [name for name in ("scale", "zero") if name in of]
        ranges = [of_tokens(of[name]).repeat_interleave(form.block, dim=3) for name in names]
    values = found.float() if form.table is None else look_up(form.table, found)
    values = values * ranges[0].float()
    if len(ranges) > 1:
        values += ranges[1].float()
    if form.rotation is not None:
        values = values @ form.rotation.to(values.device)
    if "mean" in of:
        values += take_rows(of["mean"], groups, dim).float().repeat_interleave(unit, dim=2)
    return values
