"""Transform coding of keys: directions of a head that queries look along get more bits, others fewer or none.

Stores `key_bits` bits a value on average, and 8 bits a token and head for its scale. Keys are taken as they were
before the rotary embedding, where they vary in few directions. Each head has a basis in which its coefficients are
uncorrelated, measured once a model on a short text (`hf_kvcache.calibration`); a layer's bits go to coefficients by
reverse water-filling. Within a head, coefficients of equal bits are mixed by a random rotation, so that all look
normally distributed and one codebook serves them. The best fidelity a byte below 4 bits. Not for models without a
rotary embedding. Decoded a slice at a time in each step, which takes longer than the integers; sparse reads decode the
tokens that they choose alone.
Papers: NVIDIA 2025, KVTC, https://arxiv.org/abs/2511.01815 (principal components and bits a component); Cover and
Thomas, Elements of information theory (reverse water-filling); Malinovskii et al. 2024, HIGGS,
https://arxiv.org/abs/2411.17525 (rotation and codebook).
Differs from KVTC: a basis for each head weighted by its queries, rotation and codebook instead of an entropy coder, so
that a group of tokens has a fixed size and is read in place.
"""

import torch
from torch import nn

from ..blocks.arena import Plane
from .base import Codec, Shape
from .chosen import PackedUnits, take_rows
from .packing import look_up, pack, unpack
from .rotated import codebook
from .statistics import LayerStatistics

GROUP_LENGTH = 128
# What a codec holds of each head, and of the order in which coefficients are stored.
_OF_HEADS, _LAYOUT = ("mean", "analysis", "synthesis", "weight"), ("order", "head_of", "place", "num_coded")
# Groups encoded at a time: a long prompt needs no more memory than this.
_GROUPS_AT_A_TIME = 16
# A token's scale is a power of two with this many steps an octave, in one byte around 2**0.
_STEPS_PER_OCTAVE, _MIDDLE = 8, 128
# Steps from a token's root mean square that are tried as its scale, and then those next to the best. Larger ones serve
# tokens with one huge coefficient, which would be clipped.
_COARSE_STEPS, _FINE_STEPS = (-3, 0, 3, 6, 10), (-1, 1)


def mixing(bits: torch.Tensor) -> torch.Tensor:
    """An orthogonal `[D, D]` matrix that mixes coefficients of equal `bits` `[D]` at random, and no others."""
    matrix = torch.eye(len(bits), dtype=torch.float64)
    for width in bits.unique().tolist():
        index = (bits == width).nonzero().flatten()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(len(index), len(index), generator=generator, dtype=torch.float64)
        block, triangle = torch.linalg.qr(drawn)
        matrix[index[:, None], index] = block * triangle.diagonal().sign()
    return matrix


