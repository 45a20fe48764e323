"""The choice of the decode kernel among many units is exact, whatever its sample of them says."""

import math

import numpy as np
import pytest
import torch

from hf_kvcache.codecs.packing import pack
from hf_kvcache.kernels import decode, native, structs
from hf_kvcache.kernels.choose import ChosenCall, Units, UnitSinks, chosen_segment
from hf_kvcache.readers import ReadBudget

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(native.library() is None, reason="no C++ compiler"),
]

HEADS, GROUP, DIM, RECENT = 2, 3, 16, 20
SAMPLE = 1024  # units, in select.h


def choose(keys, values, query, *, count, top_p=None, group="mean", mask=None):
    """A step over single tokens, of which the last ones are read anyway: its output, and which slots are chosen."""
    length = keys.shape[1] - RECENT
    blocks = np.arange(keys.shape[1])[None]
    recent = decode.run_segment((keys, values), blocks[:, length:], (DIM, DIM), 1, length=RECENT, slot=length)
    estimate = structs.Estimate(key=structs.run_store(keys, DIM, 1), per_slot=1)
    structs.set_ids(estimate, blocks)
    call = ChosenCall(
        [recent],
        chosen_segment((keys, values), (DIM, DIM), 1),
        estimate,
        Units(1, length, blocks, 1, count, top_p, group == "mean"),
        UnitSinks(None, 0, are_apart=False),
        rows=1,
        num_heads=HEADS * GROUP,
        keeps_scores=True,
    )
    output, slots = call.attend(query, None, mask)
    return output, [sorted(head[head >= 0].tolist()) for head in slots[0]]


def expected(keys, query, *, count, top_p=None, group="mean", mask=None):
    """The same choice in PyTorch."""
    scores = query.view(1, HEADS, GROUP, DIM) @ keys[None].transpose(2, 3) * DIM**-0.5
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    read = scores[..., -RECENT:].logsumexp(dim=-1)
    budget = ReadBudget(None if top_p else count, None, top_p, 0, RECENT, group)
    chosen, is_read = budget.choose(scores[..., :-RECENT].contiguous(), read, count)
    return [sorted(units[taken].tolist()) for units, taken in zip(chosen[0], is_read[0], strict=True)]


def states(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(HEADS, length, DIM, generator=generator) for _ in range(2)], torch.randn(
        1, HEADS * GROUP, 1, DIM, generator=generator
    )


@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("length", "count"), [(2000, 100), (2100, 1), (10_003, 900), (10_003, 9_000), (33_000, 1000)])
def test_the_largest_shares_are_chosen(length, count, threads, group):
    (keys, values), query = states(length)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output, slots = choose(keys, values, query, count=count, group=group)
    finally:
        torch.set_num_threads(before)
    assert slots == expected(keys, query, count=count, group=group)
    for head, chosen in enumerate(slots):
        own = [*chosen, *range(length - RECENT, length)]
        part = query.view(HEADS, GROUP, DIM)[head] @ keys[head, own].T * DIM**-0.5
        attended = part.softmax(dim=-1) @ values[head, own]
        torch.testing.assert_close(output.view(HEADS, GROUP, DIM)[head], attended, rtol=1e-4, atol=1e-5)


def test_a_sample_of_nothing_but_the_largest_misleads_no_choice():
    (keys, values), query = states(40_000 + RECENT)
    places = torch.arange(SAMPLE) * 40_000 // SAMPLE
    keys[:, places] = query.view(HEADS, GROUP, DIM).mean(dim=1, keepdim=True) * 3
    keys[:, places] += torch.randn(HEADS, SAMPLE, DIM, generator=torch.Generator().manual_seed(1)) / 10
    _, slots = choose(keys, values, query, count=2000)
    assert slots == expected(keys, query, count=2000)
    assert all(set(places.tolist()) <= set(chosen) for chosen in slots)


