"""What a codec is: keys and values of a group of tokens to small tensors and back, and how those tensors lie."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..blocks.arena import Plane
from .chosen import decode_stored


class Shape(NamedTuple):
    """One layer's keys or values: heads, head dimension, and the dtype they are decoded to."""

    num_heads: int
    dim: int
    dtype: torch.dtype


class StoredForm(NamedTuple):
    """How the planes of a codec hold the `[G, D]` values of a group of tokens, so that attention can read them there.

    A value is `code * scale + zero`, then times `rotation`, plus `mean`. G is a multiple of 16.

    Attributes:
        planes: what each of the codec's planes is, in their order. "codes": `[G, D]` elements, packed along the
            channels (`codecs.packing`); `[D, G]`, packed along the tokens, if `by_channel`. "high": the third bits of
            3-bit codes, packed apart. "scale": float16 `[G, D / block]`; `[D]` if `by_channel`. "zero": as "scale"; of
            values, and of keys `by_channel`. "mean": float16 `[D]`, of keys.
        element: "codes", as `table` says; "int8", unsigned; or "float8", e4m3, not `by_channel`.
        bits: of an element: 2, 3 (not `by_channel`), 4 or 8.
        dim: D.
        block: channels that share a scale; divides D, and 16 divides it.
        by_channel: whether a scale and a zero point belong to a channel of the group instead of a token; of keys.
        table: float32 `[16]`, what codes stand for, repeated to fill it; None: for themselves.
        rotation: float32 `[D, D]`, orthogonal, or None.
    """

    planes: tuple[str, ...]
    element: str
    bits: int
    dim: int
    block: int
    by_channel: bool = False
    table: torch.Tensor | None = None
    rotation: torch.Tensor | None = None


class Codec(ABC):
    """Encodes keys or values `[B, H, n * group_length, D]` as planes `[B, H, n, *]`, once, and never again.

    A group of `group_length` consecutive tokens is the unit: it is stored, moved, shared and freed as a whole.
    """

    group_length: int
    num_heads: int | None = None  # heads that it encodes in ways of their own; None if it encodes any head

    def of_head(self, head: int) -> "Codec":
        """What encodes `head` apart from the others."""
        return self

    def runs(self, shape: Shape) -> "list[tuple[slice, Codec, Shape]]":
        """Runs of neighbouring heads that are encoded alike: which, by what, and their shape. Their planes follow."""
        return [(slice(0, shape.num_heads), self, shape)]

    @abstractmethod
    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        """What a group of tokens stores, for each tensor that `encode` returns."""

    @abstractmethod
    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        """`[B, H, n * group_length, D]` to one `[B, H, n, *]` tensor a plane."""

    @abstractmethod
    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        """The `[B, H, n * group_length, D]` values that `encoded` stands for."""

    def decode_units(
        self, planes: Sequence[torch.Tensor], groups: torch.Tensor, offsets: torch.Tensor, unit: int, shape: Shape
    ) -> torch.Tensor:
        """The `[B, H, K * unit, D]` values of units of tokens, other ones for each row and head, and nothing else.

        Args:
            planes: of an arena in which a block is a group, `[H, blocks, *]`.
            groups: int64 `[B, H, K]`: the block that each unit lies in.
            offsets: int64 `[B, H, K]`: its first token there; `unit` divides it, and the group's length.
            unit: tokens a unit.
            shape: of all heads.
        """
        form = self.stored_form(shape)
        assert form is not None, f"{type(self).__name__} has no form to decode units by"
        return decode_stored(form, planes, groups, offsets, unit).to(shape.dtype)

    def group_bytes(self, shape: Shape) -> int:
        """Bytes of a group, in all heads."""
        return sum(plane.num_heads * plane.dim * plane.dtype.itemsize for plane in self.planes(shape))

    def unit_bytes(self, unit: int, shape: Shape) -> float:
        """Bytes that a unit of so many tokens of a group is read from, in all heads."""
        form = self.stored_form(shape)
        # A byte of codes by the channel holds tokens of several units, and all of a group share scales.
        shared = 8 / form.bits if form is not None and form.by_channel else 1
        return self.group_bytes(shape) * min(1, unit * shared / self.group_length)

    def stored_form(self, shape: Shape) -> StoredForm | None:
        """The layout that a decode step reads in place, or None: then groups are decoded, a slice at a time."""
        return None
