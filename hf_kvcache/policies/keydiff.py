"""KeyDiff: keep the keys that are least like the average key.

Score: `-cos(k, mean of k / |k|)`. Needs no query.
Paper: Park et al. 2025, https://arxiv.org/abs/2504.15364.
Differs from the paper: scores are pooled over neighbours (`kernel_size=1` for the paper's), which measured better.
"""

import torch
from torch import nn

from .base import Held, Observer, Policy


class KeyDiff(Policy):
    """Unusual keys stay."""

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        directions = nn.functional.normalize(held.keys.float(), dim=-1)
        anchor = (directions * held.is_held.unsqueeze(-1)).sum(dim=2, keepdim=True)
        likeness = nn.functional.cosine_similarity(directions, anchor, dim=-1)
        return -likeness
