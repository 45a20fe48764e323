"""A few query rows times packed keys, and weights times packed values, without unpacking them to memory."""

import functools

import torch

from .compiled import compiled


def key_products(rows: torch.Tensor, packed: torch.Tensor, nbits: int) -> torch.Tensor:
    """`sum_d rows[h, m, n, d] * code[h, n, d, t]`.

    Args:
        rows: `[H, M, N, D]` float32.
        packed: `[H, N, D, G * nbits / 8]` uint8, packed along the tokens.

    Returns:
        `[H, M, N, G]` float32.
    """
    return _key_kernel(nbits)(rows, packed)


def value_products(weights: torch.Tensor, packed: torch.Tensor, nbits: int) -> torch.Tensor:
    """`sum_t weights[h, m, group of d, t] * code[h, t, d]`.

    Args:
        weights: `[H, M, groups, T]` float32; equal groups of channels have weights of their own.
        packed: `[H, T, D * nbits / 8]` uint8, packed along the channels.

    Returns:
        `[H, M, D]` float32.
    """
    segment, size = packed.shape[-1], packed.shape[-1] * 8 // nbits // weights.shape[2]
    return _value_kernel(nbits, segment, size)(weights, packed)


@functools.cache
def _key_kernel(nbits: int):
    def key_kernel(rows, packed):
        codes, query = packed.unsqueeze(1), rows.unsqueeze(-1)
        segments = [((codes >> shift) & (2**nbits - 1)).float() for shift in range(0, 8, nbits)]
        return torch.cat([(query * segment).sum(3) for segment in segments], dim=-1)

    return compiled(key_kernel, f"{nbits}")


@functools.cache
def _value_kernel(nbits: int, segment: int, size: int):
    unit = min(segment, size)

    def value_kernel(weights, packed):
        outputs = []
        for index, shift in enumerate(range(0, 8, nbits)):
            codes = ((packed >> shift) & (2**nbits - 1)).float()
            for offset in range(0, segment, unit):
                group = (index * segment + offset) // size
                part = codes[:, None, :, offset : offset + unit]
                outputs.append((weights[:, :, group].unsqueeze(-1) * part).sum(2))
        return torch.cat(outputs, dim=-1)

    return compiled(value_kernel, f"{nbits}_{segment}_{size}")
