"""H2O, heavy hitters: keep the tokens that received the most attention from all queries so far.

Score: the sum of attention weights over queries and over the query heads of the group, carried across evictions; over
the number of queries that could see the token. Weights are computed a few queries at a time and added up: no attention
matrix is ever held. Costs about one more attention of the prompt.
Paper: Zhang et al. 2023, https://arxiv.org/abs/2306.14048.
Differs from the paper: it does not divide, which favours early tokens (`average=False`); recent tokens are
`num_recent_tokens`, not half the budget; scores are pooled over neighbours (`kernel_size=1` for the paper's).
"""

import torch

from .base import Held, Policy
from .observers import AttentionSums


class H2O(Policy):
    """Heavy hitters stay.

    Args:
        average: over the queries that could see a token; otherwise its sum counts, which favours early tokens.
    """

    has_ratios = True

    def __init__(self, *, average: bool):
        self.average = average

    def new_observer(self) -> AttentionSums:
        return AttentionSums()

    def scores(self, held: Held, observer: AttentionSums) -> torch.Tensor:
        sums = observer.aligned(held)
        return sums / (held.seen - held.slots) if self.average else sums
