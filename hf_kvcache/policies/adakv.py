"""AdaKV: the heads of a layer share one budget, so that heads which need more tokens keep more.

The scores of all heads compete for `heads x budget` places; each head keeps its best `safeguard` share in any case.
Scores are those of another policy. Heads are stored at their own lengths, so that the memory is really freed.
Paper: Feng et al. 2024, https://arxiv.org/abs/2407.11550 (a safeguard of 0.2).
"""

import torch

from .base import Held, Observer, Policy
from .selection import best_of_all_heads


class AdaKV(Policy):
    """A budget for each head.

    Args:
        scorer: the policy that scores tokens.
        safeguard: share of the mean budget that each head keeps, in [0, 1].
    """

    def __init__(self, scorer: Policy, *, safeguard: float):
        self.scorer = scorer
        self.safeguard = safeguard

    def new_observer(self) -> Observer | None:
        return self.scorer.new_observer()

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        return self.scorer.scores(held, observer)

    def select(self, scores: torch.Tensor, budget: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return best_of_all_heads(scores, budget, self.safeguard)
