"""Codecs of each head of a layer apart from the others: for tokens that differ from head to head."""

from collections.abc import Sequence

import numpy as np
import torch

from ..rotary import Rotary
from .base import Codec, Shape


class HeadCodecs:
    """How the keys and values of each head are encoded. Heads that are encoded alike are of one *kind*.

    Args:
        key_codec: encodes keys.
        value_codec: encodes values, in groups of as many tokens.
        rotary: given where keys are encoded as they were before their rotary embedding.
        is_packed: whether the positions of kept tokens follow each other, whatever was between them; else they are
            those of their slots.

    Attributes:
        pairs: key and value codec of each kind.
        heads: of each kind, its heads in order, as an index; all of them if there is one kind.
    """

    def __init__(self, key_codec: Codec, value_codec: Codec, *, rotary: Rotary | None = None, is_packed: bool = False):
        assert key_codec.group_length == value_codec.group_length, "keys and values are encoded together"
        self.group_length = key_codec.group_length
        self.rotary, self.is_packed = rotary, is_packed
        num_heads = key_codec.num_heads or value_codec.num_heads or 1
        each = [(key_codec.of_head(head), value_codec.of_head(head)) for head in range(num_heads)]
        self.pairs = list(dict.fromkeys(each))
        self.heads: list[slice | list[int]] = [slice(None)]
        if len(self.pairs) > 1:
            self.heads = [[head for head, other in enumerate(each) if other == pair] for pair in self.pairs]

    def kinds_of(self, num_groups: np.ndarray) -> np.ndarray:
        """The kind of each group, int64 `[N]`: rows and heads `[B, H]` have so many, which follow each other."""
        kinds = np.zeros(num_groups.shape, dtype=np.int64)
        for kind, heads in enumerate(self.heads):
            kinds[:, heads] = kind
        return np.repeat(kinds.ravel(), num_groups.ravel())

    def num_planes(self, kind: int, shapes: Sequence[Shape]) -> tuple[int, int]:
        """Planes of keys and of values of a kind, of one head's `shapes`."""
        keys, values = (codec.planes(shape) for codec, shape in zip(self.pairs[kind], shapes, strict=True))
        return len(keys), len(values)

    def token_bytes(self, num_heads: int, shapes: Sequence[Shape]) -> float:
        """Bytes that a token takes in all heads, each of which has `shapes`."""
        size = 0
        for pair, heads in zip(self.pairs, self.heads, strict=True):
            planes = (plane for codec, shape in zip(pair, shapes, strict=True) for plane in codec.planes(shape))
            of_head = sum(plane.num_heads * plane.dim * plane.dtype.itemsize for plane in planes)
            size += of_head * len(range(num_heads)[heads] if isinstance(heads, slice) else heads)
        return size / self.group_length

    def turn(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn `keys` `[n, T, D]` by `positions` `[n, T]`, if they are encoded without their rotary embedding."""
        if self.rotary is None:
            return keys
        return self.rotary.turn(keys.unsqueeze(1), positions).squeeze(1).to(keys.dtype)
