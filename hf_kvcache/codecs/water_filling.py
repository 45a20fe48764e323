"""Reverse water-filling: bits of coefficients that are coded by Lloyd-Max codebooks, where they lower the error most.

Source: Cover and Thomas, Elements of information theory.
"""

import functools

import torch

from .rotated import codebook

MAX_BITS = 8


@functools.cache
def distortion(nbits: int) -> float:
    """Mean squared error of the codebook of `nbits` for a standard normal variable; 1 at 0 bits."""
    if not nbits:
        return 1.0
    levels = codebook(nbits).double()
    bound = torch.tensor([40.0], dtype=torch.float64)
    edges = torch.cat([-bound, (levels[1:] + levels[:-1]) / 2, bound])
    masses = torch.special.ndtr(edges).diff()
    return 1.0 - (masses * levels.square()).sum().item()


def allocate(variances: torch.Tensor, total_bits: int) -> torch.Tensor:
    """Bits of each coefficient, in the shape of `variances`, that sum to `total_bits` (reverse water-filling).

    Each bit goes where it lowers the squared error most. The gains of a coefficient fall from bit to bit, so the
    largest gains of all are the best choice.
    """
    steps = torch.tensor([distortion(b) - distortion(b + 1) for b in range(MAX_BITS)], dtype=torch.float64)
    gains = variances.double().flatten()[:, None] * steps
    chosen = gains.flatten().argsort(descending=True, stable=True)[:total_bits] // MAX_BITS
    return torch.bincount(chosen, minlength=variances.numel()).view(variances.shape)
