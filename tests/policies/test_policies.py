"""Each policy's scores against its formula, written out for one row and one head at a time."""

import math

import pytest
import torch

from hf_kvcache import make_cache
from hf_kvcache.policies.base import Held, Queries
from hf_kvcache.policies.blend import Blend
from hf_kvcache.policies.expected_attention import ExpectedAttention
from hf_kvcache.policies.h2o import H2O
from hf_kvcache.policies.keydiff import KeyDiff
from hf_kvcache.policies.knorm import KeyNorm
from hf_kvcache.policies.lagkv import LagKV
from hf_kvcache.policies.leverage import Leverage
from hf_kvcache.policies.observers import attention_weights
from hf_kvcache.policies.pyramidkv import PyramidKV
from hf_kvcache.policies.random import Random
from hf_kvcache.policies.selection import best_of_all_heads, best_of_all_layers, best_of_each_head, smooth
from hf_kvcache.policies.snapkv import SnapKV
from hf_kvcache.policies.streaming_llm import StreamingLLM
from hf_kvcache.policies.tova import Tova
from hf_kvcache.rotary import find_rotary

pytestmark = pytest.mark.core

ROWS, HEADS, GROUPS, LENGTH, DIM = 2, 2, 3, 37, 16
FIRST = [0, 9]


@pytest.fixture
def queries():
    generator = torch.Generator().manual_seed(1)
    return Queries(torch.randn(ROWS, HEADS * GROUPS, LENGTH, DIM, generator=generator), 0)


@pytest.fixture
def held():
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(ROWS, HEADS, LENGTH, DIM, generator=generator) for _ in range(2))
    slots = torch.arange(LENGTH).expand(ROWS, HEADS, -1)
    return Held(keys, values, slots, slots, torch.tensor(FIRST), LENGTH, DIM**-0.5)


def weights_by_hand(queries, held, row: int, head: int, group: int) -> torch.Tensor:
    """Causal attention `[T, n]` of one query head without the row's padding."""
    query = queries.states[row, head * GROUPS + group]
    logits = query @ held.keys[row, head].T * held.scaling
    seen = torch.ones(LENGTH, LENGTH).tril().bool()
    seen[:, : FIRST[row]] = False
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    weights[: FIRST[row]] = 0.0
    return weights


def each_head():
    return [(row, head) for row in range(ROWS) for head in range(HEADS)]


def assert_scores(scores, expected, row: int, head: int) -> None:
    begin = FIRST[row]
    torch.testing.assert_close(scores[row, head, begin:], expected[begin:], atol=1e-5, rtol=1e-5)


def test_weights_equal_causal_attention(queries, held):
    weights = attention_weights(queries, held)
    for row, head in each_head():
        for group in range(GROUPS):
            expected = weights_by_hand(queries, held, row, head, group)
            torch.testing.assert_close(weights[row, head, group], expected, atol=1e-6, rtol=1e-5)


def test_weights_are_the_same_of_tokens_in_parts(queries, held):
    parts = [
        held._replace(**{name: getattr(held, name)[:, :, own] for name in ("keys", "values", "slots", "positions")})
        for own in (slice(None, 11), slice(11, None))
    ]
    torch.testing.assert_close(attention_weights(queries, *parts), attention_weights(queries, held))


def test_h2o_adds_up_all_attention_however_it_comes_in(queries, held):
    policy, step = H2O(average=False), H2O(average=False)
    whole, parts = policy.new_observer(), step.new_observer()
    whole.see(queries, held.first_slot, lambda: [held])
    for begin, stop in ((0, 1), (1, 20), (20, LENGTH)):
        seen = held._replace(**{name: getattr(held, name)[:, :, :stop] for name in ("keys", "values", "slots")})
        parts.see(Queries(queries.states[:, :, begin:stop], begin), seen.first_slot, lambda seen=seen: [seen])
    scores = policy.scores(held, whole)
    torch.testing.assert_close(step.scores(held, parts), scores)
    for row, head in each_head():
        expected = sum(weights_by_hand(queries, held, row, head, group).sum(0) for group in range(GROUPS))
        assert_scores(scores, expected, row, head)
        average = H2O(average=True).scores(held, whole)
        assert_scores(average, expected / torch.arange(LENGTH, 0, -1), row, head)


