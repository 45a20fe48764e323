"""What a model stores of its tokens beside keys and values: indexer keys, entries, projections, in blocks."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..blocks import Arena, BlockTable, load_table, table_state
from ..blocks.arena import Plane
from ..layers.layer import LayerContext
from ..layers.layer_state import LayerState


class Stream:
    """Tensors `[B, H, T, D]` of consecutive tokens, in one block table. Exact.

    Shapes and device come with the first `append`. A token may be anything of which one follows another, such as a
    summary of 128 tokens of text.

    Args:
        context: of the layer it belongs to, where the blocks come from.
    """

    def __init__(self, context: LayerContext):
        self.context = context
        self.table: BlockTable | None = None

    @property
    def start(self) -> int:
        """The first token that is still held."""
        return 0 if self.table is None else self.table.start

    @property
    def stop(self) -> int:
        """Tokens a row that went in, less those cropped."""
        return 0 if self.table is None else self.table.stop

    @property
    def tables(self) -> list[BlockTable]:
        return [] if self.table is None else [self.table]

    @property
    def values_per_token(self) -> int:
        return 0 if self.table is None else sum(plane.num_heads * plane.dim for plane in self.table.arena.specs)

    @property
    def exact_bytes(self) -> int:
        """Bytes of one token of one row in the dtype it came in."""
        return 0 if self.table is None else self.table.arena.block_bytes // self.table.arena.block_size

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one old token of one row takes."""
        return self.exact_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all that is held, of all rows, as it is stored."""
        return sum(t.num_rows * t.length * t.arena.block_bytes // t.arena.block_size for t in self.tables)

    @property
    def num_values(self) -> int:
        """Elements held now, of all rows."""
        return 0 if self.table is None else self.table.num_rows * (self.stop - self.start) * self.values_per_token

    def append(self, states: Sequence[torch.Tensor], *, keep: int | None = None) -> None:
        """Store new tokens, one `[B, H, n, D]` a tensor; with `keep`, no more than the newest `keep` of all are held.

        Raises:
            ValueError: if they are of another batch size than what is stored.
        """
        states = [state.detach() for state in states]
        if self.table is None:
            self._make(states)
        if states[0].shape[0] != self.table.num_rows:
            raise ValueError(
                f"the cache holds {self.table.num_rows} sequences and was given {states[0].shape[0]}: call "
                "batch_repeat_interleave or batch_select_indices to match them, or reset() to start anew."
            )
        count = states[0].shape[2]
        if keep is not None and count > keep:
            # Of a long prompt, only its end is ever stored.
            self.table.restart(self.stop + count - keep)
            states = [state[:, :, count - keep :] for state in states]
        self._store(states)
        if keep is not None:
            self.drop_front(self.stop - keep)

    def _make(self, states: Sequence[torch.Tensor]) -> None:
        planes = tuple(Plane(state.shape[1], state.shape[-1], state.dtype) for state in states)
        arena = Arena(self.context.pool(states[0].device), planes, block_size=self.context.block_size)
        self.table = BlockTable(arena, states[0].shape[0])

    def _store(self, states: list[torch.Tensor]) -> None:
        self.table.append(states)

    def read(self, begin: int | None = None) -> list[torch.Tensor]:
        """The held tokens from `begin` on, `[B, H, n, D]` a tensor: views where they lie in one run."""
        return self.table.materialize(begin)

    def crop(self, count: int) -> None:
        """Forget the newest `count` tokens."""
        if self.table is not None:
            self.table.crop(count)

    def drop_front(self, start: int) -> None:
        """Forget the tokens before `start`."""
        if self.table is not None:
            self.table.drop_front(start)

    def select_rows(self, rows: np.ndarray) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        for table in self.tables:
            table.select_rows(rows)

    def fork(self) -> "Stream":
        """A second stream over the same tokens; blocks are shared until one of the two writes."""
        forked = copy.copy(self)
        forked.table = None if self.table is None else self.table.fork()
        return forked

    def to(self, device: torch.device, context: LayerContext) -> None:
        """Move to `device`, to a pool of `context`."""
        self.context = replace(self.context, pools=context.pools)
        if self.table is not None:
            self.table = self.table.to(context.pool(device))

    def state(self) -> LayerState:
        return LayerState() if self.table is None else table_state(self.table)

    def load_state(self, state: LayerState, device: torch.device) -> None:
        """Become, from new, the stream that gave `state`, on `device`."""
        if state.tensors:
            rows = state.tensors["block_ids"].shape[0]
            planes = [state.tensors[f"plane_{index}"] for index in range(len(state.tensors) - 1)]
            self._make([plane.new_empty(rows, plane.shape[0], 0, plane.shape[2], device=device) for plane in planes])
            load_table(self.table, state)

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self.table = None
