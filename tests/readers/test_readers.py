"""Readers: estimates against exact scores, and the choice that a budget makes of them."""

import pytest
import torch

from hf_kvcache.readers import ReadBudget, build_reader

pytestmark = pytest.mark.core

SIZE = 8
OPTIONS = {"block_size": SIZE, "spread": 1.0, "num_channels": 5, "unread": 0.5}


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def estimate(name: str, query: torch.Tensor, keys: torch.Tensor, *, is_token=None, **options) -> torch.Tensor:
    """Scores `[B, H, G, units]` of `query` `[B, H, G, D]` for keys `[B, H, T, D]`, by way of stored planes."""
    reader = build_reader(name, OPTIONS | options)
    if reader.reads_keys:
        return reader.scores(query, [keys], [])
    rows, heads, length, dim = keys.shape
    is_token = torch.ones(rows, length, dtype=torch.bool) if is_token is None else is_token
    fitted = reader.fit(keys, is_token)
    planes = reader.planes(heads, dim, keys.dtype)
    summaries = reader.summarise(keys, fitted)
    for plane, summary in zip(planes, summaries, strict=True):
        assert (plane.num_heads, plane.dim, plane.dtype) == (heads, summary.shape[3], summary.dtype)
        assert summary.shape[:3] == (rows, heads, length // SIZE)
    assert rows * reader.read_bytes(planes, length // SIZE) == sum(summary.nbytes for summary in summaries)
    return reader.scores(query, summaries, fitted)


def exact(query, keys):
    return query @ keys.transpose(2, 3)


def rounded_bounds(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest and smallest value of each channel of blocks, in 15 steps around the mean key, and half a step."""
    blocks, mean = keys.unflatten(2, (-1, SIZE)), keys.mean(2, keepdim=True)
    bounds = torch.stack([blocks.amax(3) - mean, blocks.amin(3) - mean])
    half = bounds.abs().amax((0, -1), keepdim=True) / 15
    levels = ((bounds / half - 1) / 2).round().clamp(-8, 7) * 2 + 1
    return *(levels * half + mean), half.squeeze(0)


@pytest.mark.parametrize("dim", [2, 16, 18, 64])
def test_quest_bounds_every_score_of_a_block_but_for_the_rounding(dim):
    offset = 5 * random(2, 2, 3, 1, dim)  # a mean far from zero costs nothing
    query, keys = random(0, 2, 3, 2, dim), random(1, 2, 3, 400, dim) + offset
    bounds, size = estimate("quest", query, keys), query.abs().sum(-1, keepdim=True)
    largest, smallest, half = rounded_bounds(keys)
    exactly = query.clamp(min=0) @ largest.transpose(2, 3) + query.clamp(max=0) @ smallest.transpose(2, 3)
    # Queries have 8 bits, scales 11; a code at the edge of two steps may be the other one.
    noise = 0.02 * (size * half.transpose(2, 3))
    close = (bounds - exactly).abs() <= 0.05 * half.transpose(2, 3) * size + 0.01 * bounds.std()
    assert close.float().mean() > 0.97
    slack = half.transpose(2, 3) * size
    assert (bounds >= exact(query, keys).unflatten(3, (-1, SIZE)).amax(-1) - 1.05 * slack - noise).all()


def test_quest_reaches_from_the_middle_to_the_bounds_as_far_as_its_spread():
    query, keys = random(0, 2, 3, 2, 16), random(1, 2, 3, 400, 16)
    bounds, middle, between = (estimate("quest", query, keys, spread=spread) for spread in (1.0, 0.0, 0.25))
    blocks = keys.unflatten(2, (-1, SIZE))
    wanted = exact(query, (blocks.amax(3) + blocks.amin(3)) / 2)
    assert (middle - wanted).square().mean() < 0.03 * wanted.square().mean()
    torch.testing.assert_close(between, 0.25 * bounds + 0.75 * middle, atol=0.1, rtol=0.0)  # each rounds its query


def test_page_means_of_equal_keys_have_their_mass():
    query, keys = random(0, 2, 3, 2, 16), random(1, 2, 3, 5, 16).half().float().repeat_interleave(SIZE, dim=2)
    mass = exact(query, keys).unflatten(3, (-1, SIZE)).logsumexp(-1)
    torch.testing.assert_close(estimate("page_mean", query, keys), mass)


@pytest.mark.parametrize("name", ["topk", "sparq", "double_sparsity"])
def test_all_channels_give_exact_scores(name):
    query, keys = random(0, 2, 3, 2, 16), random(1, 2, 3, 40, 16)
    torch.testing.assert_close(estimate(name, query, keys, num_channels=16), exact(query, keys))


def test_sparq_takes_the_largest_channels_of_the_query():
    query, keys = random(0, 1, 1, 1, 16), random(1, 1, 1, 40, 16)
    largest = query[0, 0, 0].abs().topk(5).indices
    share = query[0, 0, 0, largest].abs().sum() / query.abs().sum()
    wanted = keys[0, 0, :, largest] @ query[0, 0, 0, largest] / share.sqrt()
    torch.testing.assert_close(estimate("sparq", query, keys)[0, 0, 0], wanted)


def test_double_sparsity_takes_the_largest_channels_of_the_keys():
    query, keys = random(0, 2, 1, 1, 16), random(1, 2, 1, 40, 16)
    keys[0, :, :, [3, 4, 5, 9, 15]] *= 9
    keys[1, :, 16:, [0, 1, 2, 8, 11]] *= 9
    keys[1, :, :16] *= 100  # padding
    is_token = torch.arange(40) >= torch.tensor([[0], [16]])
    scores = estimate("double_sparsity", query, keys, is_token=is_token)
    for row, chosen in enumerate(([3, 4, 5, 9, 15], [0, 1, 2, 8, 11])):
        torch.testing.assert_close(scores[row, 0, 0], keys[row, 0, :, chosen] @ query[row, 0, 0, chosen])


@pytest.mark.parametrize("dim", [16, 18, 64])
def test_the_index_stands_for_two_bits_of_each_channel(dim):
    offset = 5 * random(2, 2, 3, 1, dim)  # a mean far from zero costs nothing
    query, keys = random(0, 2, 3, 2, dim), random(1, 2, 3, 400, dim) + offset
    scores, wanted = estimate("index", query, keys), exact(query, keys)
    error = (scores - wanted).square().mean((0, 1, 3)) / wanted.sub(wanted.mean(3, keepdim=True)).square().mean(
        (0, 1, 3)
    )
    # Two bits of a normal distribution leave 0.119 of its variance (Max 1960).
    assert (error < 0.15).all()
    assert (error > 0.05).all()


@pytest.mark.parametrize("name", ["index", "quest"])
def test_padding_is_left_out_of_the_mean_key(name):
    query, keys = random(0, 1, 1, 1, 16), random(1, 1, 1, 160, 16)
    keys[:, :, :80] += 50
    is_token = torch.arange(160)[None] >= 80
    wanted = exact(query, keys)
    if name == "quest":  # the paper's bounds
        blocks = keys.unflatten(2, (-1, SIZE))
        wanted = query.clamp(min=0) @ blocks.amax(3).mT + query.clamp(max=0) @ blocks.amin(3).mT
    error = [
        (estimate(name, query, keys, is_token=mask) - wanted)[..., wanted.shape[3] // 2 :].square().mean()
        for mask in (is_token, torch.ones_like(is_token))
    ]
    assert error[0] < 0.05 * error[1]


# --- budgets


def budget(**given) -> ReadBudget:
    defaults = {"budget": None, "keep_ratio": None, "top_p": None, "group": "mean"}
    return ReadBudget(**(defaults | {"num_sink_tokens": 4, "num_recent_tokens": 6} | given))


def test_units_of_a_budget():
    assert budget(budget=50).num_units(1000, 1) == 40
    assert budget(budget=50).num_units(1000, 16) == 2
    assert budget(budget=50).num_units(32, 1) == 32
    assert budget(keep_ratio=0.125).num_units(1488, 16) == 12
    assert budget(keep_ratio=0.01).num_units(48, 16) == 1
    options = {"budget": None, "keep_ratio": None, "top_p": None, "group": "max", "other": 3}
    assert ReadBudget.of(options | {"num_sink_tokens": 4, "num_recent_tokens": 32}).budget == 1024


@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("top_p", [None, 0.6])
def test_the_largest_masses_are_chosen(group, top_p):
    """Against the same rule, a head at a time."""
    scores, read = 3 * random(0, 2, 3, 2, 20), random(1, 2, 3, 2)
    scores[:, :, :, 4:9] = -torch.inf
    amount = {"keep_ratio": 0.2} if top_p is None else {"top_p": top_p}
    units, is_read = budget(group=group, **amount).choose(scores, read, 17)
    assert units.shape[2] == 17 if top_p is None else units.shape[2] < 17
    for row in range(2):
        for head in range(3):
            every = torch.cat([scores[row, head], read[row, head, :, None]], dim=1).softmax(1)
            share = every.mean(0) if group == "mean" else every.amax(0)
            chosen, reached = [], float(share[20])
            for unit in share[:20].argsort(descending=True).tolist():
                if share[unit] > 0 and (top_p is None or reached < top_p * float(share.sum())):
                    chosen.append(unit)
                    reached += float(share[unit])
            assert sorted(units[row, head, is_read[row, head]].tolist()) == sorted(chosen)


def test_clusters_are_chosen_by_their_mass_a_token_while_their_tokens_fit():
    scores, read = random(0, 1, 1, 2, 6), torch.zeros(1, 1, 2)
    sizes = torch.tensor([[[5, 1, 9, 3, 2, 4]]])
    share = torch.cat([scores[0, 0], read[0, 0, :, None]], dim=1).softmax(1).mean(0)[:6]
    order, is_chosen, total = budget(keep_ratio=0.5).choose_sized(scores, read, sizes, 24, torch.zeros_like(scores))
    assert total == 12
    assert order[0, 0].tolist() == (share / sizes[0, 0]).argsort(descending=True).tolist()
    assert order[0, 0].tolist() != share.argsort(descending=True).tolist()
    ends = sizes[0, 0, order[0, 0]].cumsum(0)
    assert is_chosen[0, 0].tolist() == (ends <= 12).tolist()


def test_top_p_reads_a_small_cluster_before_a_large_one_of_the_same_mass():
    masses, sizes = torch.tensor([0.4, 0.4, 0.1, 0.0]), torch.tensor([[[8, 2, 1, 0]]])
    given = masses.log()[None, None, None], torch.tensor([[[0.1]]]).log(), sizes, 11
    order, is_chosen, total = budget(top_p=0.8).choose_sized(*given, torch.zeros(1, 1, 1, 4))
    assert order[0, 0, :3].tolist() == [1, 2, 0]
    assert is_chosen[0, 0].tolist() == [True, True, True, False]
    assert total == 11
    again = budget(top_p=0.55).choose_sized(*given, torch.zeros(1, 1, 1, 4))
    assert again[1][0, 0].tolist() == [True, True, False, False]
    assert again[2] == 3
    # What a cluster may reach moves it forward; what it is estimated to have decides how far to read.
    order, is_chosen, total = budget(top_p=0.45).choose_sized(*given, torch.tensor([[[[0.0, 0.0, 3.0, 0.0]]]]))
    assert order[0, 0, :3].tolist() == [2, 1, 0]
    assert is_chosen[0, 0].tolist() == [True, True, False, False]
