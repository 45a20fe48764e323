"""TOVA: keep the tokens that the last query attends to.

Score: the last query's attention, averaged over all heads, so that all heads of a layer keep the same tokens.
Paper: Oren et al. 2024, https://arxiv.org/abs/2401.06104.
Differs from the paper: tokens go in batches (`interval`) instead of one a step, and scores are pooled
over neighbours (`kernel_size=1` for the paper's).
"""

import torch

from .base import Held, Policy
from .observers import QueryWindow, attention_weights


class Tova(Policy):
    """What the newest token looks at stays."""

    has_ratios = True

    def new_observer(self) -> QueryWindow:
        return QueryWindow(1)

    def scores(self, held: Held, observer: QueryWindow) -> torch.Tensor:
        if observer.queries is None:
            return held.slots.float()
        weights = attention_weights(observer.queries, held).mean(dim=(1, 2, 3)).unsqueeze(1)
        return weights.expand(held.slots.shape)