def test_h2o_carries_its_sums_through_evictions_and_rollbacks(queries, held):
    observer = H2O(average=False).new_observer()
    observer.see(queries, held.first_slot, lambda: [held])
    before = observer.aligned(held)
    new_slots = torch.tensor([3, 5, 36, -1]).expand(ROWS, HEADS, -1)
    observer.move(held.slots, new_slots, LENGTH)
    kept = Held(*(state[:, :, :4] for state in held[:4]), *held[4:])
    moved = observer.aligned(kept)
    assert torch.equal(moved[..., :3], before[..., [3, 5, 36]])
    assert (moved[..., 3] == 0).all()
    observer.forget(2)
    assert torch.equal(observer.aligned(kept), moved * torch.tensor([1, 1, 0, 0]))


def test_tova_is_the_last_query_averaged_over_all_heads(queries, held):
    policy = Tova()
    observer = policy.new_observer()
    observer.see(queries, held.first_slot, lambda: [held])
    scores = policy.scores(held, observer)
    for row in range(ROWS):
        every = [weights_by_hand(queries, held, row, h, g)[-1] for h in range(HEADS) for g in range(GROUPS)]
        for head in range(HEADS):
            assert_scores(scores, torch.stack(every).mean(0), row, head)


@pytest.mark.parametrize(("how", "votes"), [("equal", [3, 3, 3, 3]), ("harmonic", [3, 4, 6, 12])])
@pytest.mark.parametrize("chunks", [[37], [30, 7], [35, 1, 1]], ids=str)
def test_snapkv_is_the_weighted_mean_of_the_last_queries(queries, held, chunks, how, votes):
    policy = SnapKV(observation_window=4, window_weights=how)
    observer, begin = policy.new_observer(), 0
    for count in chunks:
        observer.see(Queries(queries.states[:, :, begin : begin + count], begin), held.first_slot, lambda: [held])
        begin += count
    assert observer.queries.states.untyped_storage().nbytes() == ROWS * HEADS * GROUPS * 4 * DIM * 4
    scores = policy.scores(held, observer)
    for row, head in each_head():
        rows = torch.stack([weights_by_hand(queries, held, row, head, group)[-4:] for group in range(GROUPS)])
        expected = (rows.mean(0) * torch.tensor(votes)[:, None]).sum(0) / sum(votes)
        assert_scores(scores, expected, row, head)


def test_snapkv_weighs_a_short_window_by_the_queries_it_has(queries, held):
    policy = SnapKV(observation_window=32, window_weights="harmonic")
    observer = policy.new_observer()
    observer.see(Queries(queries.states[:, :, -2:], LENGTH - 2), held.first_slot, lambda: [held])
    scores = policy.scores(held, observer)
    for row, head in each_head():
        rows = torch.stack([weights_by_hand(queries, held, row, head, group)[-2:] for group in range(GROUPS)])
        assert_scores(scores, (rows[:, 0] + 2 * rows[:, 1]).mean(0) / 3, row, head)


def test_policies_of_keys_and_slots(held):
    norms, newest = KeyNorm().scores(held, None), StreamingLLM().scores(held, None)
    likeness = KeyDiff().scores(held, None)
    for row, head in each_head():
        keys = held.keys[row, head]
        assert_scores(norms, -keys.norm(dim=-1), row, head)
        assert_scores(newest, torch.arange(LENGTH).float(), row, head)
        real = keys[FIRST[row] :]
        anchor = (real / real.norm(dim=-1, keepdim=True)).mean(0)
        expected = -(keys @ anchor) / (keys.norm(dim=-1) * anchor.norm())
        assert_scores(likeness, expected, row, head)


def test_random_scores_are_the_tokens_own(held):
    policy = Random(seed=0, layer_idx=1)
    scores = policy.scores(held, None)
    later = held._replace(seen=LENGTH + 50)
    assert torch.equal(policy.scores(later, None), scores)
    assert not torch.equal(Random(seed=0, layer_idx=2).scores(held, None), scores)
    assert not torch.equal(scores[0, 0], scores[0, 1])


def test_lagkv_ranks_within_parts(held):
    lag, sinks = 8, 3
    scores = LagKV(lag_length=lag, num_sink_tokens=sinks).scores(held, None)
    row = 0  # no padding: the formula as in the paper
    for head in range(HEADS):
        for part in range(3):
            begin = sinks + part * lag
            total = 0
            for states in (held.keys[row, head], held.values[row, head]):
                own, following = states[begin : begin + lag], states[begin + lag : begin + 2 * lag]
                low, high = following.amin(0), following.amax(0)
                total = total + ((own - low) / (high - low)).std(dim=-1).softmax(dim=0)
            order = scores[row, head, begin : begin + lag].argsort(descending=True)
            assert torch.equal(order, total.argsort(descending=True))
            assert scores[row, head, begin : begin + lag].sort().values.tolist() == [i / lag for i in range(1, lag + 1)]
        assert (scores[row, head, sinks + 3 * lag :] == 2.0).all()


