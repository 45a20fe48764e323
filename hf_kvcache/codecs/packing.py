"""Small integers in bytes. A byte holds one code of each of `8 / nbits` equal segments of the packed axis.

Unpacking a segment then yields consecutive elements, which compilers turn into wide vector code.
"""

import torch


def pack(codes: torch.Tensor, nbits: int) -> torch.Tensor:
    """Pack uint8 `codes` `[..., n]` of `nbits` (1, 2, 4 or 8) along the last axis: `[..., n * nbits / 8]`."""
    if nbits == 8:
        return codes
    segments = codes.unflatten(-1, (8 // nbits, -1))
    packed = segments[..., 0, :].clone()
    for index in range(1, 8 // nbits):
        packed |= segments[..., index, :] << (index * nbits)
    return packed


def unpack(packed: torch.Tensor, nbits: int) -> torch.Tensor:
    """Undo `pack`: uint8 codes `[..., n]`."""
    if nbits == 8:
        return packed
    shifts = range(0, 8, nbits)
    return torch.stack([(packed >> shift) & (2**nbits - 1) for shift in shifts], dim=-2).flatten(-2)


def look_up(levels: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """`levels[codes]` of uint8 `codes`, which is much slower in these words."""
    return levels.to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def fill_table(levels: torch.Tensor) -> torch.Tensor:
    """What codes of up to 4 bits stand for, `[2 ** nbits]`, repeated to `[16]`: higher bits do not change the entry."""
    return levels.float().cpu().repeat(16 // len(levels))
