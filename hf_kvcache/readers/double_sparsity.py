"""Double Sparsity: score with the few channels in which the keys of a head are largest.

Stores those channels of each key a second time: `num_channels / 2D` of the bytes of keys and values.
Paper: Yang et al. 2024, https://arxiv.org/abs/2408.07092.
Differs from the paper: channels are chosen from the first tokens of each row instead of offline, and stored in the
model's dtype instead of 4 bits.
"""

from ..blocks.arena import Plane
from .base import Reader


class DoubleSparsity(Reader):
    """`num_channels` channels of each key, `[B, Hkv, N, block_size * num_channels]`.

    Args:
        block_size: tokens a block.
        num_channels: channels that are stored, at least 1.
    """

    fit_length = 128

    def __init__(self, block_size: int, *, num_channels: int):
        super().__init__(block_size)
        self.num_channels = num_channels

    def planes(self, num_heads, head_dim, dtype):
        return (Plane(num_heads, self.block_size * min(self.num_channels, head_dim), dtype),)

    def fit(self, keys, is_token):
        size = (keys.float().abs() * is_token[:, None, :, None]).sum(dim=2)
        return [size.topk(min(self.num_channels, keys.shape[-1])).indices.unsqueeze(2)]  # [B, H, 1, channels]

    def summarise(self, keys, fitted):
        chosen = keys.gather(3, fitted[0].expand(-1, -1, keys.shape[2], -1))
        return [chosen.unflatten(2, (-1, self.block_size)).flatten(3)]

    def prepare(self, query, fitted):
        return query.gather(3, fitted[0].expand(-1, -1, query.shape[2], -1)), None

    def rows(self, summaries):
        return summaries[0].unflatten(3, (self.block_size, -1)).flatten(2, 3)
