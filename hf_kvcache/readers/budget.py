"""How much a query reads, and the choice of units (tokens or blocks) from estimated masses."""

from dataclasses import dataclass
from typing import Any

import torch

DEFAULT_BUDGET = 1024


@dataclass(frozen=True)
class ReadBudget:
    """What a decode step reads of the tokens that are neither sinks nor recent. One of the first three is given.

    Attributes:
        budget: tokens a head that are read, sinks and recent ones included.
        keep_ratio: share of the older tokens, in (0, 1].
        top_p: read until the tokens read have this share of the estimated attention, in (0, 1].
        num_sink_tokens: first real tokens of each row, always read.
        num_recent_tokens: newest tokens, always read, and those of the blocks that they lie in.
        group: how the query heads of a KV head agree: "mean" or "max" of their estimated attention.
    """

    budget: int | None
    keep_ratio: float | None
    top_p: float | None
    num_sink_tokens: int
    num_recent_tokens: int
    group: str

    @classmethod
    def of(cls, options: dict[str, Any]) -> "ReadBudget":
        """From all options of a technique."""
        chosen = {name: options[name] for name in cls.__dataclass_fields__}
        if all(chosen[name] is None for name in ("budget", "keep_ratio", "top_p")):
            chosen["budget"] = DEFAULT_BUDGET
        return cls(**chosen)

    def num_units(self, candidates: int, unit: int) -> int:
        """Units of `unit` tokens to read of `candidates` older tokens; with `top_p`, at most."""
        if self.top_p is not None:
            return candidates // unit
        if self.keep_ratio is not None:
            return max(1, round(self.keep_ratio * candidates / unit))
        return min(candidates, self.budget - self.num_sink_tokens - self.num_recent_tokens) // unit

    def reads_all(self, candidates: int, unit: int) -> bool:
        """Whether there is nothing to choose."""
        if self.top_p is not None:
            return self.top_p == 1 or not candidates
        return self.num_units(candidates, unit) >= candidates // unit

    def choose(self, scores: torch.Tensor, read: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The units that the query heads of each KV head read.

        Args:
            scores: estimated log mass of each unit, `[B, H, G, n]`, -inf for those that must not be chosen.
            read: log mass of what is read anyway, `[B, H, G]`.
            count: units to choose, at most.

        Returns:
            Units `[B, H, k]`, and which of them to read (bool, the same shape): rows and heads may have fewer.
        """
        total = torch.logaddexp(scores.logsumexp(dim=-1), read)
        masses = self._agreed((scores - total.unsqueeze(-1)).exp_(), dim=2)
        if self.top_p is None:
            chosen = masses.topk(count, sorted=False).indices
            return chosen, scores[:, :, 0].gather(2, chosen) > -torch.inf
        top = masses.sort(descending=True)
        anyway = self._agreed((read - total).exp_(), dim=2)
        missing = self.top_p * (top.values.sum(dim=-1) + anyway) - anyway
        before = top.values.cumsum(dim=-1) - top.values
        is_chosen = (before < missing.unsqueeze(-1)) & (top.values > 0)
        # A sync: how many units reach the mass decides the size of what is read.
        most = int(is_chosen.sum(dim=-1).max())
        return top.indices[..., :most], is_chosen[..., :most]

    def _agreed(self, shares: torch.Tensor, dim: int) -> torch.Tensor:
        return shares.mean(dim=dim) if self.group == "mean" else shares.amax(dim=dim)
