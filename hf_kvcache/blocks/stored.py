"""A block table as plain tensors, and back: every token once, however many rows share it, and no free slot.

The layout is restored as it was, holes included, so that a restored table is read in the same runs and gives the same
bits.
"""

from itertools import pairwise

import numpy as np
import torch

from ..layers.layer_state import LayerState
from .table import BlockTable


def table_state(table: BlockTable) -> LayerState:
    """Block ids `[B, N]`, and of each plane the slots that hold a token: `[H, slots, dim]`, ascending.

    Planes are views of the arena where those slots are one run, else copies.
    """
    runs = _token_runs(table)
    tensors = {"block_ids": torch.from_numpy(table.block_ids.astype(np.int32))}
    for index, plane in enumerate(table.arena.planes):
        pieces = [plane[:, start:stop] for start, stop in runs] or [plane[:, :0]]
        tensors[f"plane_{index}"] = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    numbers = {
        "start": table.start,
        "stop": table.stop,
        "first_column": table.first_column,
        "num_blocks": table.arena.num_blocks,
    }
    return LayerState(tensors, numbers)


def load_table(table: BlockTable, state: LayerState) -> None:
    """Fill an empty `table` on an arena of its own with what `table_state` gave, from the CPU.

    Raises:
        ValueError: if the planes are not those that the arena stores.
        RuntimeError: if the pool has no room for them.
    """
    planes = [state.tensors[f"plane_{index}"] for index in range(len(table.arena.specs))]
    for spec, plane in zip(table.arena.specs, planes, strict=True):
        if (spec.num_heads, spec.dim, spec.dtype) != (plane.shape[0], plane.shape[2], plane.dtype):
            raise ValueError(
                f"stored tokens of shape {list(plane.shape)} and {plane.dtype} do not fit a layer of {spec.num_heads} "
                f"heads x {spec.dim} of {spec.dtype}: load them with the model and technique they were saved with."
            )
    table.arena.relayout(spare=state.numbers["num_blocks"])
    table.block_ids = state.tensors["block_ids"].numpy().astype(np.int64)
    table.arena.retain(table.block_ids)
    table.start, table.stop = state.numbers["start"], state.numbers["stop"]
    table.first_column = state.numbers["first_column"]
    cursor = 0
    for start, stop in _token_runs(table):
        for index, plane in enumerate(planes):
            table.arena.planes[index][:, start:stop] = plane[:, cursor : cursor + stop - start]
        cursor += stop - start
    assert all(plane.shape[1] == cursor for plane in planes), "every stored token has a slot"


def _token_runs(table: BlockTable) -> list[tuple[int, int]]:
    """The runs `[start, stop)` of arena slots that hold tokens of `table`, each slot once."""
    size = table.arena.block_size
    tokens = np.arange(table.start, table.stop)
    slots = np.unique(table.block_ids[:, tokens // size - table.first_column] * size + tokens % size)
    if not len(slots):
        return []
    edges = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(int(slots[start]), int(slots[stop - 1]) + 1) for start, stop in pairwise(edges)]
