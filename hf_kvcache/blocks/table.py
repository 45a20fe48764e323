"""Block tables of a batch of sequences on one arena: append, crop, drop the front, reorder, fork, free."""

import copy
import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .arena import Arena
from .pool import BlockPool
from .runs import Span, find_spans

_versions = itertools.count()


class Part(NamedTuple):
    """Tokens `[start, stop)` of all rows: a plane is a list of `(first row, [rows, H, stop - start, dim])`."""

    start: int
    stop: int
    planes: tuple[list[tuple[int, torch.Tensor]], ...]

    def joined(self, plane: int) -> torch.Tensor:
        """`[B, H, stop - start, dim]`: a view when all rows are one run, else their concatenation."""
        tensors = [tensor for _, tensor in self.planes[plane]]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class BlockTable:
    """Maps the tokens `[start, stop)` of each of `B` equally long sequences to blocks of an arena.

    Column `c` of `block_ids` `[B, N]` holds the tokens of `[(first_column + c) * block_size, ...)`. Rows may share
    blocks; a shared block is copied before it is written (copy on write). `version` changes whenever tokens come to lie
    elsewhere; no two tables have the same.
    """

    def __init__(self, arena: Arena, num_rows: int):
        self.arena = arena
        self.block_ids = np.zeros((num_rows, 0), dtype=np.int64)
        self.first_column = 0
        self.start = 0
        self.stop = 0
        self._spans: list[Span] | None = None
        self._one_run: list[torch.Tensor] | None = None
        self._device_ids: torch.Tensor | None = None
        self._owns_open_block = False
        self.version = next(_versions)
        arena.add_table(self)

    def __deepcopy__(self, memo: dict) -> "BlockTable":
        memo[id(self)] = copied = self._clone(copy.deepcopy(self.arena, memo))
        return copied

    def _clone(self, arena: Arena) -> "BlockTable":
        clone = BlockTable(arena, self.num_rows)
        clone.block_ids = self.block_ids.copy()
        clone.first_column, clone.start, clone.stop = self.first_column, self.start, self.stop
        arena.retain(clone.block_ids)
        self._owns_open_block = False
        return clone

    def __del__(self):
        if not sys.is_finalizing():  # numpy may be gone by then, and so is the arena
            self.arena.release(self.block_ids)

    def fork(self) -> "BlockTable":
        """A second table over the same tokens that shares every block until one of the two writes."""
        return self._clone(self.arena)

    def to(self, pool: BlockPool) -> "BlockTable":
        """The same tokens in an arena of another pool (on another device), without blocks that nothing refers to."""
        moved = BlockTable(Arena(pool, self.arena.specs, block_size=self.arena.block_size), self.num_rows)
        moved.restart(self.start)
        moved.append([state.to(pool.device) for state in self.materialize()])
        return moved

    @property
    def num_rows(self) -> int:
        return self.block_ids.shape[0]

    @property
    def length(self) -> int:
        """Tokens held a row."""
        return self.stop - self.start

    def move(self, new_ids: np.ndarray) -> None:
        """Follow a new layout of the arena: block `i` is now block `new_ids[i]`."""
        self._set_ids(new_ids[self.block_ids])

    def forget_views(self) -> None:
        """Let go of the views of the arena that reading keeps at hand."""
        self._one_run = None
        self.version = next(_versions)

    def _set_ids(self, block_ids: np.ndarray) -> None:
        self.block_ids = block_ids
        self.version = next(_versions)
        self._spans = self._one_run = self._device_ids = None
        self._owns_open_block = False

    # --- writing

    def append(self, states: Sequence[torch.Tensor]) -> None:
        """Store `states`, one `[B, H, n, dim]` tensor a plane, as the tokens `[stop, stop + n)`."""
        count = states[0].shape[2]
        size = self.arena.block_size
        if not self._owns_open_block:
            self._own_open_block()
            self._owns_open_block = True
        columns = -(-(self.stop + count) // size) - self.first_column - self.block_ids.shape[1]
        if columns > 0:
            self._extend(columns)
            self._owns_open_block = True
        self.stop += count
        if count:
            self._write(states, self.stop - count)

    def _extend(self, columns: int) -> None:
        taken = None
        if self.block_ids.shape[1]:
            taken = self.arena.take_following(self.block_ids[:, -1], columns)
        if taken is None:
            taken = self.arena.relayout(self, columns)
        self._set_ids(np.concatenate([self.block_ids, taken], axis=1))

    def _own_open_block(self) -> None:
        """Give each row a last block of its own if the next token would be written to a shared one."""
        open_length = self.stop % self.arena.block_size
        if not open_length or not self.block_ids.shape[1]:
            return
        last = self.block_ids[:, -1]
        shared = self.arena.ref_count[last] > 1
        if not shared.any():
            return
        seen: dict[int, int] = {}
        rows = []
        for row in np.flatnonzero(shared).tolist():
            # The last of the block's owners may keep it.
            seen[int(last[row])] = seen.get(int(last[row]), 0) + 1
            if seen[int(last[row])] < self.arena.ref_count[last[row]]:
                rows.append(row)
        fresh = self.arena.take_free(len(rows))
        if fresh is None:
            self.arena.relayout(spare=len(rows))
            fresh = self.arena.take_free(len(rows))
        old = self.block_ids[rows, -1]
        self.arena.copy_blocks(old, fresh, open_length)
        self.arena.release(old)
        block_ids = self.block_ids.copy()
        block_ids[rows, -1] = fresh
        self._set_ids(block_ids)

    def _write(self, states: Sequence[torch.Tensor], begin: int) -> None:
        if (run := self.one_run) is not None:
            offset = begin - self.first_column * self.arena.block_size
            for view, state in zip(run, states, strict=True):
                view.narrow(2, offset, self.stop - begin).copy_(state)
            return
        spans = [span for span in self.spans if self._column_stop(span) > begin]
        if len(spans) == 1 and len(spans[0].runs) == 1:
            span, run = spans[0], spans[0].runs[0]
            offset = begin - (self.first_column + span.column_start) * self.arena.block_size
            for plane, state in enumerate(states):
                self.arena.view(plane, run, offset, self.stop - begin).copy_(state)
            return
        slots = self.slots(begin, self.stop).flatten()
        for plane, state in enumerate(states):
            tensor = self.arena.planes[plane]
            tensor[:, slots] = state.transpose(0, 1).flatten(1, 2).to(tensor.dtype)

    def _column_stop(self, span: Span) -> int:
        return (self.first_column + span.column_stop) * self.arena.block_size

    # --- reading

    @property
    def spans(self) -> list[Span]:
        if self._spans is None:
            self._spans = find_spans(self.block_ids, self.arena.block_size)
        return self._spans

    @property
    def one_run(self) -> list[torch.Tensor] | None:
        """Each plane as one view `[B, H, N * block_size, dim]` from the first column on, if all rows are one run."""
        if self._one_run is None and len(self.spans) == 1 and len(self.spans[0].runs) == 1:
            run, length = self.spans[0].runs[0], self.block_ids.shape[1] * self.arena.block_size
            self._one_run = [self.arena.view(plane, run, 0, length) for plane in range(len(self.arena.planes))]
        return self._one_run

    @property
    def device_ids(self) -> torch.Tensor:
        """`block_ids` on the arena's device, copied there when they have changed."""
        if self.arena.pool.device.type == "cpu":
            return torch.from_numpy(self.block_ids)  # the same memory
        if self._device_ids is None:
            self._device_ids = torch.from_numpy(self.block_ids).to(self.arena.pool.device)
        return self._device_ids

    def slots(self, begin: int, stop: int) -> torch.Tensor:
        """Slots of the tokens `[begin, stop)`, int64 `[B, stop - begin]`, on the arena's device."""
        size = self.arena.block_size
        tokens = np.arange(begin, stop)
        slots = self.block_ids[:, tokens // size - self.first_column] * size + tokens % size
        return torch.from_numpy(slots).to(self.arena.pool.device)

    def parts(self, begin: int | None = None) -> list[Part]:
        """The tokens from `begin` (default: `start`) to `stop`, as views where rows lie in runs, else gathered."""
        begin = self.start if begin is None else begin
        size = self.arena.block_size
        parts = []
        for span in self.spans:
            origin = (self.first_column + span.column_start) * size
            first, last = max(origin, begin), min(self._column_stop(span), self.stop)
            if first >= last:
                continue
            planes = tuple(self._read(plane, span, first, last, origin) for plane in range(len(self.arena.planes)))
            parts.append(Part(first, last, planes))
        return parts

    def _read(self, plane: int, span: Span, first: int, last: int, origin: int) -> list[tuple[int, torch.Tensor]]:
        if span.runs:
            view = self.arena.view
            return [(run.row_start, view(plane, run, first - origin, last - first)) for run in span.runs]
        tensor, slots = self.arena.planes[plane], self.slots(first, last)
        gathered = tensor[:, slots.flatten()].unflatten(1, slots.shape).transpose(0, 1)
        return [(0, gathered)]

    def materialize(self, begin: int | None = None) -> list[torch.Tensor]:
        """One `[B, H, length, dim]` tensor a plane: a view when the table is one run, else a copy."""
        if (run := self.one_run) is not None:
            begin = self.start if begin is None else begin
            offset = begin - self.first_column * self.arena.block_size
            return [view.narrow(2, offset, self.stop - begin) for view in run]
        parts = self.parts(begin)
        if not parts:
            spec = self.arena.specs
            return [self.arena.planes[i].new_empty(self.num_rows, s.num_heads, 0, s.dim) for i, s in enumerate(spec)]
        planes = range(len(self.arena.planes))
        if len(parts) == 1:
            return [parts[0].joined(plane) for plane in planes]
        return [torch.cat([part.joined(plane) for part in parts], dim=2) for plane in planes]

    # --- forgetting and rearranging

    def crop(self, count: int) -> None:
        """Forget the newest `count` tokens."""
        if not 0 <= count <= self.length:
            raise ValueError(f"crop({count}) is not possible: the table holds {self.length} tokens.")
        self.stop -= count
        self._owns_open_block = False
        keep = max(0, -(-self.stop // self.arena.block_size) - self.first_column)
        self._free_columns(keep, self.block_ids.shape[1])

    def drop_front(self, start: int) -> None:
        """Forget the tokens before `start`; whole blocks return to the arena."""
        self.start = max(self.start, min(start, self.stop))
        columns = min(self.start // self.arena.block_size - self.first_column, self.block_ids.shape[1])
        if columns > 0:
            self._free_columns(0, columns)
            self.first_column += columns

    def restart(self, position: int) -> None:
        """Forget everything; the next token appended is token `position`."""
        self._free_columns(0, self.block_ids.shape[1])
        self.first_column = position // self.arena.block_size
        self.start = self.stop = position

    def _free_columns(self, column_start: int, column_stop: int) -> None:
        if column_start >= column_stop:
            return
        self.arena.release(self.block_ids[:, column_start:column_stop])
        self._set_ids(np.delete(self.block_ids, slice(column_start, column_stop), axis=1))

    def select_rows(self, rows: np.ndarray) -> None:
        """Row `i` becomes what row `rows[i]` was: rows are forked, dropped or reordered without copying a block."""
        chosen = self.block_ids[rows]
        self.arena.retain(chosen)
        self.arena.release(self.block_ids)
        self._set_ids(chosen)

    def compact(self) -> None:
        """Give memory that no sequence refers to back to the device."""
        self.arena.relayout()
