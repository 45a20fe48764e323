"""Chosen tokens or blocks of a table, other ones for each head and row: where they lie, and copies of them."""

import torch

from .table import BlockTable


def places(table: BlockTable, units: torch.Tensor, unit: int) -> torch.Tensor:
    """Where units lie in a plane seen as rows of `unit` tokens, head after head: int64, as `units`.

    Args:
        table: the tokens, held from the first on.
        units: `[B, H, K]` int64; unit `i` is the tokens `[i * unit, (i + 1) * unit)`.
        unit: tokens a unit: 1, or the block size.
    """
    assert table.first_column == 0, "columns and blocks of tokens are the same"
    size, ids = table.arena.block_size, table.device_ids
    flat = units.flatten(1)
    own = ids.gather(1, flat) if unit == size else ids.gather(1, flat // size) * size + flat % size
    per_head = table.arena.num_blocks * size // unit
    return own.view(units.shape) + (torch.arange(units.shape[1], device=ids.device) * per_head)[:, None]


def gather_units(
    table: BlockTable, units: torch.Tensor, unit: int, *, num_planes: int | None = None
) -> list[torch.Tensor]:
    """Copies of chosen units; arguments as for `places`.

    Args:
        num_planes: gather the first planes only.

    Returns:
        `[B, H, K * unit, dim]` for each plane.
    """
    flat = places(table, units, unit).flatten()
    gathered = []
    for plane, spec in list(zip(table.arena.planes, table.arena.specs, strict=True))[:num_planes]:
        picked = plane.view(-1, unit * spec.dim).index_select(0, flat)
        gathered.append(picked.view(*units.shape[:2], -1, spec.dim))
    return gathered
