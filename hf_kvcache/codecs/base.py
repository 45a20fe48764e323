"""What a codec is: keys and values of a group of tokens to small tensors and back, and attention on that form."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from ..blocks.arena import Plane


class Shape(NamedTuple):
    """One layer's keys or values: heads, head dimension, and the dtype they are decoded to."""

    num_heads: int
    dim: int
    dtype: torch.dtype


class Codec(ABC):
    """Encodes keys or values `[B, H, n * group_length, D]` as planes `[B, H, n, *]`, once, and never again.

    A group of `group_length` consecutive tokens is the unit: it is stored, moved, shared and freed as a whole.
    """

    group_length: int

    @abstractmethod
    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        """What a group of tokens stores, for each tensor that `encode` returns."""

    @abstractmethod
    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        """`[B, H, n * group_length, D]` to one `[B, H, n, *]` tensor a plane."""

    @abstractmethod
    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        """The `[B, H, n * group_length, D]` values that `encoded` stands for."""


class FusedKeyCodec(Codec):
    """A codec whose stored keys can be multiplied by a query without decoding them first."""

    @abstractmethod
    def scores(self, query: torch.Tensor, encoded: list[torch.Tensor]) -> torch.Tensor:
        """`query` `[B, H, M, D]` times the stored keys: `[B, H, M, n * group_length]`, float32."""


class FusedValueCodec(Codec):
    """A codec whose stored values can be summed by weight without decoding them first."""

    @abstractmethod
    def mix(self, weights: torch.Tensor, encoded: list[torch.Tensor]) -> torch.Tensor:
        """`weights` `[B, H, M, n * group_length]` times the stored values: `[B, H, M, D]`, float32."""
