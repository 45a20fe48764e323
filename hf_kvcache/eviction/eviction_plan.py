"""How much a policy keeps, and when it acts: the options that all eviction techniques share."""

from dataclasses import dataclass
from typing import Any

import torch

DEFAULT_KEEP_RATIO = 0.5


@dataclass(frozen=True)
class Budget:
    """What each head may keep, given in one of three ways; heads of one layer may share theirs.

    Args:
        tokens: tokens a head.
        keep_ratio: tokens kept of those seen, in (0, 1].
        num_bytes: bytes of one sequence in all evicting layers together.
        num_layers: how many layers share `num_bytes`.
        minimum: tokens that every policy keeps (sinks and recent ones).
    """

    tokens: int | None
    keep_ratio: float | None
    num_bytes: int | None
    num_layers: int
    minimum: int

    def of(self, seen: torch.Tensor, token_bytes: float) -> torch.Tensor:
        """Tokens a head of each row that has seen `seen` `[B]` real tokens; one token takes `token_bytes` a layer."""
        if self.tokens is not None:
            budget = torch.full_like(seen, self.tokens)
        elif self.num_bytes is not None:
            budget = torch.full_like(seen, int(self.num_bytes / (self.num_layers * token_bytes)))
        else:
            # 0.3 * 200 is a little more than 60 in floating point.
            budget = (seen.double() * self.keep_ratio - 1e-6).ceil().long()
        return budget.clamp(min=self.minimum)

    def keeps_all(self, seen: int) -> bool:
        """Whether `seen` tokens are certainly no more than what may stay."""
        return seen <= max(self.tokens or 0, self.minimum) or self.keep_ratio == 1.0


@dataclass(frozen=True)
class EvictionPlan:
    """When tokens are evicted, and which ones never are.

    Args:
        budget: how much stays.
        at_prompt_end: evict when `generate()` has run a prompt, and between its chunks.
        interval: evict after every so many tokens outside of prompts; None for never.
        num_sink_tokens: first tokens of each row that stay. Tokens, at least 0.
        num_recent_tokens: newest tokens that stay. Tokens, at least 1.
        kernel_size: neighbouring tokens that a score is pooled over, odd; 1 for none.
        pooling: how, `"mean"` or `"max"`.
        is_layerwise: all heads of a layer keep the same tokens, by the mean of their scores.
        merge: cosine of keys from which an evicted token counts in a kept one; None for never.
    """

    budget: Budget
    at_prompt_end: bool
    interval: int | None
    num_sink_tokens: int
    num_recent_tokens: int
    kernel_size: int
    pooling: str
    is_layerwise: bool
    merge: float | None

    @classmethod
    def of(cls, options: dict[str, Any], num_layers: int) -> "EvictionPlan":
        """The plan that checked options of a technique stand for."""
        sinks, recent = options["num_sink_tokens"], options["num_recent_tokens"]
        ratio = options["keep_ratio"]
        if ratio is None and options["budget"] is None and options["budget_bytes"] is None:
            ratio = DEFAULT_KEEP_RATIO
        budget = Budget(options["budget"], ratio, options["budget_bytes"], num_layers, sinks + recent)
        when = options.get("when", "prefill")
        return cls(
            budget=budget,
            at_prompt_end=when in ("prefill", "both"),
            interval=options["interval"] if when in ("decode", "both") else None,
            num_sink_tokens=sinks,
            num_recent_tokens=recent,
            kernel_size=options["kernel_size"],
            pooling=options["pooling"],
            is_layerwise=options.get("granularity") == "layer",
            merge=options.get("merge"),
        )
