"""DuoAttention: retrieval heads keep everything, streaming heads keep sinks and recent tokens.

Heads are ranked by how well they look up what came before (`retrieval_scores`, or a pattern of one's own); as many of
the best ones as the budget allows keep all tokens. Heads are stored at their own lengths, so that memory is freed.
Paper: Xiao et al. 2024, https://arxiv.org/abs/2410.10819.
Differs from the paper: its heads are found by training gates on passkeys; ours by one forward over random tokens that
repeat, which takes seconds. The budget decides how many heads retrieve.
"""

from collections.abc import Sequence

import torch

from .base import Held, Observer, Policy
from .reconstruction import Reconstruction, Text
from .selection import best_of_each_head


class DuoAttention(Policy):
    """Whole heads stay or stream.

    Args:
        head_scores: of each evicting layer, a number for each KV head; higher retrieves.
        layer: the place of this layer among them.
        minimum: tokens that a streaming head keeps.
    """

    def __init__(self, head_scores: Sequence[Sequence[float]], *, layer: int, minimum: int):
        flat = torch.tensor([score for heads in head_scores for score in heads], dtype=torch.float64)
        places = torch.empty(len(flat), dtype=torch.int64)
        places[flat.argsort(descending=True, stable=True)] = torch.arange(len(flat))
        begin = sum(len(heads) for heads in head_scores[:layer])
        self.places = places[begin : begin + len(head_scores[layer])].tolist()  # 0 for the best retrieving head of all
        self.num_heads = len(flat)
        self.minimum = minimum

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        return held.slots.float()

    def select(self, scores: torch.Tensor, budget: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        surplus = self.num_heads * (budget - self.minimum).clamp(min=0)  # [B], beside what all heads keep
        place = torch.tensor(self.places, device=scores.device)
        most = (seen - self.minimum).clamp(min=1)
        # The heads before this one take what they need; this one keeps what is left, up to everything.
        left = surplus[:, None] - place * most[:, None]
        own = torch.minimum(left.clamp(min=0), most[:, None])
        return best_of_each_head(scores, self.minimum + own)


class InductionProbe(Reconstruction):
    """Of random tokens that are read twice, how much each KV head attends to the token after the same one, `[Hkv]`."""

    def __init__(self, held: Held, *, is_last: bool):
        super().__init__(held, looks_at_all=True, is_last=is_last)
        self.strength = torch.zeros(held.slots.shape[1], device=held.slots.device)

    def note(self, weights: torch.Tensor, text: Text, begin: int) -> None:
        following = torch.arange(begin + 1, begin + 1 + weights.shape[3], device=weights.device)
        following = following[following < weights.shape[-1]]
        places = torch.arange(len(following), device=weights.device)
        looked_up = weights[:, :, :, places, following]  # [B, Hkv, G, T]
        # A KV head retrieves if any query head of its group does.
        self.strength += looked_up.sum(dim=(0, 3)).amax(dim=-1)
