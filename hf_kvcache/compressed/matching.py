"""Attention matching: a few tokens are fitted so that attention to them is what attention to all tokens was.

Given reference queries and the tokens that stay, two fits, a head at a time:

1. **Masses.** Each token that stays gets a weight, by non-negative least squares, such that together they weigh in the
   softmax what all tokens weighed. A weight `w` is stored in the key: `u` is the vector with `q u = 1` for all
   reference queries, as nearly as there is one, and `k + log(w) u / scaling` scores `log(w)` more than `k` did.
2. **Values**, by ridge least squares, such that the outputs are those of attention to all tokens.

A fitted token is a token like any other: nothing is stored besides, and it may be fitted again with others later.
Every query is weighted by how much of its attention is at stake, as all weights are shares of its whole softmax.
Paper: Zweiger et al. 2026, Attention Matching, https://arxiv.org/abs/2602.16284.
Differs from the paper: masses are folded into keys, where the paper stores a bias a token; what is not fitted (sinks,
newer tokens) counts in the softmax; reference queries are turned to positions to come, see
`hf_kvcache.policies.attention_matching`.
"""

import math
from typing import NamedTuple

import torch

# Tokens that are fitted together, and queries whose scores for all tokens are in memory at once: time is linear in the
# number of tokens, and memory is bounded.
SEGMENT_LENGTH = 4096
_QUERIES_AT_A_TIME = 512

_MASS_RIDGE = _VALUE_RIDGE = 0.1  # of the mean squared weight of a token
_UNIT_RIDGE = 1e-3
_ITERATIONS = 300
_MOST_LOG_MASS = 4.0


class Shares(NamedTuple):
    """What `M` queries of a head give to `n` tokens, in shares of their whole softmax.

    Attributes:
        logsumexp: of each query's scores for all tokens, `[M, 1]`.
        output: of attention to all tokens, `[M, Dv]`.
        other: the part of it that comes from tokens that are not replaced, `[M, Dv]`.
        other_mass: their share, `[M, 1]`; not as a difference, of which rounding would leave nothing.
        mass: the share of the tokens to be replaced, `[M]`.
    """

    logsumexp: torch.Tensor
    output: torch.Tensor
    other: torch.Tensor
    other_mass: torch.Tensor
    mass: torch.Tensor


def match_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    is_replaced: torch.Tensor,
    is_kept: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values for the tokens that stay of those to be replaced, in one head.

    Args:
        queries: reference queries `[M, D]`, float32.
        keys: of all tokens that the queries attend to, `[n, D]`, float32.
        values: `[n, Dv]`, float32.
        is_replaced: bool `[n]`: the tokens that the fitted ones stand for. The others stay as they are.
        is_kept: bool `[n]`: those of them that stay.
        scaling: of the scores.

    Returns:
        `[k, D]` and `[k, Dv]`, in the order of the kept tokens: as they were, if fitting them helps none.
    """
    shares = _attend(queries, keys, values, is_replaced, scaling)
    old = keys[is_kept], values[is_kept]
    weights = _weights(queries, old[0], shares, scaling)
    log_mass = _masses(weights, shares.mass).log()
    unit = _unit_direction(queries, shares.mass)
    new_keys = old[0] + log_mass.clamp(-_MOST_LOG_MASS, _MOST_LOG_MASS).unsqueeze(1) / scaling * unit
    new_weights = _weights(queries, new_keys, shares, scaling)
    new_values = _values(new_weights, shares, old[1])
    errors = [_error(*pair, shares) for pair in ((weights, old[1]), (new_weights, new_values))]
    return (new_keys, new_values) if bool(errors[1] < errors[0]) else old


def _attend(queries, keys, values, is_replaced, scaling: float) -> Shares:
    parts = []
    for part in queries.split(_QUERIES_AT_A_TIME):
        scores = part @ keys.T * scaling
        logsumexp = scores.logsumexp(dim=1, keepdim=True)
        weights = scores.sub_(logsumexp).exp_()
        output, mass = weights @ values, (weights * is_replaced).sum(dim=1)
        weights = weights.masked_fill_(is_replaced, 0.0)
        parts.append(Shares(logsumexp, output, weights @ values, weights.sum(dim=1, keepdim=True), mass))
    return Shares(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _weights(queries, keys, shares: Shares, scaling: float) -> torch.Tensor:
    """What the queries give to each of `keys`, in shares of the softmax over all tokens, `[M, k]`."""
    return (queries @ keys.T * scaling).sub_(shares.logsumexp).exp_()


def _normalised(weights: torch.Tensor, shares: Shares) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the kept tokens in the softmax that is left `[M, k]`, and the output of what is not replaced."""
    total = shares.other_mass + weights.sum(dim=1, keepdim=True)
    total = total.clamp(min=torch.finfo(total.dtype).tiny)
    return weights / total, shares.other / total


def _error(weights: torch.Tensor, values: torch.Tensor, shares: Shares) -> torch.Tensor:
    """Squared error of the queries' outputs."""
    weights, other = _normalised(weights, shares)
    return (weights @ values + other - shares.output).square().sum()


def _masses(weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """`w >= 0`, near 1, with `weights @ w` near `mass`: `[k]`. An accelerated projected gradient, scaled."""
    product = weights.T @ weights
    ridge = _MASS_RIDGE * product.diagonal().mean()
    product.diagonal().add_(ridge)
    scale = product.diagonal().clamp(min=torch.finfo(product.dtype).tiny).rsqrt()
    product = product * scale * scale.unsqueeze(1)
    target = (weights.T @ mass + ridge) * scale
    # No eigenvalue of a matrix with a diagonal of ones and no negative entry exceeds its largest row sum.
    step = 1 / product.sum(dim=1).max()
    # What the projection leaves of a token is never quite nothing, for it has a logarithm.
    least = math.exp(-_MOST_LOG_MASS) / scale
    found = ahead = 1 / scale
    pace = 1.0
    for _ in range(_ITERATIONS):
        newer = torch.maximum(ahead - step * (product @ ahead - target), least)
        faster = (1 + math.sqrt(1 + 4 * pace * pace)) / 2
        ahead = newer + (pace - 1) / faster * (newer - found)
        found, pace = newer, faster
    return found * scale


def _unit_direction(queries: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The vector `[D]` whose product with every query is 1, as nearly as possible where `mass` is large."""
    weighted = queries * mass.clamp(min=1e-3).unsqueeze(1)
    product = queries.T @ weighted
    product.diagonal().add_(_UNIT_RIDGE * product.diagonal().mean())
    return torch.linalg.solve(product, weighted.sum(dim=0))


def _values(weights: torch.Tensor, shares: Shares, values: torch.Tensor) -> torch.Tensor:
    """Values `[k, Dv]`, near `values`, that give the queries their outputs."""
    weights, other = _normalised(weights, shares)
    product = weights.T @ weights
    product.diagonal().add_(_VALUE_RIDGE * product.diagonal().mean() + torch.finfo(product.dtype).tiny)
    missing = weights.T @ (shares.output - other - weights @ values)
    factor, failed = torch.linalg.cholesky_ex(product)
    return values if bool(failed) else values + torch.cholesky_solve(missing, factor)
