"""The tokens that an eviction left of older ones: heads and rows keep different ones, as many as they like.

Stored compactly: a head's tokens fill whole groups, and the groups of all heads and rows follow each other, so that a
head which keeps more takes memory from no other. Groups may be encoded. Once made, the tensors never change: forks and
beams share them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ..blocks import BlockPool
from ..codecs.base import Codec, Shape
from ..codecs.exact import ExactCodec
from ..layers.layer_state import LayerState

Codecs = tuple[Codec, Codec]


class KeptTokens:
    """`N` groups of `G` tokens, each of one head of one row: a codec's planes `[N, *]`, and slots `[N, G]`.

    Groups are ordered by row, then head. A slot is -1 where a group holds no token. What is added to a token's scores
    (`log_mass`, float32 `[N, G]`) is there only where tokens may stand for others.

    Args:
        pool: counts the memory.
        codecs: of keys and values.
        states: keys and values `[B, H, w, D]` to keep, those of each head first; `w` is a multiple of `G`.
        slots: int64 `[B, H, w]`, their places in the sequence; -1 from where a head has no more.
        log_mass: added to their scores, `[B, H, w]`; None if each stands for itself alone.
    """

    def __init__(
        self,
        pool: BlockPool,
        codecs: Codecs,
        states: Sequence[torch.Tensor],
        slots: torch.Tensor,
        log_mass: torch.Tensor | None = None,
    ):
        self._describe(codecs, states)
        is_group = (slots >= 0).unflatten(-1, (-1, self.group_length)).any(dim=-1)
        encoded = [plane for codec, state in zip(codecs, states, strict=True) for plane in codec.encode(state)]
        self._hold(
            pool,
            [plane[is_group] for plane in encoded],
            slots.unflatten(-1, (-1, self.group_length))[is_group],
            None if log_mass is None else log_mass.unflatten(-1, (-1, self.group_length))[is_group],
            # A sync an eviction: how many groups each head of each row needs.
            is_group.sum(dim=-1).cpu().numpy(),
            (slots >= 0).sum(dim=-1).cpu().numpy(),
        )

    def _describe(self, codecs: Codecs, states: Sequence[torch.Tensor]) -> None:
        self.codecs = codecs
        self.group_length = codecs[0].group_length
        self.num_heads = states[0].shape[1]
        self.shapes = tuple(Shape(1, state.shape[-1], state.dtype) for state in states)
        self._num_key_planes = len(codecs[0].planes(self.shapes[0]))

    @classmethod
    def from_state(
        cls, pool: BlockPool, codecs: Codecs, states: Sequence[torch.Tensor], state: LayerState
    ) -> "KeptTokens":
        """What gave `state`; `states` are any keys and values of the layer, for their shapes."""
        kept = object.__new__(cls)
        kept._describe(codecs, states)
        tensors = {name: tensor.to(pool.device) for name, tensor in state.tensors.items()}
        planes = [tensors[f"plane_{index}"] for index in range(sum(name.startswith("plane_") for name in tensors))]
        counts, num_groups = (state.tensors[name].numpy() for name in ("counts", "num_groups"))
        kept._hold(pool, planes, tensors["slots"], tensors.get("log_mass"), num_groups, counts)
        return kept

    def state(self) -> LayerState:
        """Everything, as plain tensors."""
        tensors = {f"plane_{index}": plane for index, plane in enumerate(self.planes)}
        counts = {"counts": torch.from_numpy(self.counts), "num_groups": torch.from_numpy(self._num_groups)}
        mass = {} if self.log_mass is None else {"log_mass": self.log_mass}
        return LayerState(tensors | {"slots": self.slots} | mass | counts)

    def _hold(
        self,
        pool: BlockPool,
        planes: list[torch.Tensor],
        slots: torch.Tensor,
        log_mass: torch.Tensor | None,
        num_groups: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        pool.check_room(sum(plane.nbytes for plane in planes))
        self.planes = [pool.reserve(tuple(plane.shape), plane.dtype) for plane in planes]
        for own, plane in zip(self.planes, planes, strict=True):
            own.copy_(plane)
        with torch.inference_mode(False):
            self.slots = slots.to(torch.int32).clone()
            self.log_mass = None if log_mass is None else log_mass.clone()
        self.counts, self._num_groups = counts, num_groups
        self._owner: torch.Tensor | None = None
        pool.register(self)

    # --- what a pool asks of the memory it gave

    @property
    def reserved_bytes(self) -> int:
        return sum(plane.untyped_storage().nbytes() for plane in self.planes)

    @property
    def num_used_blocks(self) -> int:
        return int(self._num_groups.sum())

    @property
    def block_bytes(self) -> int:
        return sum(plane[:1].nbytes for plane in self.planes)

    @property
    def nbytes(self) -> int:
        return self.reserved_bytes + self.slots.nbytes + (0 if self.log_mass is None else self.log_mass.nbytes)

    @property
    def num_rows(self) -> int:
        return len(self.counts)

    @property
    def is_exact(self) -> bool:
        return isinstance(self.codecs[0], ExactCodec)

    @property
    def is_even(self) -> bool:
        """Whether all heads of all rows have as many groups, so that the groups are one plain `[B, H, n]`."""
        return bool((self._num_groups == self._num_groups.flat[0]).all())

    @property
    def has_gaps(self) -> bool:
        """Whether a group holds fewer tokens than it could."""
        return bool((self.counts != self._num_groups * self.group_length).any())

    def _like(self, pool: BlockPool, *held) -> "KeptTokens":
        other = object.__new__(KeptTokens)
        other.__dict__.update(self.__dict__)
        other._hold(pool, *held)
        return other

    def to(self, pool: BlockPool) -> "KeptTokens":
        """The same tokens on another device."""
        planes = [plane.to(pool.device) for plane in self.planes]
        mass = None if self.log_mass is None else self.log_mass.to(pool.device)
        return self._like(pool, planes, self.slots.to(pool.device), mass, self._num_groups, self.counts)

    def take(self, pool: BlockPool, rows: np.ndarray) -> "KeptTokens":
        """A copy of some rows, to let go of the others."""
        own = np.repeat(np.arange(self.num_rows), self._num_groups.sum(axis=1))
        groups = np.concatenate([np.flatnonzero(own == row) for row in rows])
        index = torch.from_numpy(groups).to(self.slots.device)
        planes = [plane[index] for plane in self.planes]
        mass = None if self.log_mass is None else self.log_mass[index]
        return self._like(pool, planes, self.slots[index], mass, self._num_groups[rows], self.counts[rows])

    def join(self, pool: BlockPool, newer: "KeptTokens") -> "KeptTokens":
        """Each head's groups, then its groups of `newer`. Nothing is encoded again."""
        order = torch.cat([self.owner, newer.owner]).argsort(stable=True)
        planes = [torch.cat(pair)[order] for pair in zip(self.planes, newer.planes, strict=True)]
        slots = torch.cat([self.slots, newer.slots])[order]
        pair = [store.mass_of_groups for store in (self, newer)]
        mass = None if self.log_mass is None and newer.log_mass is None else torch.cat(pair)[order]
        return self._like(pool, planes, slots, mass, self._num_groups + newer._num_groups, self.counts + newer.counts)

    # --- reading

    @property
    def mass_of_groups(self) -> torch.Tensor:
        """What is added to the scores of each token of each group, float32 `[N, G]`."""
        return torch.zeros(self.slots.shape, device=self.slots.device) if self.log_mass is None else self.log_mass

    def decoded(self, start: int, stop: int) -> list[torch.Tensor]:
        """Keys and values `[n, G, D]` of the groups from `start` to `stop`."""
        planes = [plane[None, None, start:stop] for plane in self.planes]
        split = self._num_key_planes
        pairs = zip(self.codecs, (planes[:split], planes[split:]), self.shapes, strict=True)
        return [codec.decode(part, shape)[0, 0].unflatten(0, (-1, self.group_length)) for codec, part, shape in pairs]

    def _groups_of(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Index of each group `[B, H, n]`, 0 for none, and whether there is none; None if the groups lie so already."""
        if self.is_even and np.array_equal(rows, np.arange(self.num_rows)):
            return None
        stops = self._num_groups.ravel().cumsum().reshape(self._num_groups.shape)
        starts = (stops - self._num_groups)[rows]
        places = np.arange(int(self._num_groups[rows].max()))
        is_there = places < self._num_groups[rows][..., None]
        groups = np.where(is_there, starts[..., None] + places, 0)
        return torch.from_numpy(groups).to(self.slots.device), torch.from_numpy(~is_there).to(self.slots.device)

    def group_ids(self, rows: np.ndarray) -> np.ndarray:
        """Index of each group of each head of `rows`, int64 `[B * H, n]`; 0 where a head has fewer than others."""
        if (found := self._groups_of(rows)) is None:
            return np.arange(len(self.slots)).reshape(len(rows) * self.num_heads, -1)
        return found[0].flatten(0, 1).cpu().numpy()

    def padded_slots(self, rows: np.ndarray) -> torch.Tensor:
        """Slots `[B, H, w]` of `rows`, int32; -1 where a head holds no token. A view where all heads are even."""
        if (found := self._groups_of(rows)) is None:
            return self.slots.view(len(rows), self.num_heads, -1)
        groups, is_absent = found
        return self.slots[groups].masked_fill(is_absent.unsqueeze(-1), -1).flatten(2)

    def padded_log_mass(self, rows: np.ndarray) -> torch.Tensor:
        """What is added to scores, `[B, H, w]` as `padded_slots`."""
        mass = self.mass_of_groups
        if (found := self._groups_of(rows)) is None:
            return mass.view(len(rows), self.num_heads, -1)
        return mass[found[0]].flatten(2)

    def padded(self, rows: np.ndarray) -> list[torch.Tensor]:
        """Keys and values `[B, H, w, D]` of `rows`: a view where nothing is encoded and all heads are even.

        Where heads differ, shorter ones are filled up with other tokens.
        """
        whole = self.decoded(0, len(self.slots))
        if (found := self._groups_of(rows)) is None:
            shape = (len(rows), self.num_heads, -1)
            return [state.reshape(*shape, state.shape[-1]) for state in whole]
        return [state[found[0]].flatten(2, 3) for state in whole]

    @property
    def owner(self) -> torch.Tensor:
        """Row and head of each group, as `row * num_heads + head`."""
        if self._owner is None:
            owners = np.repeat(np.arange(self._num_groups.size), self._num_groups.ravel())
            self._owner = torch.from_numpy(owners).to(self.slots.device)
        return self._owner


def move_to_front(keep: torch.Tensor, group_length: int) -> torch.Tensor:
    """Columns to keep, bool `[B, H, n]`, in order: int64 `[B, H, w]`, -1 behind the last; `w` fills whole groups."""
    counts = keep.sum(dim=-1, keepdim=True)
    most = int(counts.max()) if keep.shape[-1] else 0
    order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
    order = nn.functional.pad(order, (0, -most % group_length))
    return torch.where(torch.arange(order.shape[-1], device=keep.device) < counts, order, -1)