def test_leverage_is_of_the_unturned_keys_of_each_rows_own_tokens(tiny_model):
    model = tiny_model("llama", head_dim=DIM)
    rotary = find_rotary(model, model.model.layers[0].self_attn, "full_attention", refusal="")
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(ROWS, HEADS, LENGTH, DIM, generator=generator) + 1.5
    keys = rotary.turn(raw, torch.arange(LENGTH).expand(ROWS, -1) - torch.tensor(FIRST)[:, None])
    slots = torch.arange(LENGTH).expand(ROWS, HEADS, -1)
    held = Held(keys, keys, slots, slots, torch.tensor(FIRST), LENGTH, DIM**-0.5)
    scores = Leverage(rotary=rotary).scores(held, None)
    for row, head in each_head():
        real = raw[row, head, FIRST[row] :]
        real = real - real.mean(0)
        # The diagonal of the projection on the columns of the keys, by their singular vectors.
        expected = torch.linalg.svd(real, full_matrices=False)[0].square().sum(1)
        torch.testing.assert_close(scores[row, head, FIRST[row] :], expected, atol=5e-3, rtol=5e-3)


def test_blend_adds_scores_in_standard_deviations(queries, held):
    parts, weights = [KeyDiff(), H2O(average=False)], [1.0, 1.5]
    blend = Blend(parts, weights, num_sink_tokens=3)
    observer = blend.new_observer()
    observer.see(queries, held.first_slot, lambda: [held])
    scores = blend.scores(held, observer)
    for row, head in each_head():
        begin, total = FIRST[row], 0
        for part, weight, own in zip(parts, weights, observer.members, strict=True):
            own = part.scores(held, own)[row, head, begin:]
            own = own.log() if isinstance(part, H2O) else own
            total = total + weight * (own - own[3:].mean()) / own[3:].std(correction=0)
        torch.testing.assert_close(scores[row, head, begin:], total, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunks", [[200, 300], [200, 284, 16], [10] * 50], ids=["prompt", "short-last-chunk", "steps"])
def test_expected_attention_is_the_expectation_over_queries_to_come(chunks, tiny_model):
    """Against the formula, with moments of the queries before they were turned."""
    model = tiny_model("llama", head_dim=DIM)
    attention = model.model.layers[0].self_attn
    rotary = find_rotary(model, attention, "full_attention", refusal="")
    policy = ExpectedAttention(rotary=rotary, num_future_tokens=4, num_sink_tokens=2, epsilon=0.25)
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(DIM, DIM, generator=generator) * 0.3  # channels that depend on each other
    raw = torch.randn(1, 4, 500, DIM, generator=generator) @ mixed + 0.5
    keys, values = (torch.randn(1, 2, 20, DIM, generator=generator) for _ in range(2))
    slots = torch.arange(20).expand(1, 2, -1)
    held = Held(keys, values, slots, slots, torch.tensor([0]), 500, DIM**-0.5)
    observer = policy.new_observer()
    turned = rotary.turn(raw, torch.arange(500)[None])
    begin = 0
    for count in chunks:
        observer.see(Queries(turned[:, :, begin : begin + count], begin), held.first_slot, lambda: [held])
        begin += count
    mean, spread = observer.moments()
    torch.testing.assert_close(mean, raw[:, :, 2:].mean(2, keepdim=True), atol=1e-4, rtol=1e-3)
    sigmas = torch.stack([raw[0, h, 2:].T.cov(correction=0) for h in range(4)])
    if chunks[0] <= DIM:
        sigmas = torch.diag_embed(sigmas.diagonal(dim1=1, dim2=2))
        spread = torch.diag_embed(spread.squeeze(2))
        # What is remembered: a count, and a mean and a variance a channel.
        assert sum(tensor.numel() for tensor in observer.state().tensors.values()) == 1 + 2 * 4 * DIM
    torch.testing.assert_close(spread[0], sigmas, atol=1e-4, rtol=1e-3)
    # The formula, with the mean rotation of the four positions to come, written out for each head.
    turn = torch.stack([rotary.turn(torch.eye(DIM)[None, None], torch.full((1, DIM), 500 + f))[0, 0] for f in range(4)])
    turn = turn.mean(0)
    scores = policy.scores(held, observer)
    for head in range(2):
        total = 0
        for query_head in (2 * head, 2 * head + 1):
            mu = raw[0, query_head, 2:].mean(0) @ turn
            sigma = turn.T @ sigmas[query_head] @ turn
            logits = keys[0, head] @ mu / math.sqrt(DIM)
            logits = logits + torch.einsum("nd,de,ne->n", keys[0, head], sigma, keys[0, head]) / (2 * DIM)
            total = total + logits.softmax(-1) / 2
        expected = (total + 0.25) * values[0, head].norm(dim=-1)
        torch.testing.assert_close(scores[0, head], expected, atol=1e-4, rtol=1e-4)


def test_smoothing_is_a_mean_over_held_neighbours():
    scores = torch.tensor([[[0.0, 9.0, 1.0, 2.0, 3.0, 4.0]]])
    is_held = torch.tensor([[[False, True, True, True, True, True]]])
    smoothed = smooth(scores, is_held, 3)
    # The highest score is cut to itself: of six tokens, one is the highest 0.1%.
    assert smoothed[0, 0, 1:].tolist() == pytest.approx([5.0, 4.0, 2.0, 3.0, 3.5])
    assert smooth(scores, is_held, 3, pooling="max")[0, 0, 1:].tolist() == [9.0, 9.0, 3.0, 4.0, 4.0]
    assert smooth(scores, is_held, 1) is scores


def test_budgets_of_heads_and_layers():
    scores = torch.tensor([[[5.0, 4.0, 3.0, 2.0], [1.0, 0.5, 0.4, -torch.inf]]])
    budget = torch.tensor([2])
    assert best_of_each_head(scores, budget)[0].tolist() == [[True, True, False, False], [True, True, False, False]]
    assert best_of_each_head(scores, torch.tensor([9]))[0].sum().item() == 7
    assert best_of_all_heads(scores, budget, 0.0)[0].tolist() == [[True] * 4, [False] * 4]
    assert best_of_all_heads(scores, budget, 0.5)[0].tolist() == [
        [True, True, True, False],
        [True, False, False, False],
    ]
    low = torch.tensor([[[0.1, 0.2]]])
    kept = best_of_all_layers([scores, low], torch.tensor([[1], [2]]))
    assert kept[0][0].tolist() == [[True, True, True, True], [False] * 4]
    assert kept[1][0].tolist() == [[False, False]]


def test_pyramid_budgets_fall_around_the_mean():
    def budgets(mean: int, limit: int, minimum: int = 0) -> list[int]:
        layers = [PyramidKV(KeyNorm(), beta=20.0, layer=i, num_layers=5) for i in range(5)]
        return [p.layer_budget(torch.tensor([mean]), torch.tensor([limit]), minimum).item() for p in layers]

    assert budgets(100, 1000) == [195, 148, 100, 52, 5]
    assert budgets(100, 120) == [120, 110, 100, 90, 80]
    assert budgets(100, 1000, minimum=20) == [180, 140, 100, 60, 20]
    only = PyramidKV(KeyNorm(), beta=20.0, layer=0, num_layers=1)
    assert only.layer_budget(torch.tensor([7]), torch.tensor([50]), 0).item() == 7


def test_all_heads_keep_the_same_tokens_where_asked(tiny_model, run, make_ids):
    model, ids = tiny_model("llama"), make_ids(2, 80)
    for granularity, alike in (("layer", True), ("head", False)):
        cache = make_cache(model, "keydiff", budget=40, granularity=granularity)
        run(model, cache, ids)
        cache.compress()
        slots = [layer.held().slots for layer in cache.layers]
        assert all(torch.equal(s[:, 0], s[:, 1]) for s in slots) == alike


def test_weights_of_a_blend_are_those_given_or_lean_to_expected_attention(tiny_model):
    model = tiny_model("llama")
    policy = make_cache(model, "blend").layers[0].policy
    assert (list(map(type, policy.scorers)), policy.weights) == ([ExpectedAttention, KeyDiff, Leverage], [1.5, 1, 1])
    assert make_cache(model, "blend", weights=[0, 1, 2.5]).layers[0].policy.weights == [0, 1, 2.5]
    assert make_cache(model, "adakv", scorers=["h2o", "knorm"]).layers[0].policy.scorer.weights == [1, 1]
