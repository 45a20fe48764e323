"""StreamingLLM: keep the sinks and the most recent tokens.

Score: the slot. Costs nothing. Forgets everything in between, so not for tasks that look something up.
Paper: Xiao et al. 2024, https://arxiv.org/abs/2309.17453 (section 3.2).
Differs from the paper: keys keep their positions unless `positions="cache"`. For a window at every query, also within
the prompt, use `sliding_window`.
"""

import torch

from .base import Held, Observer, Policy


class StreamingLLM(Policy):
    """The newest tokens stay; sinks are protected by every policy."""

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        return held.slots.float()
