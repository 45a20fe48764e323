"""KeyDiff: keep the keys that are least like the average key.

Score: `-cos(k, mean of k / |k|)`. Needs no query.
Paper: Park et al. 2025, https://arxiv.org/abs/2504.15364.
Differs from the paper: scores are pooled over neighbours (`kernel_size=1` for the paper's), which measured better.
"""

import torch
from torch import nn

from .base import Held, Observer, Policy


def unlikeness(keys: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
    """How little each key `[B, H, n, D]` is like the mean direction of those of `is_token` `[B, H, n]`: `[B, H, n]`."""
    directions = nn.functional.normalize(keys.float(), dim=-1)
    anchor = (directions * is_token.unsqueeze(-1)).sum(dim=2, keepdim=True)
    return -nn.functional.cosine_similarity(directions, anchor, dim=-1)


class KeyDiff(Policy):
    """Unusual keys stay."""

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        return unlikeness(held.keys, held.is_held)
