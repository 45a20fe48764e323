"""Clusters of tokens by their keys: a mean key, a mean value and a number stand for several tokens in attention.

A cluster of `n` tokens weighs `n * exp(query . mean key)` in the softmax. That is exact if the keys are equal, and by
Jensen's inequality never more than the tokens themselves weigh. Contiguous tokens are no clusters: their keys differ.
Papers: Liu et al. 2025, RetroInfer, https://arxiv.org/abs/2505.02922 (clusters of segments, estimates for what is not
read); Zhu et al. 2025, Tactic, https://arxiv.org/abs/2502.12216.
"""

from typing import NamedTuple

import torch

ITERATIONS = 8

_SPREAD, _SPREAD_DIM = 0.3, 64


def default_spread(head_dim: int) -> float:
    """Share of a radius by which clusters count as nearer: 0.3, and less for more channels than 64.

    Queries point along few of many channels, and what lies at right angles to them is no nearer. The farthest members
    are off by 0.11 of `|query| * radius` on SmolLM2 (64 channels), and by 0.03 on Gemma-3-270M (256), root mean square.
    """
    return _SPREAD * min(1.0, _SPREAD_DIM / head_dim)


class Clusters(NamedTuple):
    """`k` clusters of `n` tokens, for each row and head.

    Attributes:
        keys: mean keys `[B, H, k, D]`.
        values: mean values `[B, H, k, Dv]`.
        spans: int32 `[B, H, k, 2]`: where the cluster begins in `members`, and how many tokens it has.
        radii: float32 `[B, H, k]`: the farthest that a member's key is from the mean key.
        members: int32 `[B, H, n]`: the tokens, cluster by cluster; those that belong to none come last.
    """

    keys: torch.Tensor
    values: torch.Tensor
    spans: torch.Tensor
    radii: torch.Tensor
    members: torch.Tensor


def cluster_tokens(keys: torch.Tensor, values: torch.Tensor, is_member: torch.Tensor, num_clusters: int) -> Clusters:
    """Cluster tokens by k-means on their keys, less the mean key.

    Args:
        keys: `[B, H, n, D]`, rotated to their positions.
        values: `[B, H, n, Dv]`.
        is_member: bool `[B, n]` or `[B, H, n]`; other tokens (padding, sinks) belong to no cluster.
        num_clusters: at most; some may stay empty.
    """
    rows, heads, length, _ = keys.shape
    is_member = is_member.unsqueeze(1) if is_member.ndim == 2 else is_member
    weight = is_member.expand(rows, heads, length).flatten(0, 1).float()  # [R, n]
    nearest = _k_means(keys.flatten(0, 1).float(), weight, num_clusters)
    nearest = nearest.masked_fill_(weight == 0, num_clusters)  # one cluster more, of those that belong to none
    counts = weight.new_zeros(len(weight), num_clusters + 1).scatter_add_(1, nearest, torch.ones_like(weight))
    means = [
        (_sums(state.flatten(0, 1).float(), nearest, num_clusters + 1) / counts.clamp(min=1).unsqueeze(-1))[:, :-1]
        for state in (keys, values)
    ]
    radii = _radii(keys.flatten(0, 1).float(), means[0], nearest)
    counts = counts[:, :-1]
    spans = torch.stack([counts.cumsum(dim=1) - counts, counts], dim=-1).int()
    members = nearest.argsort(dim=1, stable=True).int()
    shape = (rows, heads)
    keys, values = (mean.to(keys.dtype).unflatten(0, shape) for mean in means)
    return Clusters(keys, values, *(part.unflatten(0, shape) for part in (spans, radii, members)))


def _k_means(keys: torch.Tensor, weight: torch.Tensor, num_clusters: int) -> torch.Tensor:
    """Lloyd's algorithm: the nearest centre of each key, int64 `[R, n]`."""
    total = weight.sum(dim=1, keepdim=True)
    mean = (keys * weight.unsqueeze(-1)).sum(dim=1, keepdim=True) / total.clamp(min=1).unsqueeze(-1)
    keys = (keys - mean) * weight.unsqueeze(-1)
    # Centres begin at members that lie at equal distances in the text.
    places = torch.arange(num_clusters, device=keys.device) * total.long() // num_clusters
    members = weight.argsort(dim=1, descending=True, stable=True).gather(1, places)
    centres = keys.gather(1, members.unsqueeze(-1).expand(-1, -1, keys.shape[-1]))
    for _ in range(ITERATIONS):
        nearest = _nearest(keys, centres)
        counts = weight.new_zeros(centres.shape[:2]).scatter_add_(1, nearest, weight).unsqueeze(-1)
        centres = torch.where(counts > 0, _sums(keys, nearest, num_clusters) / counts.clamp(min=1), centres)
    return _nearest(keys, centres)


def _nearest(keys: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    half = centres.square().sum(dim=-1).unsqueeze(1) / 2
    return torch.baddbmm(half, keys, centres.transpose(1, 2), alpha=-1).argmin(dim=-1)


def _sums(states: torch.Tensor, nearest: torch.Tensor, count: int) -> torch.Tensor:
    """Sum of the states `[R, n, D]` of each cluster, `[R, count, D]`."""
    index = nearest.unsqueeze(-1).expand_as(states)
    return states.new_zeros(len(states), count, states.shape[-1]).scatter_add_(1, index, states)


def _radii(keys: torch.Tensor, centres: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    """The farthest that a key `[R, n, D]` of each cluster is from its centre `[R, k, D]`, `[R, k]`."""
    # Tokens that belong to no cluster are given another column, which is cut off.
    centres = torch.nn.functional.pad(centres, (0, 0, 0, 1))
    distance = (keys - centres.gather(1, nearest.unsqueeze(-1).expand_as(keys))).norm(dim=-1)
    return distance.new_zeros(centres.shape[:2]).scatter_reduce_(1, nearest, distance, "amax")[:, :-1]
