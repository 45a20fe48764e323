"""The tokens that an eviction left of older ones: heads and rows keep different ones, as many as they like.

Stored compactly: a head's tokens fill whole groups, and the groups of all heads and rows follow each other, so that a
head which keeps more takes memory from no other. Groups may be encoded. Once made, the tensors never change: forks and
beams share them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..blocks import BlockPool
from ..codecs.base import Shape
from ..codecs.by_head import HeadCodecs
from ..codecs.exact import ExactCodec
from ..layers.layer_state import LayerState
from .coded_groups import CodedGroups

_BESIDE = ("slots", "origins", "log_mass")  # what is stored of each group besides its planes


class KeptTokens:
    """`N` groups of `G` tokens, each of one head of one row (`CodedGroups`), and the tokens' slots `[N, G]`.

    Groups are ordered by row, then head. A slot is -1 where a group holds no token. What is added to a token's scores
    (`log_mass`, float32 `[N, G]`) is there only where tokens may stand for others, and the position of each group's
    first token (`origins`, int32 `[N]`) only where keys are encoded without their rotary embedding.

    Args:
        pool: counts the memory.
        codecs: of each head.
        states: keys and values `[B, H, w, D]` to keep, those of each head first; `w` is a multiple of `G`.
        slots: int64 `[B, H, w]`, their places in the sequence; -1 from where a head has no more.
        positions: int64 `[B, H, w]`, of the keys, by the distance from the row's first real token. Of a group, they are
            as far from each other as the slots, or 1 if `codecs.is_packed`.
        log_mass: added to their scores, `[B, H, w]`; None if each stands for itself alone.
    """

    def __init__(
        self,
        pool: BlockPool,
        codecs: HeadCodecs,
        states: Sequence[torch.Tensor],
        slots: torch.Tensor,
        positions: torch.Tensor | None = None,
        log_mass: torch.Tensor | None = None,
    ):
        self._describe(codecs, states)
        grouped = slots.unflatten(-1, (-1, self.group_length))
        is_group = (grouped >= 0).any(dim=-1)
        keys, values = states
        beside = {"slots": grouped[is_group].to(torch.int32)}
        if codecs.rotary is not None:
            keys = codecs.turn(keys.flatten(0, 1), -positions.flatten(0, 1)).view_as(keys)
            beside["origins"] = positions[..., :: self.group_length][is_group].to(torch.int32)
        if log_mass is not None:
            beside["log_mass"] = log_mass.unflatten(-1, (-1, self.group_length))[is_group]
        # A sync an eviction: how many groups each head of each row needs.
        num_groups = is_group.sum(dim=-1).cpu().numpy()
        planes = CodedGroups.encode(codecs, (keys, values), is_group)
        groups = CodedGroups(pool, codecs, self.shapes, planes, codecs.kinds_of(num_groups))
        self._hold(pool, groups, beside, num_groups, (slots >= 0).sum(dim=-1).cpu().numpy())

    def _describe(self, codecs: HeadCodecs, states: Sequence[torch.Tensor]) -> None:
        self.codecs = codecs
        self.group_length = codecs.group_length
        self.num_heads = states[0].shape[1]
        self.shapes = tuple(Shape(1, state.shape[-1], state.dtype) for state in states)

    @classmethod
    def from_state(
        cls, pool: BlockPool, codecs: HeadCodecs, states: Sequence[torch.Tensor], state: LayerState
    ) -> "KeptTokens":
        """What gave `state`; `states` are any keys and values of the layer, for their shapes."""
        kept = object.__new__(cls)
        kept._describe(codecs, states)
        tensors = {name: tensor.to(pool.device) for name, tensor in state.tensors.items()}
        counts, num_groups = (state.tensors[name].numpy() for name in ("counts", "num_groups"))
        groups = CodedGroups.from_named(pool, codecs, kept.shapes, tensors, codecs.kinds_of(num_groups))
        beside = {name: tensors[name] for name in _BESIDE if name in tensors}
        kept._hold(pool, groups, beside, num_groups, counts)
        return kept

    def state(self) -> LayerState:
        """Everything, as plain tensors."""
        counts = {"counts": torch.from_numpy(self.counts), "num_groups": torch.from_numpy(self._num_groups)}
        return LayerState(self.groups.named() | self._beside | counts)

    def _hold(
        self,
        pool: BlockPool,
        groups: CodedGroups,
        beside: dict[str, torch.Tensor],
        num_groups: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        self.groups = groups
        with torch.inference_mode(False):
            self._beside = {name: tensor.clone() for name, tensor in beside.items()}  # a row for each group
        self.counts, self._num_groups = counts, num_groups
        self._owner: torch.Tensor | None = None
        pool.register(self)

    # --- what a pool asks of the memory it gave

    @property
    def reserved_bytes(self) -> int:
        return self.groups.nbytes

    used_bytes = reserved_bytes  # nothing here is room to grow

    # --- how they lie

    @property
    def nbytes(self) -> int:
        return self.reserved_bytes + sum(tensor.nbytes for tensor in self._beside.values())

    @property
    def slots(self) -> torch.Tensor:
        return self._beside["slots"]

    @property
    def log_mass(self) -> torch.Tensor | None:
        return self._beside.get("log_mass")

    @property
    def num_rows(self) -> int:
        return len(self.counts)

    @property
    def is_exact(self) -> bool:
        return isinstance(self.codecs.pairs[0][0], ExactCodec)

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
        beside = {name: tensor.to(pool.device) for name, tensor in self._beside.items()}
        return self._like(pool, self.groups.to(pool), beside, self._num_groups, self.counts)

    def take(self, pool: BlockPool, rows: np.ndarray) -> "KeptTokens":
        """A copy of some rows, to let go of the others."""
        own = np.repeat(np.arange(self.num_rows), self._num_groups.sum(axis=1))
        groups = np.concatenate([np.flatnonzero(own == row) for row in rows])
        index = torch.from_numpy(groups).to(self.slots.device)
        beside = {name: tensor[index] for name, tensor in self._beside.items()}
        return self._like(pool, self.groups.take(pool, groups), beside, self._num_groups[rows], self.counts[rows])

    def join(self, pool: BlockPool, newer: "KeptTokens") -> "KeptTokens":
        """Each head's groups, then its groups of `newer`. Nothing is encoded again."""
        order = np.concatenate([store._owners() for store in (self, newer)]).argsort(kind="stable")
        index = torch.from_numpy(order).to(self.slots.device)
        pair = [store._beside for store in (self, newer)]
        if any("log_mass" in beside for beside in pair):
            pair = [store._beside | {"log_mass": store.mass_of_groups} for store in (self, newer)]
        beside = {name: torch.cat([own[name] for own in pair])[index] for name in pair[0]}
        groups = self.groups.join(pool, newer.groups, order)
        return self._like(pool, groups, beside, self._num_groups + newer._num_groups, self.counts + newer.counts)

    # --- reading

    @property
    def mass_of_groups(self) -> torch.Tensor:
        """What is added to the scores of each token of each group, float32 `[N, G]`."""
        return torch.zeros(self.slots.shape, device=self.slots.device) if self.log_mass is None else self.log_mass

    def decoded(self, start: int, stop: int) -> list[torch.Tensor]:
        """Keys and values `[n, G, D]` of the groups from `start` to `stop`."""
        keys, values = self.groups.decoded(start, stop)
        if self.codecs.rotary is not None:
            keys = self.codecs.turn(keys, self._positions(start, stop))
        return [keys, values]

    def _positions(self, start: int, stop: int) -> torch.Tensor:
        """The position of each key, `[n, G]`."""
        slots = self.slots[start:stop]
        if self.codecs.is_packed:
            steps = torch.arange(self.group_length, dtype=slots.dtype, device=slots.device)
        else:
            steps = (slots - slots[:, :1]).clamp(min=0)  # 0 where there is no token
        return self._beside["origins"][start:stop, None] + steps

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

    def group_ids(self, rows: np.ndarray, heads: slice | list[int]) -> np.ndarray:
        """Index of each group of `heads` of `rows`, int64 `[B * h, n]`; 0 where a head has fewer than others."""
        stops = self._num_groups.ravel().cumsum().reshape(self._num_groups.shape)[rows][:, heads].reshape(-1, 1)
        num_groups = self._num_groups[rows][:, heads].reshape(-1, 1)
        places = np.arange(int(num_groups.max()))
        return np.where(places < num_groups, stops - num_groups + places, 0)

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
            self._owner = torch.from_numpy(self._owners()).to(self.slots.device)
        return self._owner

    def _owners(self) -> np.ndarray:
        return np.repeat(np.arange(self._num_groups.size), self._num_groups.ravel())
