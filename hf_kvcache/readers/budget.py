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

    def num_units(self, candidates: int, unit: int, recent: int | None = None) -> int:
        """Units of `unit` tokens to read of `candidates` older tokens; with `top_p`, at most.

        `recent` tokens are read anyway; None: `num_recent_tokens`. Without room for more, it is one unit.
        """
        if self.top_p is not None:
            return candidates // unit
        if self.keep_ratio is not None:
            return max(1, round(self.keep_ratio * candidates / unit))
        recent = self.num_recent_tokens if recent is None else recent
        return max(1, min(candidates, self.budget - self.num_sink_tokens - recent) // unit)

    def reads_all(self, candidates: int, unit: int, recent: int | None = None) -> bool:
        """Whether there is nothing to choose."""
        if self.top_p is not None:
            return self.top_p == 1 or not candidates
        return self.num_units(candidates, unit, recent) >= candidates // unit

    def choose(self, scores: torch.Tensor, read: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The units that the query heads of each KV head read.

        Args:
            scores: estimated log mass of each unit, `[B, H, G, n]`, -inf for those that must not be chosen.
            read: log mass of what is read anyway, `[B, H, G]`.
            count: units to choose, at most.

        Returns:
            Units `[B, H, k]`, and which of them to read (bool, the same shape): rows and heads may have fewer.
        """
        masses, anyway = self._masses(scores, read)
        if self.top_p is None:
            chosen = masses.topk(count, sorted=False).indices
            return chosen, scores[:, :, 0].gather(2, chosen) > -torch.inf
        top = masses.sort(descending=True)
        is_chosen = self._reach_top_p(top.values, anyway)
        # A sync: how many units reach the mass decides the size of what is read.
        most = int(is_chosen.sum(dim=-1).max())
        return top.indices[..., :most], is_chosen[..., :most]

    def choose_sized(
        self, scores: torch.Tensor, read: torch.Tensor, sizes: torch.Tensor, candidates: int, reach: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """As `choose`, for units of `sizes` `[B, H, n]` tokens, `candidates` tokens a row together.

        A unit costs its tokens: those with the largest mass a token come first, as in a knapsack. In that order, and
        only there, log masses are higher by `reach` `[B, H, G, n]`.

        Returns:
            The first units `[B, H, k]` in that order, which of them to read (bool: the first ones), and the most tokens
            that a head reads.
        """
        masses, anyway = self._masses(scores, read)
        rates = self._masses(scores + reach, read)[0] / sizes.clamp(min=1)
        if self.top_p is None:
            total = self.num_units(candidates, 1)
            order = rates.topk(min(total, rates.shape[-1])).indices  # no more can be read
            return order, sizes.gather(2, order).cumsum(dim=-1) <= total, total
        order = rates.argsort(descending=True)
        ends = sizes.gather(2, order).cumsum(dim=-1)
        is_chosen = self._reach_top_p(masses.gather(2, order), anyway)
        # A sync, as in `choose`.
        return order, is_chosen, int((ends * is_chosen).max())

    def _masses(self, scores: torch.Tensor, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Estimated shares of the attention of each unit `[B, H, n]`, and of what is read anyway `[B, H]`."""
        highest = torch.maximum(scores.amax(dim=-1), read)
        masses = (scores - highest.unsqueeze(-1)).exp_()
        anyway = (read - highest).exp_()
        total = masses.sum(dim=-1) + anyway
        return self._agreed(masses.div_(total.unsqueeze(-1))), self._agreed(anyway / total)

    def _reach_top_p(self, masses: torch.Tensor, anyway: torch.Tensor) -> torch.Tensor:
        """The first of these masses that reach `top_p` of the whole together with `anyway`; empty ones come last."""
        missing = self.top_p * (masses.sum(dim=-1) + anyway) - anyway
        before = masses.cumsum(dim=-1) - masses
        return (before < missing.unsqueeze(-1)) & (masses > 0)

    def _agreed(self, shares: torch.Tensor) -> torch.Tensor:
        """Shares of the query heads `[B, H, G, ...]` as one, `[B, H, ...]`."""
        return shares.mean(dim=2) if self.group == "mean" else shares.amax(dim=2)
