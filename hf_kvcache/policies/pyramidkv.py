"""PyramidKV: lower layers keep more, upper layers less.

Budgets fall linearly over the layers around the same mean: from `2b - b / beta` in the first to `b / beta` in the last,
which keeps at least its sinks and recent tokens.
Scores are those of another policy, SnapKV in the paper.
Paper: Cai et al. 2024, https://arxiv.org/abs/2406.02069.
Differs from the paper: a gentler slope by default (`beta=20` in the authors' code), as the steep one cost small models
more than it gave.
"""

import torch

from .base import Held, Observer, Policy


class PyramidKV(Policy):
    """A budget for each layer.

    Args:
        scorer: the policy that scores tokens.
        beta: the last layer keeps a share of `1 / beta` of the mean budget; at least 1.
        layer: how many evicting layers are below this one.
        num_layers: how many evicting layers there are.
    """

    def __init__(self, scorer: Policy, *, beta: float, layer: int, num_layers: int):
        self.scorer = scorer
        self.beta = beta
        self.layer = layer
        self.num_layers = num_layers

    def new_observer(self) -> Observer | None:
        return self.scorer.new_observer()

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        return self.scorer.scores(held, observer)

    def layer_budget(self, budget: torch.Tensor, limit: torch.Tensor, minimum: int) -> torch.Tensor:
        least = (budget / self.beta).clamp(min=minimum)
        # No layer can keep more than it holds: then the slope is less steep, around the same mean.
        most = torch.minimum(2 * budget - least, limit.to(least.dtype))
        least = 2 * budget - most
        share = self.layer / max(1, self.num_layers - 1)
        return (most + (least - most) * share).round().long() if self.num_layers > 1 else budget
