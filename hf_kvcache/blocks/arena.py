"""The blocks of one layer: a tensor a plane (keys, values), reference counts, and the layout that keeps runs long."""

import copy
import weakref
from typing import NamedTuple

import numpy as np
import torch

from .pool import BlockPool
from .runs import Run, copy_runs

# A layout leaves room for a 16th of each row's blocks, rounded down: appending is amortised O(1), and a row of fewer
# than 16 blocks, which is cheap to move, reserves none but its open block.
BLOCKS_PER_SPARE = 16
# Above this many runs, one gather of blocks moves a layout faster than a copy a run.
MAX_COPY_RUNS = 256


class Plane(NamedTuple):
    """Shape of one stored tensor a token: `[num_heads, dim]` values of `dtype`."""

    num_heads: int
    dim: int
    dtype: torch.dtype


class Arena:
    """Storage of one layer's blocks: each plane is one tensor `[H, num_blocks * block_size, dim]`, heads first.

    Heads first makes a run of consecutive blocks a plain view `[H, tokens, dim]` that attention reads in place.
    When a sequence has no room left, all tables move to a new layout with room after each row (`relayout`); planes
    are copied one at a time. Blocks are reference-counted; a block is written only while one sequence refers to it.

    Args:
        pool: gives the memory and enforces its cap.
        planes: what a token stores.
        block_size: tokens a block.
    """

    def __init__(self, pool: BlockPool, planes: tuple[Plane, ...], *, block_size: int):
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1 token.")
        self.pool = pool
        self.specs = planes
        self.block_size = block_size
        self.ref_count = np.zeros(0, dtype=np.int32)
        self.planes = [torch.empty((p.num_heads, 0, p.dim), dtype=p.dtype, device=pool.device) for p in planes]
        self._tables: list[weakref.ref] = []
        pool.register(self)

    @property
    def num_blocks(self) -> int:
        return len(self.ref_count)

    @property
    def num_used_blocks(self) -> int:
        return int(np.count_nonzero(self.ref_count))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all planes."""
        return self.block_size * sum(p.num_heads * p.dim * p.dtype.itemsize for p in self.specs)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that at least one table refers to."""
        return self.num_used_blocks * self.block_bytes

    @property
    def reserved_bytes(self) -> int:
        return sum(plane.untyped_storage().nbytes() for plane in self.planes)

    @property
    def tables(self) -> list:
        """The tables alive on this arena."""
        self._tables = [ref for ref in self._tables if ref() is not None]
        return [table for ref in self._tables if (table := ref()) is not None]

    def add_table(self, table: object) -> None:
        self._tables.append(weakref.ref(table))

    def __deepcopy__(self, memo: dict) -> "Arena":
        copied = memo[id(self)] = Arena.__new__(Arena)
        copied.pool = copy.deepcopy(self.pool, memo)
        copied.specs, copied.block_size = self.specs, self.block_size
        copied.ref_count = np.zeros_like(self.ref_count)
        with torch.inference_mode(False):
            copied.planes = [plane.detach().clone() for plane in self.planes]
        copied._tables = []
        copied.pool.register(copied)
        return copied

    def retain(self, block_ids: np.ndarray) -> None:
        """Add one reference to each of `block_ids` (an id may be listed more than once)."""
        np.add.at(self.ref_count, block_ids.ravel(), 1)

    def release(self, block_ids: np.ndarray) -> None:
        """Drop one reference to each of `block_ids`."""
        np.subtract.at(self.ref_count, block_ids.ravel(), 1)
        assert (self.ref_count >= 0).all(), "a block was released twice"

    def take_following(self, last_ids: np.ndarray, count: int) -> np.ndarray | None:
        """Take the `count` blocks right after each of `last_ids` `[B]`, or return None if any of them is in use."""
        ids = last_ids[:, None] + 1 + np.arange(count)
        if ids.max() >= self.num_blocks or self.ref_count[ids].any() or len(np.unique(ids)) < ids.size:
            return None
        self.ref_count[ids] = 1
        return ids

    def take_free(self, count: int) -> np.ndarray | None:
        """Take any `count` free blocks, or return None if there are fewer."""
        free = np.flatnonzero(self.ref_count == 0)[:count]
        if len(free) < count:
            return None
        self.ref_count[free] = 1
        return free

    def relayout(self, grown: object = None, num_new: int = 0, spare: int = 0) -> np.ndarray | None:
        """Move every table to a compact layout with room after each row; returns `grown`'s `num_new` new blocks a row.

        Shared blocks stay shared. `spare` more free blocks are left at the end.
        """
        new_ids = np.full(self.num_blocks, -1, dtype=np.int64)
        taken, cursor, order = None, 0, []
        for table in self.tables:
            added = num_new if table is grown else 0
            rows = []
            for row in table.block_ids:
                fresh = row[new_ids[row] < 0]
                new_ids[fresh] = cursor + np.arange(len(fresh))
                order.append(fresh)
                rows.append(cursor + len(fresh) + np.arange(added))
                cursor += len(fresh) + added + (len(row) + added) // BLOCKS_PER_SPARE
            if table is grown:
                taken = np.stack(rows)
        source = np.concatenate(order) if order else np.zeros(0, dtype=np.int64)
        self._move(source, new_ids[source], cursor + spare)
        for table in self.tables:
            table.move(new_ids)
        if taken is not None:
            self.ref_count[taken] = 1
        return taken

    def _move(self, source: np.ndarray, target: np.ndarray, num_blocks: int) -> None:
        """Copy blocks `source` to `target` in planes of `num_blocks` blocks, a plane at a time."""
        self.pool.check_room(num_blocks * self.block_bytes - self.reserved_bytes)
        runs = copy_runs(source, target)
        size = self.block_size
        for table in self.tables:
            table.forget_views()  # they would keep the old planes alive beside the new ones
        for i, spec in enumerate(self.specs):
            old = self.planes[i]
            shape = (spec.num_heads, num_blocks * size, spec.dim)
            new = self.pool.reserve(shape, spec.dtype)
            if len(runs) <= MAX_COPY_RUNS:
                for start, stop, length in runs:
                    new[:, stop * size : (stop + length) * size] = old[:, start * size : (start + length) * size]
            else:
                blocked = old.view(spec.num_heads, self.num_blocks, size, spec.dim)
                picked = blocked[:, torch.from_numpy(source).to(old.device)]
                blocked = new.view(spec.num_heads, num_blocks, size, spec.dim)
                blocked[:, torch.from_numpy(target).to(old.device)] = picked
            self.planes[i] = new
            del old
        counts = np.zeros(num_blocks, dtype=np.int32)
        counts[target] = self.ref_count[source]
        self.ref_count = counts

    def copy_blocks(self, source: np.ndarray, target: np.ndarray, length: int) -> None:
        """Copy the first `length` tokens of each block `source` to block `target` (copy on write)."""
        for i, spec in enumerate(self.specs):
            blocked = self.planes[i].view(spec.num_heads, self.num_blocks, self.block_size, spec.dim)
            picked = blocked[:, torch.from_numpy(source).to(blocked.device), :length]
            blocked[:, torch.from_numpy(target).to(blocked.device), :length] = picked

    def view(self, plane: int, run: Run, offset: int, length: int) -> torch.Tensor:
        """`[rows, H, length, dim]`: tokens `offset` to `offset + length` of `run`, in place."""
        tensor, spec = self.planes[plane], self.specs[plane]
        size = (run.row_stop - run.row_start, spec.num_heads, length, spec.dim)
        stride = (run.row_step * self.block_size * spec.dim, tensor.shape[1] * spec.dim, spec.dim, 1)
        return tensor.as_strided(size, stride, (run.block_id * self.block_size + offset) * spec.dim)
