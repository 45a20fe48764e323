"""Leverage scores: keep the keys that the other keys cannot make up.

Score: `k' (K'K)^-1 k` of the keys before rotary embedding, less their mean: how far the key stands out from all keys of
its head. Needs no query. Keeps what is asked later better than any other policy of keys and values; text
that just goes on is better served by `expected_attention`, and both by `blend`.
Paper: Chari & Van Durme 2025, Compactor, https://arxiv.org/abs/2507.08143 (section 3).
Differs from the paper: the scores are exact, not of a random projection; keys are centred; scores are pooled over
neighbours (`kernel_size=1` for the paper's); attention is `blend`'s business.
"""

import torch

from ..rotary import Rotary
from .base import Held, Observer, Policy

_RIDGE = 1e-3  # of the mean square of a channel, so that fewer keys than channels can be judged


class Leverage(Policy):
    """Keys that stand out stay.

    Args:
        rotary: of the layer.
    """

    def __init__(self, *, rotary: Rotary):
        self.rotary = rotary

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        shape = held.keys.shape
        # Turned by a constant, as padding would turn them, all keys have the same leverage.
        flat = self.rotary.turn(held.keys.float().flatten(0, 1).unsqueeze(1), -held.positions.flatten(0, 1))
        is_held = held.is_held.unsqueeze(-1)
        keys = flat.squeeze(1).unflatten(0, shape[:2]) * is_held
        keys = (keys - keys.sum(dim=2, keepdim=True) / is_held.sum(dim=2, keepdim=True).clamp(min=1)) * is_held
        gram = keys.transpose(-1, -2) @ keys
        ridge = _RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None].clamp(min=1e-12)
        identity = torch.eye(shape[-1], device=keys.device)
        return (torch.linalg.solve(gram + ridge * identity, keys.transpose(-1, -2)) * keys.transpose(-1, -2)).sum(dim=2)
