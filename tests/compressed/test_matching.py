"""Attention matching: what is fitted stands for all tokens, and never worse than the same tokens unfitted."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcache.compressed.matching import match_attention

pytestmark = pytest.mark.core

SCALING, SINKS = 0.25, 4


def heads_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attend(queries, keys, values):
    return (SCALING * queries @ keys.T).softmax(-1) @ values


def sample(seed: int, *, length: int = 120, spread: float = 2.0, num_queries: int = 300):
    """Queries with a mean, keys and values, which tokens are replaced, and which of these stay."""
    queries = heads_of(seed, num_queries, 16) + 2 * heads_of(seed + 1, 16)
    keys, values = spread * heads_of(seed + 2, length, 16), heads_of(seed + 3, length, 8)
    is_replaced = torch.arange(length) >= SINKS
    is_kept = is_replaced & (heads_of(seed + 4, length) > 0.7)
    is_kept[SINKS] = True
    return queries, keys, values, is_replaced, is_kept


def error(queries, keys, values, is_replaced, fitted):
    """Mean squared error of outputs, with `fitted` in place of all that is replaced."""
    left = [torch.cat([state[~is_replaced], new]) for state, new in zip((keys, values), fitted, strict=True)]
    return (attend(queries, *left) - attend(queries, keys, values)).square().mean()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([8, 30, 200]),
    st.sampled_from([0.1, 2.0, 8.0]),
    st.sampled_from([2, 40, 600]),
)
def test_a_fit_is_never_worse_for_its_queries(seed, length, spread, num_queries):
    queries, keys, values, is_replaced, is_kept = sample(seed, length=length, spread=spread, num_queries=num_queries)
    fitted = match_attention(queries, keys, values, is_replaced, is_kept, SCALING)
    kept = keys[is_kept], values[is_kept]
    assert [state.shape for state in fitted] == [state.shape for state in kept]
    assert all(state.isfinite().all() for state in fitted)
    before = error(queries, keys, values, is_replaced, kept)
    assert error(queries, keys, values, is_replaced, fitted) <= before * 1.0001 + 1e-9  # rounding


def test_a_fit_is_far_better_for_other_queries_of_their_kind():
    queries, keys, values, is_replaced, is_kept = sample(0, num_queries=1200)
    fitted = match_attention(queries[:900], keys, values, is_replaced, is_kept, SCALING)
    left = [error(queries[900:], keys, values, is_replaced, f) for f in (fitted, (keys[is_kept], values[is_kept]))]
    assert left[0] < 0.25 * left[1]


def test_a_token_that_stands_for_equal_ones_weighs_what_they_do():
    """Of 40 equal tokens one stays: it scores log 40 more, for queries that were not seen too."""
    queries, keys, values = heads_of(0, 400, 16) + 2 * heads_of(1, 16), 2 * heads_of(2, 45, 16), heads_of(3, 45, 8)
    keys[5:], values[5:] = 0.0, values[5]
    is_replaced, is_kept = torch.arange(45) >= 5, torch.arange(45) == 5
    new_keys, _ = match_attention(queries[:300], keys, values, is_replaced, is_kept, SCALING)
    more = SCALING * queries[300:] @ (new_keys - keys[5]).T
    torch.testing.assert_close(more.mean(), torch.tensor(math.log(40)), atol=0.15, rtol=0.0)
    apart = error(queries[300:], keys, values, is_replaced, (keys[5:6], values[5:6]))
    assert error(queries[300:], keys, values, is_replaced, (new_keys, values[5:6])) < 0.1 * apart


def test_what_is_not_replaced_counts_in_the_softmax():
    """Queries that attend to a sink have nothing at stake in what is fitted: those that do not decide."""
    queries, keys, values, is_replaced, is_kept = sample(7, num_queries=800)
    keys[0] = 0.0
    keys[0, 0] = 400.0
    away = queries.clone()
    away[:, 0] = 1.0
    queries[:, 0] = -1.0
    both = match_attention(torch.cat([queries, away]), keys, values, is_replaced, is_kept, SCALING)
    alone = match_attention(queries, keys, values, is_replaced, is_kept, SCALING)
    errors = [error(queries, keys, values, is_replaced, fitted) for fitted in (both, alone)]
    torch.testing.assert_close(errors[0], errors[1], rtol=0.1, atol=1e-6)


def test_segments_of_queries_change_nothing(monkeypatch):
    arguments = *sample(3), SCALING
    expected = match_attention(*arguments)
    monkeypatch.setattr("hf_kvcache.compressed.matching._QUERIES_AT_A_TIME", 7)
    for got, whole in zip(match_attention(*arguments), expected, strict=True):
        torch.testing.assert_close(got, whole, atol=1e-3, rtol=1e-3)


def test_what_a_fit_would_make_worse_stays_as_it_is(monkeypatch):
    queries, keys, values, is_replaced, is_kept = sample(5)
    monkeypatch.setattr("hf_kvcache.compressed.matching._values", lambda weights, shares, values: 5 * values)
    fitted = match_attention(queries, keys, values, is_replaced, is_kept, SCALING)
    assert torch.equal(fitted[0], keys[is_kept])
    assert torch.equal(fitted[1], values[is_kept])