class TransformKeyCodec(Codec):
    """Codes `[coefficients, tokens]` of all heads together, widest first, and a scale of 8 bits a token and head.

    Args:
        statistics: of one layer's keys before their rotary embedding.
        bits: of each coefficient, `[H, D]` integers from 0 to 8; for coefficients of falling variance they fall.
    """

    group_length = GROUP_LENGTH

    def __init__(self, statistics: LayerStatistics, bits: torch.Tensor):
        self.bits, self.num_heads = bits, len(bits)
        mixed = torch.stack([mixing(row) for row in bits])  # [H, D, D]
        spread = statistics.variance.double().sqrt()
        analysis = statistics.basis.double()
        self.mean = statistics.mean.float()[:, None]
        self.analysis = ((analysis / spread[:, None]) @ mixed.mT).float()
        self.synthesis = (mixed @ (torch.linalg.inv(analysis) * spread[..., None])).float()
        # The error of a mixed coefficient counts as that of the mean of those it is mixed from.
        weight = (mixed.square() @ statistics.variance.double()[..., None]).squeeze(-1)
        self.weight = weight.float()
        self._lay_out(bits)
        self._heads: dict[int, TransformKeyCodec] = {}

    def _lay_out(self, bits: torch.Tensor) -> None:
        """Say where the coefficients of heads with `bits` `[H, D]` are stored: by their bits, most first."""
        self.total_bits = int(bits.sum())
        flat = bits.flatten()
        order = flat.argsort(descending=True, stable=True)[: int((flat > 0).sum())]
        self.order = order
        self.segments = [(b, int((flat == b).sum())) for b in flat.unique().flip(0).tolist() if b]
        self.head_of = order // bits.shape[1]
        # Where each coefficient is stored, those without bits past the end.
        self.place = torch.full((flat.numel(),), len(order)).index_copy(0, order, torch.arange(len(order)))
        self.num_coded = (bits > 0).sum(-1).clamp(min=1).float()  # [H]

    def __deepcopy__(self, memo: dict) -> "TransformKeyCodec":
        return self  # never changes

    def of_head(self, head: int) -> Codec:
        if head not in self._heads:
            self._heads[head] = _OneHead(self, head)
        return self._heads[head]

    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        return (
            Plane(1, self.total_bits * self.group_length // 8, torch.uint8),
            Plane(shape.num_heads, self.group_length, torch.uint8),
        )

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        self._move_to(states.device)
        parts = states.split(_GROUPS_AT_A_TIME * self.group_length, dim=2)
        return [torch.cat(planes, dim=2) for planes in zip(*map(self._encode, parts), strict=True)]

    def _encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        coefficients = (states.float() - self.mean) @ self.analysis  # [B, H, T, D]
        rows = coefficients.transpose(-1, -2).flatten(1, 2)[:, self.order]  # [B, C, T]
        power = torch.zeros_like(states[..., 0], dtype=torch.float32).index_add_(1, self.head_of, rows.square())
        spread = (power / self.num_coded[:, None]).sqrt().clamp(2.0**-12, 2.0**12)
        start = (spread.log2() * _STEPS_PER_OCTAVE).round()  # [B, H, T]
        best = self._try(rows, start, torch.full_like(start, _COARSE_STEPS[0]))
        for step in _COARSE_STEPS[1:]:
            best = self._better(best, self._try(rows, start, torch.full_like(start, step)))
        coarse = best[1]
        for step in _FINE_STEPS:
            best = self._better(best, self._try(rows, start, coarse + step))
        codes, step, _ = best
        scales = (start + step + _MIDDLE).to(torch.uint8).unflatten(2, (-1, self.group_length))
        return [self._pack(codes), scales]

    def _try(self, rows: torch.Tensor, start: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Codes `[B, C, T]` at the scale `start + step` `[B, H, T]`, that step, and the weighted error `[B, H, T]`."""
        scale = torch.exp2((start + step) / _STEPS_PER_OCTAVE)[:, self.head_of]  # [B, C, T]
        codes, decoded = self._round(rows / scale)
        squares = (decoded * scale - rows).square_() * self.weight.flatten()[self.order, None]
        return codes, step, torch.zeros_like(start).index_add_(1, self.head_of, squares)

    def _better(self, one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Of each token and head, the one with the smaller error."""
        is_better = other[2] < one[2]
        codes = torch.where(is_better[:, self.head_of], other[0], one[0])
        return codes, torch.where(is_better, other[1], one[1]), torch.minimum(one[2], other[2])

    def _round(self, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The nearest codes (uint8) of `[B, C, T]` coefficients, and the levels they stand for."""
        codes, decoded = [scaled[:, :0].to(torch.uint8)], [scaled[:, :0]]  # a head may have no bits
        for part, (nbits, _) in zip(scaled.split([n for _, n in self.segments], dim=1), self.segments, strict=True):
            levels = codebook(nbits).to(scaled.device)
            index = torch.bucketize(part.contiguous(), (levels[1:] + levels[:-1]) / 2, out_int32=True)
            codes.append(index.to(torch.uint8))
            decoded.append(levels[index])
        return torch.cat(codes, dim=1), torch.cat(decoded, dim=1)

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes `[B, C, T]` as bytes `[B, 1, n, total_bits * 16]`; a code of 3 bits is packed as 1 bit and 2 bits."""
        grouped = codes.unflatten(2, (-1, self.group_length)).transpose(1, 2)  # [B, n, C, G]
        parts = [grouped[:, :, :0].flatten(2)]
        for part, (nbits, _) in zip(grouped.split([n for _, n in self.segments], dim=2), self.segments, strict=True):
            for width, shift in _widths(nbits):
                parts.append(pack((part >> shift) & (2**width - 1), width).flatten(2))
        return torch.cat(parts, dim=-1).unsqueeze(1)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The levels that `packed` `[B, n, bytes]` stands for, `[B, n, C, G]`."""
        decoded, begin = [torch.empty(*packed.shape[:2], 0, self.group_length, device=packed.device)], 0
        for nbits, count in self.segments:
            codes = None
            for width, shift in _widths(nbits):
                size = count * self.group_length * width // 8
                part = unpack(packed[..., begin : begin + size].unflatten(-1, (count, -1)), width) << shift
                codes = part if codes is None else codes | part
                begin += size
            decoded.append(look_up(codebook(nbits), codes))
        return torch.cat(decoded, dim=2)

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        packed, scales = encoded
        self._move_to(packed.device)
        return self._synthesised(self._unpack(packed.squeeze(1)), scales, shape)

    def _synthesised(self, levels: torch.Tensor, scales: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Keys `[B, H, n * G, D]` of levels `[B, n, C, G]` and coded scales `[B, H, n, G]`, for any `G`."""
        batch, groups, _, length = levels.shape
        # Coefficients without bits are zero: the row after the last.
        rows = nn.functional.pad(levels, (0, 0, 0, 1)).index_select(2, self.place)
        flat = rows.unflatten(2, (shape.num_heads, -1)).permute(2, 0, 1, 4, 3).reshape(shape.num_heads, -1, shape.dim)
        states = torch.bmm(flat, self.synthesis).view(shape.num_heads, batch, groups, length, shape.dim)
        scale = torch.exp2((scales.float() - _MIDDLE) / _STEPS_PER_OCTAVE).unsqueeze(-1)  # [B, H, n, G, 1]
        states = states.transpose(0, 1) * scale
        return (states.flatten(2, 3) + self.mean).to(shape.dtype)

    def decode_units(self, planes, groups, offsets, unit, shape):
        packed, scales = planes
        self._move_to(packed.device)
        begin, first, size = groups * packed.shape[2], 0, self.group_length
        where = {width: PackedUnits.of(begin, offsets, unit, width, size) for width in (1, 2, 4, 8)}
        levels = [torch.empty(len(groups), 0, groups.shape[2] * unit, device=packed.device)]
        for (nbits, count), heads in zip(self.segments, self.head_of.split([n for _, n in self.segments]), strict=True):
            codes = None
            for width, shift in _widths(nbits):
                rows = first + torch.arange(count, device=packed.device) * (size * width // 8)
                part = where[width].take(packed, rows, lambda words, heads=heads: words.index_select(1, heads))
                codes = part if codes is None else codes | part << shift
                first += count * (size * width // 8)
            levels.append(look_up(codebook(nbits), codes))
        heads = torch.arange(shape.num_heads, device=groups.device)[:, None]
        rows = ((heads * scales.shape[1] + groups) * self.group_length + offsets) // unit
        found = take_rows(scales, rows, unit).flatten(2).unsqueeze(2)  # [B, H, 1, K * unit]
        return self._synthesised(torch.cat(levels, dim=1).unsqueeze(1), found, shape)

    def unit_bytes(self, unit, shape):
        # Of each piece of a coefficient's codes, a byte that it shares with tokens of other runs.
        codes = sum(
            count * min(unit, self.group_length * width // 8)
            for nbits, count in self.segments
            for width, _ in _widths(nbits)
        )
        return codes + unit * shape.num_heads

    def _move_to(self, device: torch.device) -> None:
        if self.mean.device != device:
            for name in (*_OF_HEADS, *_LAYOUT):
                setattr(self, name, getattr(self, name).to(device))


class _OneHead(TransformKeyCodec):
    """One head of a `TransformKeyCodec`, whose tensors it shares: a basis is there once, however it is used."""

    def __init__(self, whole: TransformKeyCodec, head: int):
        self.whole, self.head, self.num_heads = whole, head, None
        self._lay_out(whole.bits[head : head + 1])
        self._share()

    def of_head(self, head: int) -> Codec:
        return self

    def _share(self) -> None:
        for name in _OF_HEADS:
            setattr(self, name, getattr(self.whole, name)[self.head : self.head + 1])

    def _move_to(self, device: torch.device) -> None:
        if self.mean.device != device:
            self.whole._move_to(device)
            self._share()
            for name in _LAYOUT:
                setattr(self, name, getattr(self, name).to(device))


def _widths(nbits: int) -> list[tuple[int, int]]:
    """How a code of `nbits` is cut into pieces that fit a byte evenly: the width and lowest bit of each."""
    widths = [width for width in (1, 2, 4, 8) if nbits & width]
    return [(width, sum(widths[:i])) for i, width in enumerate(widths)]
