"""Top-k oracle: choose tokens by their exact scores. Reads all keys: a yardstick for the other readers, not a saving.

Saves the values of the tokens that are not chosen, so that at most half of the bytes are not read.
Paper: Gupta et al. 2021, Memory-efficient Transformers via Top-k Attention, https://arxiv.org/abs/2106.06899.
"""

from ..kernels import structs
from .base import Reader


class TopK(Reader):
    """Stores nothing besides the keys."""

    reads_keys = True

    def planes(self, num_heads, head_dim, dtype):
        return ()

    def summarise(self, keys, fitted):
        return []

    def estimate(self, planes, fitted, head_dim, blocks=1):
        key = structs.run_store(planes[0], head_dim, blocks * self.block_size)
        return structs.Estimate(key=key, per_slot=blocks * self.block_size)

    def read_bytes(self, planes, blocks):
        return super().read_bytes(planes[:1], blocks) * self.block_size
