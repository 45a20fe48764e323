"""SnapKV: keep what the last queries of the prompt attend to, and its neighbours.

Score: attention of the last `observation_window` queries, averaged over them and over the query heads of the group,
pooled over `kernel_size` neighbouring tokens. Best when the prompt ends with the question; not when it comes later.
Paper: Li et al. 2024, https://arxiv.org/abs/2404.14469 (a window of 32, pooling over 5 in the authors' code).
Differs from the paper: of 64 queries the i-th last counts by 1 / i (`window_weights="equal"` for the paper's mean), so
that a short question at the end is heard, and without one the text before it; and pooling is over 13 tokens, without
which small models lose what follows the token that the question looks at.
"""

import torch

from .base import Held, Policy
from .observers import QueryWindow, attention_weights


class SnapKV(Policy):
    """What the end of the prompt looks at stays.

    Args:
        observation_window: last queries that vote, at least 1.
        window_weights: how much each of them counts: `"harmonic"`, the i-th last by 1 / i, or `"equal"`.
    """

    has_ratios = True

    def __init__(self, *, observation_window: int, window_weights: str):
        self.observation_window = observation_window
        self.window_weights = window_weights

    def new_observer(self) -> QueryWindow:
        return QueryWindow(self.observation_window)

    def scores(self, held: Held, observer: QueryWindow) -> torch.Tensor:
        if observer.queries is None:
            return held.slots.float()
        weights = attention_weights(observer.queries, held).mean(dim=2)  # [B, Hkv, T, n]
        if self.window_weights == "equal":
            return weights.mean(dim=2)
        share = 1.0 / torch.arange(weights.shape[2], 0, -1, device=weights.device)
        return torch.einsum("bhtn,t->bhn", weights, share / share.sum())
