"""Random eviction: the control. A policy that is not clearly better than this one does not work."""

import torch

from .base import Held, Observer, Policy


class Random(Policy):
    """Pseudo-random scores of slots, heads and the layer; the same ones in every run.

    Args:
        seed: of the scores.
        layer_idx: of the layer.
    """

    def __init__(self, *, seed: int, layer_idx: int):
        self.seed = seed
        self.layer_idx = layer_idx

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        # One generator for every slot seen, so that a token's score is the same at every eviction.
        generator = torch.Generator().manual_seed(self.seed * 1000 + self.layer_idx)
        drawn = torch.rand(held.seen, held.keys.shape[1], generator=generator).t().to(held.keys.device)
        return drawn.expand(len(held.slots), -1, -1).gather(2, held.slots.clamp(min=0))
