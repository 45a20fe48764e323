"""Page means: the mean key of a block stands for all of its keys.

Stores one key a block: half of what Quest's bounds take. Reads whole blocks.
Papers: Lu et al. 2025, MoBA, https://arxiv.org/abs/2502.13189, trains with this choice; here the model is as it is.
"""

import math

import torch

from ..blocks.arena import Plane
from ..kernels import structs
from .base import Reader, to_float16


class PageMean(Reader):
    """The mean key of each block, `[B, Hkv, N, D]`."""

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self.unit = block_size

    def planes(self, num_heads, head_dim, dtype):
        return (Plane(num_heads, head_dim, torch.float16),)

    def summarise(self, keys, fitted):
        return [to_float16(keys.unflatten(2, (-1, self.block_size)).float().mean(dim=3))]

    def prepare(self, query, fitted):
        return query, query.new_full(query.shape[:3], math.log(self.block_size), dtype=torch.float32)

    def estimate(self, planes, fitted, head_dim, blocks=1):
        key = structs.run_store(planes[0], head_dim, blocks)
        return structs.Estimate(key=key, per_slot=blocks, added=math.log(self.block_size))
