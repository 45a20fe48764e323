"""H2O, heavy hitters: keep the tokens that received the most attention from all queries so far.

Score: the sum of attention weights over queries and over the query heads of the group, carried across evictions.
Weights are computed a few queries at a time and added up: no attention matrix is ever held. Costs about one more
attention of the prompt. Early tokens were seen by more queries, which the paper leaves as it is.
Paper: Zhang et al. 2023, https://arxiv.org/abs/2306.14048.
Differs from the paper: recent tokens are `num_recent_tokens`, not half the budget, and
scores are pooled over neighbours (`kernel_size=1` for the paper's).
"""

import torch

from .base import Held, Policy
from .observers import AttentionSums


class H2O(Policy):
    """Heavy hitters stay."""

    def new_observer(self) -> AttentionSums:
        return AttentionSums()

    def scores(self, held: Held, observer: AttentionSums) -> torch.Tensor:
        return observer.aligned(held)
