"""Chosen tokens or blocks of a table, other ones for each head and row, copied together for one attention call."""

import torch

from .table import BlockTable


def gather_units(
    table: BlockTable, units: torch.Tensor, unit: int, *, num_planes: int | None = None
) -> list[torch.Tensor]:
    """Copies of chosen units.

    Args:
        table: where they lie; it holds its tokens from the first on.
        units: `[B, H, K]` int64; unit `i` is the tokens `[i * unit, (i + 1) * unit)`.
        unit: tokens a unit: 1, or the block size.
        num_planes: gather the first planes only.

    Returns:
        `[B, H, K * unit, dim]` for each plane.
    """
    assert table.first_column == 0, "columns and blocks of tokens are the same"
    size, ids = table.arena.block_size, table.device_ids
    rows, heads, count = units.shape
    flat = units.flatten(1)
    places = ids.gather(1, flat) if unit == size else ids.gather(1, flat // size) * size + flat % size
    per_head = table.arena.num_blocks * size // unit
    places = places.view(rows, heads, count) + (torch.arange(heads, device=ids.device) * per_head)[:, None]
    places = places.flatten()
    gathered = []
    for plane, spec in list(zip(table.arena.planes, table.arena.specs, strict=True))[:num_planes]:
        picked = plane.view(-1, unit * spec.dim).index_select(0, places)
        gathered.append(picked.view(rows, heads, count * unit, spec.dim))
    return gathered
