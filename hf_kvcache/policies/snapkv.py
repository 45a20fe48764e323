"""SnapKV: keep what the last queries of the prompt attend to, and its neighbours.

Score: attention of the last `observation_window` queries, averaged over them and over the query heads of the group,
pooled over `kernel_size` neighbouring tokens. Best when the prompt ends with the question; not when it comes later.
Paper: Li et al. 2024, https://arxiv.org/abs/2404.14469 (a window of 32, pooling over 5 in the authors' code).
Differs from the paper: a smaller window and wider pooling by default, which measured far better on small models.
"""

import torch

from .base import Held, Policy
from .observers import QueryWindow, attention_weights


class SnapKV(Policy):
    """What the end of the prompt looks at stays.

    Args:
        observation_window: last queries that vote, at least 1.
    """

    has_ratios = True

    def __init__(self, *, observation_window: int):
        self.observation_window = observation_window

    def new_observer(self) -> QueryWindow:
        return QueryWindow(self.observation_window)

    def scores(self, held: Held, observer: QueryWindow) -> torch.Tensor:
        if observer.queries is None:
            return held.slots.float()
        return attention_weights(observer.queries, held).mean(dim=(2, 3))
