"""Groups of tokens in the planes of their codecs, each of one head: heads that are encoded alike lie together."""

from collections.abc import Sequence

import numpy as np
import torch

from ..blocks import BlockPool
from ..codecs.base import Shape
from ..codecs.by_head import HeadCodecs


class CodedGroups:
    """`N` groups of `G` tokens: of each kind of head (`HeadCodecs`), planes `[n, *]` in the order of its groups.

    Args:
        pool: gives the memory.
        codecs: of each head.
        shapes: of one head's keys and values.
        planes: of each kind, those of keys, then those of values; copied.
        kinds: of each group, int64 `[N]`.
    """

    def __init__(
        self,
        pool: BlockPool,
        codecs: HeadCodecs,
        shapes: tuple[Shape, ...],
        planes: Sequence[Sequence[torch.Tensor]],
        kinds: np.ndarray,
    ):
        self.codecs, self.shapes, self.kinds = codecs, shapes, kinds
        pool.check_room(sum(plane.nbytes for part in planes for plane in part))
        self.planes = [[pool.reserve(tuple(plane.shape), plane.dtype) for plane in part] for part in planes]
        for own, part in zip(self.planes, planes, strict=True):
            for memory, plane in zip(own, part, strict=True):
                memory.copy_(plane)
        # Where each group lies among those of its kind.
        self.places = np.empty_like(kinds)
        for kind in range(len(planes)):
            is_kind = kinds == kind
            self.places[is_kind] = np.arange(is_kind.sum())

    @staticmethod
    def encode(codecs: HeadCodecs, states: Sequence[torch.Tensor], is_group: torch.Tensor) -> list[list[torch.Tensor]]:
        """Planes of each kind, of the groups of keys and values `[B, H, n * G, D]` that `is_group` `[B, H, n]` says."""
        return [
            [
                plane[is_group[:, heads]]
                for codec, state in zip(pair, states, strict=True)
                for plane in codec.encode(state[:, heads])
            ]
            for pair, heads in zip(codecs.pairs, codecs.heads, strict=True)
        ]

    @classmethod
    def from_named(
        cls,
        pool: BlockPool,
        codecs: HeadCodecs,
        shapes: tuple[Shape, ...],
        tensors: dict[str, torch.Tensor],
        kinds: np.ndarray,
    ) -> "CodedGroups":
        """The groups whose planes are among `tensors`, by the names that `named` gives them."""
        planes, begin = [], 0
        for kind in range(len(codecs.pairs)):
            stop = begin + sum(codecs.num_planes(kind, shapes))
            planes.append([tensors[f"plane_{index}"] for index in range(begin, stop)])
            begin = stop
        return cls(pool, codecs, shapes, planes, kinds)

    def named(self) -> dict[str, torch.Tensor]:
        """All planes, kind by kind."""
        return {f"plane_{index}": plane for index, plane in enumerate(plane for part in self.planes for plane in part)}

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def nbytes(self) -> int:
        return sum(plane.untyped_storage().nbytes() for part in self.planes for plane in part)

    def to(self, pool: BlockPool) -> "CodedGroups":
        """The same groups on another device."""
        planes = [[plane.to(pool.device) for plane in part] for part in self.planes]
        return CodedGroups(pool, self.codecs, self.shapes, planes, self.kinds)

    def take(self, pool: BlockPool, groups: np.ndarray) -> "CodedGroups":
        """A copy of `groups`, in this order."""
        return self._taken(pool, self.planes, self.kinds[groups], self.places[groups])

    def join(self, pool: BlockPool, newer: "CodedGroups", order: np.ndarray) -> "CodedGroups":
        """These groups and then those of `newer`, in `order`."""
        planes = [
            [torch.cat(pair) for pair in zip(*parts, strict=True)]
            for parts in zip(self.planes, newer.planes, strict=True)
        ]
        before = np.array([len(part[0]) for part in self.planes])
        kinds = np.concatenate([self.kinds, newer.kinds])
        places = np.concatenate([self.places, newer.places + before[newer.kinds]])
        return self._taken(pool, planes, kinds[order], places[order])

    def _taken(self, pool: BlockPool, planes, kinds: np.ndarray, places: np.ndarray) -> "CodedGroups":
        taken = []
        for kind, part in enumerate(planes):
            index = torch.from_numpy(places[kinds == kind]).to(pool.device)
            taken.append([plane[index] for plane in part])
        return CodedGroups(pool, self.codecs, self.shapes, taken, kinds)

    def decoded(self, start: int, stop: int) -> list[torch.Tensor]:
        """Keys and values `[n, G, D]` of the groups from `start` to `stop`, as they were encoded."""
        kinds = self.kinds[start:stop]
        present = np.unique(kinds) if len(self.planes) > 1 else [0]
        if len(present) == 1:
            return self._decoded(int(present[0]), int(self.places[start]), stop - start)
        states = [self._empty(stop - start, shape) for shape in self.shapes]
        for kind in present:
            own = np.flatnonzero(kinds == kind)
            index = torch.from_numpy(own).to(states[0].device)
            part = self._decoded(int(kind), int(self.places[start + own[0]]), len(own))
            for state, decoded in zip(states, part, strict=True):
                state[index] = decoded
        return states

    def _empty(self, count: int, shape: Shape) -> torch.Tensor:
        size = (count, self.codecs.group_length, shape.dim)
        return torch.empty(size, dtype=shape.dtype, device=self.planes[0][0].device)

    def _decoded(self, kind: int, first: int, count: int) -> list[torch.Tensor]:
        planes = [plane[None, None, first : first + count] for plane in self.planes[kind]]
        split = self.codecs.num_planes(kind, self.shapes)[0]
        pairs = zip(self.codecs.pairs[kind], (planes[:split], planes[split:]), self.shapes, strict=True)
        return [codec.decode(part, shape)[0, 0].unflatten(0, (count, -1)) for codec, part, shape in pairs]