@pytest.mark.parametrize("length", [1000, 10_000])
def test_of_equal_shares_the_first_are_chosen(length):
    (keys, values), query = states(length + RECENT)
    keys[:, 1:] = keys[:, :1]
    _, slots = choose(keys, values, query, count=300)
    assert slots == [list(range(300))] * HEADS


@pytest.mark.parametrize("seen", [0, 50, 6000])
def test_what_a_mask_hides_is_not_chosen(seen):
    (keys, values), query = states(10_000 + RECENT)
    mask = torch.ones(1, 1, 1, 10_000 + RECENT, dtype=torch.bool)
    mask[..., : 10_000 - seen] = False
    _, slots = choose(keys, values, query, count=400, mask=mask)
    assert slots == expected(keys, query, count=400, mask=mask)
    assert all(len(chosen) == min(seen, 400) for chosen in slots)


def test_shares_of_nothing_are_chosen_where_there_is_room():
    """Scores so far below the others that their exponentials are 0 are still tokens that can be read."""
    (keys, values), query = states(3000 + RECENT)
    keys[:, -RECENT:] = 500 * query.view(HEADS, GROUP, DIM)[:, :1]
    _, slots = choose(keys, values, query[:, [0, 0, 0, 3, 3, 3]], count=200)
    assert all(len(chosen) == 200 for chosen in slots)


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_shares_are_chosen_until_they_reach_their_part(top_p):
    (keys, values), query = states(10_003)
    _, slots = choose(keys, values, query, count=10_003 - RECENT, top_p=top_p)
    for chosen, wanted in zip(slots, expected(keys, query, count=10_003 - RECENT, top_p=top_p), strict=True):
        assert len(set(chosen) ^ set(wanted)) <= 1  # sums of other order may need one more


@pytest.mark.parametrize(("bits", "dim"), [(2, 16), (2, 64), (2, 128), (2, 256), (4, 16), (4, 48), (4, 128), (4, 512)])
def test_codes_of_any_width_are_multiplied_as_bytes(bits, dim):
    """Against the same rows decoded: also those wider than a vector, and those that fill no lanes."""
    generator = torch.Generator().manual_seed(dim + bits)
    length, heads = 3000 + RECENT, 2
    codes = torch.randint(0, 2**bits, (heads, length, dim), generator=generator, dtype=torch.uint8)
    scale = torch.rand(heads, length, 1, generator=generator).half()
    rows = (codes.float() - (2**bits - 1) / 2) * scale.float()
    query = torch.randint(-127, 128, (1, heads * GROUP, 1, dim), generator=generator).float()
    query[..., 0] = 127  # so that rounding changes nothing
    packed, blocks = pack(codes, bits), np.arange(length)[None]
    estimate = structs.Estimate(key=structs.index_store(packed, scale, dim, bits, 1), per_slot=1, rounds=True)
    structs.set_ids(estimate, blocks)
    values = torch.zeros(heads, length, 16)
    recent = decode.run_segment((rows, values), blocks[:, -RECENT:], (dim, 16), 1, length=RECENT, slot=length - RECENT)
    call = ChosenCall(
        [recent],
        chosen_segment((rows, values), (dim, 16), 1),
        estimate,
        Units(1, length - RECENT, blocks, 1, 100, None, True),
        UnitSinks(None, 0, are_apart=False),
        rows=1,
        num_heads=heads * GROUP,
    )
    scaling = 1 / (127 * dim**0.5)
    scores = query.view(1, heads, GROUP, dim) @ rows.mT * scaling
    wanted, _ = ReadBudget(100, None, None, 0, RECENT, "mean").choose(
        scores[..., :-RECENT].contiguous(), scores[..., -RECENT:].logsumexp(dim=-1), 100
    )
    _, slots = call.attend(query, scaling, None)
    for own, others in zip(slots[0], wanted[0], strict=True):
        assert len(set(own.tolist()) ^ set(others.tolist())) <= 2  # of nearly equal ones
