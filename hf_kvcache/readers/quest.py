"""Quest: bound the scores of a block's keys by the smallest and largest value of each channel.

Stores two keys a block: 1 / `block_size` of the bytes of keys and values. Reads whole blocks. The bound is loose in
many channels: the mean key (`page_mean`) ranks blocks better on small models, and tokens chosen singly (`index`) are
better than both.
Paper: Tang et al. 2024, https://arxiv.org/abs/2406.10774.
Differs from the paper: query heads that share a KV head share a selection; and as no key has the bounds of all channels
at once, `spread` takes only a part of the way from the middle of each channel to its bound (1 is the paper's bound).
"""

import torch

from ..blocks.arena import Plane
from ..kernels import structs
from .base import Reader, to_float16


class Quest(Reader):
    """The largest and the smallest value of each channel in one plane, `[B, Hkv, N, 2 * D]`.

    Args:
        block_size: tokens a block.
        spread: share of the distance between the middle of a channel and its bound that counts, in [0, 1].
    """

    def __init__(self, block_size: int, *, spread: float):
        super().__init__(block_size)
        self.unit = block_size
        self.spread = spread

    def planes(self, num_heads, head_dim, dtype):
        return (Plane(num_heads, 2 * head_dim, torch.float16),)

    def summarise(self, keys, fitted):
        blocks = keys.unflatten(2, (-1, self.block_size))
        return [to_float16(torch.cat([blocks.amax(dim=3), blocks.amin(dim=3)], dim=-1))]

    def prepare(self, query, fitted):
        middle, reach = query / 2, query.abs() * (self.spread / 2)
        return torch.cat([middle + reach, middle - reach], dim=-1), None  # times the largest, the smallest

    def estimate(self, planes, fitted, head_dim, blocks=1):
        key = structs.run_store(planes[0], 2 * head_dim, blocks)
        return structs.Estimate(key=key, per_slot=blocks, has_bounds=True, spread=self.spread)
