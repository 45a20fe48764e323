"""What a reader is: small summaries of closed blocks, and estimates from them of what a query attends to."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..attention import few_products
from ..blocks.arena import Plane
from ..kernels import structs

_LARGEST = torch.finfo(torch.float16).max


def to_float16(summaries: torch.Tensor) -> torch.Tensor:
    """Summaries in 16 bits, of any dtype: a rounding far below what they leave out of the keys."""
    return summaries.clamp(-_LARGEST, _LARGEST).half()


def mean_state(states: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
    """The mean of keys or values `[B, Hkv, T, D]` that are tokens' (bool `[B, T]`), `[B, Hkv, 1, D]`, float32."""
    weight = is_token[:, None, :, None].float()
    return (states.float() * weight).sum(dim=2, keepdim=True) / weight.sum(dim=2, keepdim=True).clamp(min=1)


def round_to_bytes(query: torch.Tensor) -> torch.Tensor:
    """Queries `[..., D]` in multiples of a 127th of their largest channel, float32: the kernel multiplies bytes."""
    step = query.float().abs().amax(dim=-1, keepdim=True).clamp_(min=1e-30) / 127
    return (query / step).round_() * step


class Reader(ABC):
    """Estimates attention scores without reading the keys. Each subclass names its paper and where it differs.

    A block is summarised once, when it is full, and never again. Summaries are planes `[B, Hkv, N, *]`, a slot a block.

    Args:
        block_size: tokens a block.
    """

    fit_length = 0  # tokens to have before the first block is summarised
    unread = 0.0  # share of the estimated attention to what is not read that the mean value of the first tokens gets
    reads_keys = False  # whether `scores` is given the stored keys, and there are no summaries

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.unit = 1  # tokens that one score stands for: 1, or a block

    @abstractmethod
    def planes(self, num_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Plane, ...]:
        """What a block stores, for each tensor that `summarise` returns."""

    def fit(self, keys: torch.Tensor, is_token: torch.Tensor) -> list[torch.Tensor]:
        """Constants of each row, `[B, ...]`, from its first keys `[B, Hkv, T, D]`, but padding."""
        return []

    @abstractmethod
    def summarise(self, keys: torch.Tensor, fitted: list[torch.Tensor]) -> list[torch.Tensor]:
        """Keys `[B, Hkv, n * block_size, D]` to one `[B, Hkv, n, *]` tensor a plane."""

    def prepare(self, query: torch.Tensor, fitted: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is multiplied with `rows` for scores, `[B, Hkv, G, dim]`, and what is added, `[B, Hkv, G]`, or None."""
        return query, None

    def rows(self, summaries: list[torch.Tensor]) -> torch.Tensor:
        """What stands for the key of each unit, `[B, Hkv, units, dim]`."""
        return summaries[0]

    def estimate(
        self, planes: list[torch.Tensor], fitted: list[torch.Tensor], head_dim: int, blocks: int = 1
    ) -> structs.Estimate | None:
        """What `scores` does, for the decode kernel; None: it has no words for it.

        Args:
            planes: `[H, slots, *]`, those of the arena of the summaries; with `reads_keys`, the layer's own.
            head_dim: channels of a key.
            blocks: whose summaries lie in one slot.
        """
        return None

    def scores(self, query: torch.Tensor, summaries: list[torch.Tensor], fitted: list[torch.Tensor]) -> torch.Tensor:
        """Estimated log mass of each unit: the logarithm of the sum of `exp(query . key)` over its tokens.

        Args:
            query: `[B, Hkv, G, D]`, the query heads of each KV head, already scaled.
            summaries: the planes of all candidate blocks; with `reads_keys`, their keys `[B, Hkv, T, D]`.

        Returns:
            `[B, Hkv, G, units]`, float32.
        """
        prepared, bias = self.prepare(query, fitted)
        scores = few_products(prepared.float(), self.rows(summaries).float())
        return scores if bias is None else scores.add_(bias.unsqueeze(-1))

    def read_bytes(self, planes: Sequence[Plane], blocks: int) -> int:
        """Bytes of a row that the scores of `blocks` blocks read: of the summaries; with `reads_keys`, of the layer."""
        return blocks * sum(plane.num_heads * plane.dim * plane.dtype.itemsize for plane in planes)
