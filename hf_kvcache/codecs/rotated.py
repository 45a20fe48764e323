"""Rotated codebook: rotate each vector, then code every coordinate with the best codebook for a normal distribution.

Stores `nbits + 16 / D` bits a value, and a mean key for each group of 128 tokens (1/8 bit a key value). A fixed random
rotation makes all coordinates of any vector look normally distributed, so that one codebook serves every channel.
Not calibrated to a model: works at once on any head dimension. Choose it for its fidelity a byte.
Papers: Ashkboos et al. 2024, QuaRot, https://arxiv.org/abs/2404.00456; Zandieh et al. 2025, TurboQuant,
https://arxiv.org/abs/2504.19874 (section 3.1).
Differs from TurboQuant: the mean key is subtracted first, the scale is fitted to the codes and not the norm (by least
squares for keys, unbiased for values), and there is no sign sketch of the residual: its variance ruins the softmax.
"""

import functools
import math

import torch

from ..blocks.arena import Plane
from .base import Codec, Shape, StoredForm
from .packing import fill_table, look_up, pack, unpack

GROUP_LENGTH = 128
_LARGEST = torch.finfo(torch.float16).max
# Largest ratio of the unbiased to the least-squares scale; 1.13 at 2 bits for a normally distributed vector.
_MOST_UNBIASING = 1.5
_SCALES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35)


@functools.cache
def codebook(nbits: int) -> torch.Tensor:
    """Lloyd-Max codebook of the standard normal distribution, `[2 ** nbits]`, ascending (Lloyd 1982)."""
    size = 2**nbits
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    levels = normal.icdf((torch.arange(size, dtype=torch.float64) + 0.5) / size)
    bound = torch.tensor([30.0], dtype=torch.float64)
    for _ in range(2000):
        edges = torch.cat([-bound, (levels[1:] + levels[:-1]) / 2, bound])
        density = torch.exp(-edges * edges / 2) / math.sqrt(2 * math.pi)
        levels = (density[:-1] - density[1:]) / normal.cdf(edges).diff().clamp_min(1e-300)
    return levels.float()


@functools.cache
def _table(nbits: int) -> torch.Tensor:
    return fill_table(codebook(nbits))


@functools.cache
def rotation(dim: int) -> torch.Tensor:
    """A fixed orthogonal `[dim, dim]` matrix: a Hadamard matrix with random signs, or a random one for other sizes."""
    generator = torch.Generator().manual_seed(0)
    if dim & (dim - 1):
        matrix, triangle = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
        return (matrix * triangle.diagonal().sign()).float().contiguous()
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (dim,), generator=generator) * 2 - 1
    return matrix / math.sqrt(dim) * signs


class _RotatedCodec(Codec):
    group_length = GROUP_LENGTH

    def __init__(self, nbits: int):
        self.nbits = nbits
        # A code of 3 bits is packed as 2 bits and 1 bit.
        self.widths = (2, 1) if nbits == 3 else (nbits,)

    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        values = self.group_length * shape.dim
        codes = [Plane(shape.num_heads, values * width // 8, torch.uint8) for width in self.widths]
        return (*codes, Plane(shape.num_heads, self.group_length, torch.float16))

    def stored_form(self, shape: Shape) -> StoredForm:
        return StoredForm(
            planes=(*("codes", "high")[: len(self.widths)], "scale"),
            element="codes",
            bits=self.nbits,
            dim=shape.dim,
            block=shape.dim,
            table=_table(self.nbits),
            rotation=rotation(shape.dim),
        )

    def _pack(self, codes: torch.Tensor) -> list[torch.Tensor]:
        planes, shift = [], 0
        for width in self.widths:
            planes.append(pack((codes >> shift) & (2**width - 1), width).flatten(-2))
            shift += width
        return planes

    def _unpack(self, planes: list[torch.Tensor]) -> torch.Tensor:
        codes, shift = None, 0
        for width, plane in zip(self.widths, planes, strict=True):
            part = unpack(plane.unflatten(-1, (self.group_length, -1)), width) << shift
            codes = part if codes is None else codes | part
            shift += width
        return look_up(codebook(self.nbits), codes)

    def _fit(self, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes (uint8) of each rotated vector, the best of a few scales to round at; least-squares and unbiased scale.

        With the least-squares scale the decoded vector is the shorter of the two by what rounding loses. With the
        unbiased one its product with the original is that of the original with itself (Vargaftik et al.
        2022, EDEN, https://arxiv.org/abs/2108.08842).
        """
        levels = codebook(self.nbits).to(rotated.device)
        edges = (levels[1:] + levels[:-1]) / 2
        spread = rotated.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-9)
        best_codes, best_scale, best_error, best_product = None, None, None, None
        for factor in _SCALES:
            codes = torch.bucketize(rotated / (spread * factor), edges, out_int32=True)
            centroids = levels[codes]
            product = (centroids * rotated).sum(-1)
            scale = product / centroids.square().sum(-1)
            error = (centroids * scale.unsqueeze(-1) - rotated).square_().sum(-1)
            if best_codes is None:
                best_codes, best_scale, best_error, best_product = codes, scale, error, product
                continue
            is_better = error < best_error
            best_codes = torch.where(is_better.unsqueeze(-1), codes, best_codes)
            best_scale = torch.where(is_better, scale, best_scale)
            best_product = torch.where(is_better, product, best_product)
            best_error = torch.minimum(error, best_error)
        unbiased = rotated.square().sum(-1) / best_product.clamp_min(1e-30)
        # A vector that is not normally distributed would be scaled up to where its rounding error drowns it.
        unbiased = torch.minimum(unbiased, best_scale * _MOST_UNBIASING)
        return best_codes.to(torch.uint8), best_scale.half(), unbiased.clamp(max=_LARGEST).half()


class RotatedKeyCodec(_RotatedCodec):
    """Codes `[tokens, D]`, a float16 scale a token, and the float16 mean key of the group, which is subtracted first.

    Args:
        nbits: bits a code: 2, 3 or 4.
    """

    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        return (*super().planes(shape), Plane(shape.num_heads, shape.dim, torch.float16))

    def stored_form(self, shape: Shape) -> StoredForm:
        form = super().stored_form(shape)
        return form._replace(planes=(*form.planes, "mean"))

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        grouped = states.float().unflatten(2, (-1, self.group_length))  # [B, H, n, G, D]
        mean = grouped.mean(-2).half()
        rotated = (grouped - mean.float().unsqueeze(-2)) @ rotation(states.shape[-1]).to(states.device).T
        codes, scale, _ = self._fit(rotated)
        return [*self._pack(codes), scale, mean]

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        *planes, scale, mean = encoded
        rotated = self._unpack(planes) * scale.float().unsqueeze(-1)
        states = rotated @ rotation(shape.dim).to(rotated.device) + mean.float().unsqueeze(-2)
        return states.flatten(2, 3).to(shape.dtype)


class RotatedValueCodec(_RotatedCodec):
    """Codes `[tokens, D]` and a float16 scale a token, unbiased: attention sums many values, and a sum adds up what
    each is too short by, while other errors average out.

    Args:
        nbits: bits a code: 2, 3 or 4.
    """

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        grouped = states.float().unflatten(2, (-1, self.group_length))  # [B, H, n, G, D]
        codes, _, scale = self._fit(grouped @ rotation(states.shape[-1]).to(states.device).T)
        return [*self._pack(codes), scale]

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        *planes, scale = encoded
        rotated = self._unpack(planes) * scale.float().unsqueeze(-1)
        return (rotated @ rotation(shape.dim).to(rotated.device)).flatten(2, 3).to(shape.dtype)
