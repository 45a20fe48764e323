"""SparQ: score with the few channels in which the query is largest.

Stores nothing besides the keys, of which `num_channels` of `D` channels are read. Keys are stored token by token, so on
most machines memory moves the other channels too: the bytes reported are what the product takes.
Paper: Ribar et al. 2024, SparQ Attention, https://arxiv.org/abs/2312.04985.
Differs from the paper: query heads that share a KV head share channels; no mean value for what is not read; keys
are not stored a second time by channel.
"""

import torch

from .base import Reader


class SparQ(Reader):
    """Stores nothing besides the keys.

    Args:
        block_size: tokens a block.
        num_channels: channels that are read, at least 1.
    """

    reads_keys = True

    def __init__(self, block_size: int, *, num_channels: int):
        super().__init__(block_size)
        self.num_channels = num_channels

    def planes(self, num_heads, head_dim, dtype):
        return ()

    def summarise(self, keys, fitted):
        return []

    def scores(self, query, summaries, fitted):
        keys, magnitude = summaries[0], query.abs()
        channels = magnitude.sum(dim=2).topk(min(self.num_channels, query.shape[-1])).indices.unsqueeze(2)
        largest = query.gather(3, channels.expand(-1, -1, query.shape[2], -1))
        read = keys.gather(3, channels.expand(-1, -1, keys.shape[2], -1))
        # A query of which a part is seen gives smaller scores: the paper's temperature makes up for it.
        share = largest.abs().sum(dim=-1, keepdim=True) / magnitude.sum(dim=-1, keepdim=True).clamp(min=1e-9)
        return torch.matmul(largest, read.transpose(2, 3)).float() / share.float().clamp(min=1e-9).sqrt()

    def read_bytes(self, planes, blocks):
        key = planes[0]
        return super().read_bytes(planes[:1], blocks) * self.block_size * min(self.num_channels, key.dim) // key.dim
