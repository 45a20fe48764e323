"""Quest: bound the scores of a block's keys by the smallest and largest value of each channel.

Stores two keys a block in 4 bits: 6% of the bytes of 16-bit keys and values for blocks of 4 tokens at head dimension
64, all of which each step reads. Reads whole blocks. Small blocks matter more than exact bounds: on SmolLM2 the KL
divergence at blocks of 4 is less than half of that at 8, and 4 bits leave it where 16 have it. Tokens chosen singly
(`index`) are better still.
Paper: Tang et al. 2024, https://arxiv.org/abs/2406.10774.
Differs from the paper: query heads that share a KV head share a selection; bounds are rounded; and as no key has the
bounds of all channels at once, `spread` takes only a part of the way from the middle of each channel to its bound (1 is
the paper's bound, but for the rounding).
"""

import torch

from ..blocks.arena import Plane
from ..codecs.packing import pack, unpack
from ..kernels import structs
from .base import Reader, mean_state, round_to_bytes, to_float16

_BITS = 4
_MIDDLE = (2**_BITS - 1) / 2  # a code stands for itself less this, times the scale
_SMALLEST_SCALE = 2.0**-14


class Quest(Reader):
    """The largest and the smallest value of each channel: codes `[B, Hkv, N, D]` (uint8) and a float16 scale a block.

    Bounds are coded less the mean of the first keys, which is the same number for all scores of a query. Queries are
    rounded to 8 bits, an error far below that of the codes, so that the decode kernel multiplies bytes.

    Args:
        block_size: tokens a block.
        spread: share of the distance between the middle of a channel and its bound that counts, in [0, 1].
    """

    fit_length = 128

    def __init__(self, block_size: int, *, spread: float):
        super().__init__(block_size)
        self.unit = block_size
        self.spread = spread

    def planes(self, num_heads, head_dim, dtype):
        return (Plane(num_heads, 2 * head_dim * _BITS // 8, torch.uint8), Plane(num_heads, 1, torch.float16))

    def fit(self, keys, is_token):
        return [mean_state(keys, is_token)]

    def summarise(self, keys, fitted):
        blocks = (keys.float() - fitted[0]).unflatten(2, (-1, self.block_size))
        bounds = torch.cat([blocks.amax(dim=3), blocks.amin(dim=3)], dim=-1)
        scale = to_float16((bounds.abs().amax(dim=-1, keepdim=True) / _MIDDLE).clamp(min=_SMALLEST_SCALE))
        codes = (bounds / scale.float() + (_MIDDLE + 0.5)).floor_().clamp_(0, 2 * _MIDDLE)
        return [pack(codes.to(torch.uint8), _BITS), scale]

    def prepare(self, query, fitted):
        middle, reach = query.float() / 2, query.float().abs() * (self.spread / 2)
        both = torch.cat([middle + reach, middle - reach], dim=-1)  # times the largest, the smallest
        return round_to_bytes(both), (query.float() * fitted[0]).sum(dim=-1)

    def rows(self, summaries):
        return (unpack(summaries[0], _BITS).float() - _MIDDLE) * summaries[1].float()

    def estimate(self, planes, fitted, head_dim, blocks=1):
        if head_dim % 8:
            return None
        key = structs.index_store(*planes, 2 * head_dim, _BITS, blocks)
        mean = fitted[0].data_ptr()
        return structs.Estimate(key=key, per_slot=blocks, mean=mean, spread=self.spread, has_bounds=True, rounds=True)
