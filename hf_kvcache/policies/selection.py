"""From scores to the tokens that stay: budgets of heads and layers, smoothing, protected tokens."""

from collections.abc import Sequence

import torch
from torch import nn


def ranks(scores: torch.Tensor) -> torch.Tensor:
    """Rank of each score along the last axis, 0 for the highest; equal scores rank in their order."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def standardize(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`scores` `[B, H, n]` in standard deviations from the mean of those columns of a head that `counts` says."""
    number = counts.sum(dim=-1, keepdim=True).clamp(min=1)
    centred = scores - scores.masked_fill(~counts, 0.0).sum(dim=-1, keepdim=True) / number
    variance = centred.masked_fill(~counts, 0.0).square().sum(dim=-1, keepdim=True) / number
    return centred / variance.sqrt().clamp(min=1e-12)


def best_of_each_head(scores: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """The best tokens of each head of `scores` `[B, H, n]`: `budget` `[B, H or 1]`; -inf marks what is not there."""
    return (ranks(scores) < budget.unsqueeze(-1)) & (scores > -torch.inf)


def best_of_all_heads(scores: torch.Tensor, budget: torch.Tensor, safeguard: float) -> torch.Tensor:
    """The `H * budget` best tokens of all heads together; each head keeps its best `safeguard * budget` in any case."""
    heads = scores.shape[1]
    forced = ranks(scores) < (budget.float() * safeguard).floor()[:, None, None]
    lifted = scores.masked_fill(forced & (scores > -torch.inf), torch.inf)
    return (ranks(lifted.flatten(1)) < heads * budget[:, None]).view_as(scores) & (scores > -torch.inf)


def best_of_all_layers(scores: Sequence[torch.Tensor], budget: torch.Tensor) -> list[torch.Tensor]:
    """Of each row, the best tokens of all heads of all layers: `scores` `[B, H, n]` and `budget` `[B]` a layer."""
    device = scores[0].device
    flat = torch.cat([part.flatten(1).to(device) for part in scores], dim=1)
    places = sum(part.shape[1] * own for part, own in zip(scores, budget.to(device), strict=True))
    keep = (ranks(flat) < places[:, None]) & (flat > -torch.inf)
    parts = keep.split([part.shape[1] * part.shape[2] for part in scores], dim=1)
    return [part.view(score.shape).to(score.device) for part, score in zip(parts, scores, strict=True)]


def smooth(scores: torch.Tensor, is_held: torch.Tensor, kernel_size: int, *, pooling: str = "mean") -> torch.Tensor:
    """Spread each score over its neighbours in a window of `kernel_size` tokens: what is near matters too.

    Before a mean, scores are cut at their highest 0.1%, so that no single token fills its window.

    Args:
        scores: `[B, H, n]`, higher = keep.
        is_held: bool `[B, H, n]`; other columns neither give nor take.
        kernel_size: odd number of tokens; 1 changes nothing.
        pooling: `"mean"` or `"max"`.
    """
    if kernel_size == 1:
        return scores
    if pooling == "max":
        filled = scores.masked_fill(~is_held, -torch.inf)
        return nn.functional.max_pool1d(filled, kernel_size, 1, kernel_size // 2)
    num_highest = 1 + scores.shape[-1] // 1000
    limit = scores.masked_fill(~is_held, -torch.inf).topk(num_highest, dim=-1).values[..., -1:]
    cut = torch.minimum(scores, limit).masked_fill(~is_held, 0.0)
    total = nn.functional.avg_pool1d(cut, kernel_size, 1, kernel_size // 2)
    weight = nn.functional.avg_pool1d(is_held.to(scores.dtype), kernel_size, 1, kernel_size // 2)
    return total / weight.clamp(min=1e-6)
