"""Key norm: keep the keys of smallest norm.

Score: `-|k|`. Tokens with small keys were found to receive the most attention. Costs nothing and needs no query, but is
far behind the others where details matter.
Paper: Devoto et al. 2024, https://arxiv.org/abs/2406.11430.
Differs from the paper: scores are pooled over neighbours (`kernel_size=1` for the paper's): it measured better.
"""

import torch

from .base import Held, Observer, Policy


class KeyNorm(Policy):
    """Small keys stay."""

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        return -held.keys.float().norm(dim=-1)
