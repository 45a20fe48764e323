"""A few query rows times packed keys, and weights times packed values, without unpacking them to memory.

A packed axis of length `n` is cut into units: the longest runs whose codes lie in one place of their bytes, in every
plane of bits (see `codecs.packing`). What a code stands for is given as a curve, which vector units evaluate faster
than they look up a table: coefficients of the odd powers of the code scaled to [-1, 1], or none for the code itself.
"""

import functools

import torch

from .compiled import compiled


def key_products(
    rows: torch.Tensor, planes: list[torch.Tensor], widths: tuple[int, ...], curve: tuple[float, ...]
) -> torch.Tensor:
    """`sum_d rows[h, m, n, d] * curve(code[h, n, d, t])`.

    Args:
        rows: `[H, M, N or 1, D]` float32.
        planes: `[H, N, D, G * width / 8]` uint8 a plane, packed along the tokens, lowest bits first.
        widths: bits of each plane.
        curve: what a code stands for, see above.

    Returns:
        `[H, M, N, G]` float32.
    """
    return _key_kernel(widths, curve)(rows, *planes)


def value_products(
    weights: torch.Tensor, planes: list[torch.Tensor], widths: tuple[int, ...], curve: tuple[float, ...]
) -> torch.Tensor:
    """`sum_t weights[h, m, d // group, t] * curve(code[h, t, d])`.

    Args:
        weights: `[H, M, groups, T]` float32; `groups` equal groups of channels have weights of their own.
        planes: `[H, T, D * width / 8]` uint8 a plane, packed along the channels.

    Returns:
        `[H, M, D]` float32.
    """
    dim = planes[0].shape[-1] * 8 // widths[0]
    return _value_kernel(widths, curve, dim, weights.shape[2])(weights, *planes)


@functools.cache
def _key_kernel(widths: tuple[int, ...], curve: tuple[float, ...]):
    def key_kernel(rows, *planes):
        query = rows.unsqueeze(-1)
        units = [(query * value.unsqueeze(1)).sum(3) for value in _units(planes, widths, curve)]
        return torch.cat(units, dim=-1)

    return compiled(key_kernel, "_".join(map(str, widths)) + f"_{len(curve)}")


@functools.cache
def _value_kernel(widths: tuple[int, ...], curve: tuple[float, ...], dim: int, groups: int):
    def value_kernel(weights, *planes):
        outputs, start = [], 0
        for value in _units(planes, widths, curve):
            length, size = value.shape[-1], dim // groups
            for offset in range(0, length, min(size, length)):
                part = value[..., offset : offset + min(size, length)].unsqueeze(1)
                outputs.append((weights[:, :, (start + offset) // size].unsqueeze(-1) * part).sum(2))
            start += length
        return torch.cat(outputs, dim=-1)

    return compiled(value_kernel, "_".join(map(str, widths)) + f"_{len(curve)}_{dim}_{groups}")


def _units(planes: tuple[torch.Tensor, ...], widths: tuple[int, ...], curve: tuple[float, ...]) -> list[torch.Tensor]:
    """The decoded units of a packed axis, in order, float32."""
    narrowest = min(widths)
    length = planes[0].shape[-1] * narrowest // widths[0]
    units = []
    for unit in range(8 // narrowest):
        code, shift = None, 0
        for plane, width in zip(planes, widths, strict=True):
            segment, index = divmod(unit, width // narrowest)
            part = plane[..., index * length : (index + 1) * length] >> (segment * width)
            part = (part & (2**width - 1)) << shift
            code = part if code is None else code | part
            shift += width
        units.append(_evaluate(code.float(), curve, shift))
    return units


def _evaluate(code: torch.Tensor, curve: tuple[float, ...], nbits: int) -> torch.Tensor:
    if not curve:
        return code
    centred = code * (2 / (2**nbits - 1)) - 1
    square = centred * centred
    value = square * curve[-1]
    for coefficient in reversed(curve[1:-1]):
        value = (value + coefficient) * square
    return (value + curve[0]) * centred
