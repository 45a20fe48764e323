"""The tokens that an eviction left of older ones: heads and rows keep different ones, as many as they like.

Stored compactly: a head's tokens fill whole groups, and the groups of all heads and rows follow each other, so that a
head which keeps more takes memory from no other. Once made, the tensors never change: forks and beams share them.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from .attention import attend_with_logsumexp
from .blocks import BlockPool
from .masks import as_mask_for, visible

GROUP_LENGTH = 16


class KeptTokens:
    """Groups of `GROUP_LENGTH` tokens of one head of one row: keys `[N, 16, D]`, values `[N, 16, Dv]`, slots `[N, 16]`.

    Groups are ordered by row, then head. The last group of a head may hold fewer tokens: its other slots are -1.

    Args:
        pool: counts the memory.
        states: keys and values `[B, H, w, D]` to keep, those of each head first; `w` is a multiple of `GROUP_LENGTH`.
        slots: int64 `[B, H, w]`, their places in the sequence; -1 from where a head has no more.
    """

    def __init__(self, pool: BlockPool, states: Sequence[torch.Tensor], slots: torch.Tensor):
        self.num_heads = states[0].shape[1]
        # The one sync of an eviction: how many tokens each head of each row keeps.
        self.counts: np.ndarray = (slots >= 0).sum(dim=-1).cpu().numpy()
        self._num_groups = -(-self.counts // GROUP_LENGTH)
        self._owner: torch.Tensor | None = None
        is_group = (slots >= 0).unflatten(-1, (-1, GROUP_LENGTH)).any(dim=-1)
        shapes = [(int(self._num_groups.sum()), GROUP_LENGTH, state.shape[-1]) for state in states]
        pool.check_room(sum(math.prod(shape) * s.itemsize for shape, s in zip(shapes, states, strict=True)))
        self.planes = [pool.reserve(shape, s.dtype) for shape, s in zip(shapes, states, strict=True)]
        for plane, state in zip(self.planes, states, strict=True):
            plane.copy_(state.unflatten(2, (-1, GROUP_LENGTH))[is_group])
        with torch.inference_mode(False):
            self.slots = slots.unflatten(-1, (-1, GROUP_LENGTH))[is_group].to(torch.int32).clone()
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
        return self.reserved_bytes + self.slots.nbytes

    @property
    def num_rows(self) -> int:
        return len(self.counts)

    @property
    def is_even(self) -> bool:
        """Whether all heads of all rows have as many groups, so that the groups are one plain `[B, H, n, D]`."""
        return bool((self._num_groups == self._num_groups.flat[0]).all())

    @property
    def has_gaps(self) -> bool:
        """Whether a group holds fewer tokens than it could."""
        return bool((self.counts % GROUP_LENGTH).any())

    def to(self, pool: BlockPool) -> "KeptTokens":
        """The same tokens on another device."""
        moved = object.__new__(KeptTokens)
        moved.__dict__.update(self.__dict__)
        moved.planes = [plane.to(pool.device) for plane in self.planes]
        moved.slots, moved._owner = self.slots.to(pool.device), None
        pool.register(moved)
        return moved

    def take(self, pool: BlockPool, rows: np.ndarray) -> "KeptTokens":
        """A copy of some rows, to let go of the others."""
        keys, values, slots = self.padded(rows)
        return KeptTokens(pool, (keys, values), slots)

    # --- reading

    def padded(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values `[B, H, w, D]` and slots `[B, H, w]` (int64, -1 for none) of `rows`: views, where all are even.

        Where heads differ, shorter ones are filled up with copies of other tokens.
        """
        if self.is_even:
            shape = (self.num_rows, self.num_heads, -1)
            whole = [plane.view(*shape, plane.shape[-1]) for plane in self.planes]
            slots = self.slots.view(shape).long()
            if np.array_equal(rows, np.arange(self.num_rows)):
                return whole[0], whole[1], slots
            index = torch.from_numpy(rows).to(slots.device)
            return whole[0][index], whole[1][index], slots[index]
        stops = self._num_groups.ravel().cumsum().reshape(self._num_groups.shape)
        starts = (stops - self._num_groups)[rows]
        places = np.arange(int(self._num_groups.max()))
        is_there = places < self._num_groups[rows][..., None]
        groups = torch.from_numpy(np.where(is_there, starts[..., None] + places, 0)).to(self.slots.device)
        keys, values = (plane[groups].flatten(2, 3) for plane in self.planes)
        absent = torch.from_numpy(~is_there).to(self.slots.device)
        slots = self.slots[groups].masked_fill(absent.unsqueeze(-1), -1)
        return keys, values, slots.flatten(2, 3).long()

    def attend(
        self, query: torch.Tensor, mask: torch.Tensor | None, scale: float, rows: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of `query` `[B, Hq, Tq, D]` to these tokens alone, row `i` to those of `rows[i]`, read in place.

        Args:
            mask: boolean or additive, `[B or 1, 1, Tq, T]`, a column for each slot.

        Returns:
            Output `[B, Hq, Tq, Dv]` and log-sum-exp `[B, Hq, Tq]` (float32).
        """
        batch, heads, length, dim = query.shape
        groups = heads // self.num_heads
        own, place, most = _places(rows)
        is_plain = most == 1 and np.array_equal(own, np.arange(self.num_rows))
        seen = None if mask is None else visible(mask)[:, 0].expand(batch, -1, -1)  # [B, Tq, T]
        packed = query.reshape(batch, self.num_heads, groups * length, dim)
        if not is_plain:
            # Rows that share their tokens are one taller query matrix, so that no token is copied.
            packed = _spread(packed.transpose(1, 2), own, place, (self.num_rows, most))  # [R, most, M, H, D]
            packed = packed.flatten(1, 2).transpose(1, 2)
            seen = None if seen is None else _spread(seen, own, place, (self.num_rows, most)).flatten(1, 2)
        allowed = None
        if seen is not None or self.has_gaps:
            allowed = self._allowed(seen, groups, most, length)
        attend = self._attend_even if self.is_even else self._attend_ragged
        output, logsumexp = attend(packed, allowed, scale)  # [R, H, most * M, Dv], [R, H, most * M]
        if not is_plain:
            at = tuple(torch.from_numpy(i).to(query.device) for i in (own, place))
            output = output.unflatten(2, (most, -1)).transpose(1, 2)[at]
            logsumexp = logsumexp.unflatten(2, (most, -1)).transpose(1, 2)[at]
        return output.reshape(batch, heads, length, -1), logsumexp.reshape(batch, heads, length)

    def _allowed(self, seen: torch.Tensor | None, groups: int, most: int, length: int) -> torch.Tensor:
        """Which query rows see which token of each group, `[N, most * groups * Tq, 16]` (or `[N, 1, 16]` for all)."""
        is_token = (self.slots >= 0).unsqueeze(1)
        if seen is None:
            return is_token
        row = self.owner // self.num_heads
        own = seen[row].gather(2, self.slots.clamp(min=0).long().unsqueeze(1).expand(-1, seen.shape[1], -1))
        own = own.unflatten(1, (most, length)).unsqueeze(2).expand(-1, -1, groups, -1, -1)
        return own.flatten(1, 3) & is_token

    @property
    def owner(self) -> torch.Tensor:
        """Row and head of each group, as `row * num_heads + head`."""
        if self._owner is None:
            owners = np.repeat(np.arange(self._num_groups.size), self._num_groups.ravel())
            self._owner = torch.from_numpy(owners).to(self.slots.device)
        return self._owner

    def _attend_even(self, packed, allowed, scale):
        shape = (self.num_rows, self.num_heads, -1)
        keys, values = (plane.view(*shape, plane.shape[-1]) for plane in self.planes)
        if allowed is not None:
            allowed = allowed.view(*shape, *allowed.shape[1:]).transpose(2, 3).flatten(3)  # [R, H, M, n]
        return attend_with_logsumexp(packed, keys, values, allowed, scale)

    def _attend_ragged(self, packed, allowed, scale):
        """One batched product over the groups of all heads, and a softmax over those that belong together."""
        owner, num_owners = self.owner, packed.shape[0] * packed.shape[1]
        queries = packed.flatten(0, 1)
        scores = torch.bmm(queries[owner], self.planes[0].transpose(1, 2)).float().mul_(scale)  # [N, M, 16]
        if allowed is not None:
            scores.masked_fill_(~allowed, -torch.inf)
        index = owner[:, None].expand(-1, scores.shape[1])
        highest = scores.new_full((num_owners, scores.shape[1]), -torch.inf)
        highest.scatter_reduce_(0, index, scores.amax(dim=-1), "amax")
        highest = highest.masked_fill(highest == -torch.inf, 0.0)
        weights = scores.sub_(highest[owner].unsqueeze(-1)).exp_()
        total = torch.zeros_like(highest).index_add_(0, owner, weights.sum(dim=-1))
        parts = torch.bmm(weights.to(self.planes[1].dtype), self.planes[1]).float()  # [N, M, Dv]
        output = parts.new_zeros(num_owners, *parts.shape[1:]).index_add_(0, owner, parts)
        output = (output / total.unsqueeze(-1)).nan_to_num(0.0).to(packed.dtype)
        logsumexp = highest + total.log()
        return output.unflatten(0, packed.shape[:2]), logsumexp.unflatten(0, packed.shape[:2])


def _places(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """For each row that reads `rows[i]`: `rows[i]`, its place among those that read the same, and the most that do."""
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], rows[order])
    place = np.empty_like(rows)
    place[order] = np.arange(len(rows)) - starts
    return rows, place, int(place.max()) + 1


def _spread(states: torch.Tensor, own: np.ndarray, place: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """`[B, ...]` to `[R, most, ...]`: row `i` at `(own[i], place[i])`, zeros elsewhere."""
    spread = states.new_zeros(*size, *states.shape[1:])
    spread[torch.from_numpy(own).to(states.device), torch.from_numpy(place).to(states.device)] = states
    return spread


def move_to_front(keep: torch.Tensor) -> torch.Tensor:
    """Columns to keep, bool `[B, H, n]`, in order: int64 `[B, H, w]`, -1 behind the last; `w` fills whole groups."""
    counts = keep.sum(dim=-1, keepdim=True)
    most = int(counts.max()) if keep.shape[-1] else 0
    order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
    order = nn.functional.pad(order, (0, -most % GROUP_LENGTH))
    return torch.where(torch.arange(order.shape[-1], device=keep.device) < counts, order, -1)


def join_kept(
    name: str,
    module: nn.Module,
    query: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tail: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Kept tokens (`KeptTokens.padded`) and newer ones as plain keys and values, and a mask a head, for any attention.

    Raises:
        NotImplementedError: if heads keep other numbers of tokens and the model's attention takes no mask.
    """
    *states, slots = kept
    joined = [torch.cat(pair, dim=2) for pair in zip(states, tail, strict=True)]
    if mask is None and not bool((slots < 0).any()):
        return joined, None
    implementation = module.config._attn_implementation
    if "flash" in implementation:
        raise NotImplementedError(
            f"{name} keeps other tokens for each head, which attn_implementation={implementation!r} cannot mask: load "
            "the model with attn_implementation='sdpa' or 'eager'."
        )
    rows, kv_heads = slots.shape[:2]
    heads, length, tail_length = query.shape[1], query.shape[2], tail[0].shape[2]
    allowed = (slots >= 0).unsqueeze(2)  # [B, Hkv, 1, w]
    if mask is None:
        own = torch.ones((1, 1, 1, tail_length), dtype=torch.bool, device=query.device)
        own = as_mask_for(module, own, query.dtype)
    else:
        index = slots.clamp(min=0).unsqueeze(2).expand(-1, -1, length, -1)
        allowed = visible(mask).expand(rows, kv_heads, -1, -1).gather(-1, index) & allowed
        own = mask[..., mask.shape[-1] - tail_length :]
    own_kept = as_mask_for(module, allowed.repeat_interleave(heads // kv_heads, dim=1), query.dtype)
    shape = (rows, heads, length, -1)
    return joined, torch.cat([own_kept.expand(shape), own.expand(shape)], dim=-1)
