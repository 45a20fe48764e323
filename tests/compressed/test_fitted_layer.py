"""`compressed` with keep="selected": budgets of heads and layers, and fitted tokens in `generate()`."""

import copy

import pytest
import torch
from transformers import DynamicCache

import hf_kvcache
from hf_kvcache import make_cache
from hf_kvcache.compressed.fitted_layer import FittedLayer
from hf_kvcache.layers.sliding_layer import SlidingBlockLayer
from hf_kvcache.policies.attention_matching import References
from hf_kvcache.policies.base import Queries
from hf_kvcache.rotary import find_rotary

pytestmark = pytest.mark.core

SMALL = {"keep": "selected", "keep_ratio": 0.25, "num_sink_tokens": 3, "num_recent_tokens": 5, "block_size": 4}
LENGTH = 91


def kept_counts(cache):
    """Tokens kept of older ones, of each layer, row and head: `[layers, B, H]`."""
    return torch.stack([torch.from_numpy(layer.kept.stores["older"].counts) for layer in cache.layers])


def compressed(model, ids, run, mask=None, **more):
    cache = make_cache(model, "compressed", **(SMALL | more))
    run(model, cache, ids, mask)
    cache.compress(ids)
    return cache


def divergence(model, cache, full, ids, run):
    got, expected = (run(model, c, ids).log_softmax(-1) for c in (cache, full))
    return (expected.exp() * (expected - got)).sum(-1).mean()


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), ("llama", "eager"), ("gemma3", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")],
)
def test_with_every_token_kept_it_is_full_attention(name, attention, is_padded, tiny_model, make_ids, left_pad, run):
    model = tiny_model(name)
    model.set_attn_implementation(attention)
    ids, mask = left_pad(make_ids(3, LENGTH + 80), [LENGTH + 80, 150, 90] if is_padded else [10**6] * 3)
    cache, full = make_cache(model, "compressed", **(SMALL | {"keep_ratio": 1.0})), DynamicCache(config=model.config)
    chunks = [60, 1, 30, *[1] * 20, 40, *[1] * 20]
    got, expected = (run(model, c, ids, mask, chunks=chunks) for c in (cache, full))
    assert [type(layer) for layer in cache.layers] == [
        FittedLayer if name == "llama" else SlidingBlockLayer,
        FittedLayer,
    ]
    real = mask > 0
    torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fit", ["queries", "reading"])
@pytest.mark.parametrize("lengths", [(LENGTH, LENGTH), (LENGTH, 50)], ids=["whole", "padded"])
def test_heads_of_all_layers_share_one_budget(fit, lengths, tiny_model, make_ids, left_pad, run):
    model = tiny_model("llama")
    ids, mask = left_pad(make_ids(2, LENGTH), lengths)
    cache = compressed(model, ids, run, mask, fit=fit)
    counts = kept_counts(cache)
    assert counts.unique().numel() > 1, "some heads keep more"
    for row, length in enumerate(lengths):
        older = -(-(length - 8) // 4)  # a quarter, rounded up, and 3 sinks; 5 recent tokens are in the table
        assert counts[:, row].sum() == counts[:, row].numel() * (3 + older)
    assert all(layer.table.length == 5 for layer in cache.layers)


@pytest.mark.parametrize("fit", ["queries", "reading"])
def test_rows_are_judged_alone(fit, tiny_model, make_ids, left_pad, run):
    model = tiny_model("llama")
    ids, mask = left_pad(make_ids(2, LENGTH), [LENGTH, 60])
    both = compressed(model, ids, run, mask, fit=fit)
    alone = compressed(model, ids[1:, LENGTH - 60 :], run, fit=fit)
    more = make_ids(2, 3, seed=5)
    mask = torch.cat([mask, mask.new_ones(2, 3)], dim=1)
    got, expected = run(model, both, more, mask)[1:], run(model, alone, more[1:])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_fitted_tokens_are_far_nearer_to_the_full_cache_than_the_same_tokens(tiny_model, make_ids, run, monkeypatch):
    model, ids = tiny_model("llama"), make_ids(4, 420)
    full = DynamicCache(config=model.config)
    run(model, full, ids[:, :400])
    errors = []
    for _ in range(2):
        cache = compressed(model, ids[:, :400], run)
        errors.append(divergence(model, cache, copy.deepcopy(full), ids[:, 400:], run))
        monkeypatch.setattr(
            "hf_kvcache.compressed.fitted_layer.match_attention", lambda q, k, v, old, kept, s: (k[kept], v[kept])
        )
    assert errors[0] < 0.5 * errors[1]


def test_sinks_and_newest_tokens_are_exact(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(2, LENGTH)
    cache, full = compressed(model, ids, run), DynamicCache(config=model.config)
    run(model, full, ids)
    for layer, exact in zip(cache.layers, full.layers, strict=True):
        held = layer.held()
        for name in ("keys", "values"):
            ours, theirs = getattr(held, name), getattr(exact, name)
            assert torch.equal(ours[:, :, :3], theirs[:, :, :3])
            assert torch.equal(ours[:, :, -5:], theirs[:, :, -5:])
            assert not torch.equal(
                ours[:, :, 3:6], theirs.gather(2, held.slots[:, :, 3:6, None].clamp(0).expand_as(ours[:, :, 3:6]))
            )


def test_only_newer_tokens_can_be_taken_back(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(1, LENGTH)
    cache = compressed(model, ids, run)
    with pytest.raises(RuntimeError, match="cannot take back 6 tokens"):
        cache.crop(-6)
    more = make_ids(1, 3, seed=2)
    first = run(model, cache, more, chunks=[1] * 3)
    cache.crop(-2)
    torch.testing.assert_close(run(model, cache, more[:, 1:], chunks=[1, 1]), first[:, 1:])


def test_forks_and_beams_share_what_is_fitted(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(2, LENGTH)
    cache = compressed(model, ids, run)
    more = make_ids(2, 30, seed=3)
    fork = cache.fork()
    expected = run(model, cache, more, chunks=[1] * 30)
    torch.testing.assert_close(run(model, fork.fork(), more, chunks=[1] * 30), expected)
    fork.reorder_cache(torch.tensor([1, 0]))
    swapped = run(model, fork, more[[1, 0]], chunks=[1] * 30)
    torch.testing.assert_close(swapped, expected[[1, 0]], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fit", ["queries", "reading"])
def test_generate_with_turns_beams_and_padding(fit, tiny_model, make_ids, left_pad):
    model = tiny_model("llama")
    ids, mask = left_pad(make_ids(2, 120), [120, 90])
    hf_kvcache.enable()
    options = {"max_new_tokens": 30, "do_sample": False, "cache_implementation": "compressed"}
    for more in ({}, {"num_beams": 2}, {"prefill_chunk_size": 32}):
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, **more)
        config = SMALL | {"fit": fit, "keep_ratio": 1.0}
        assert torch.equal(model.generate(ids, attention_mask=mask, cache_config=config, **options, **more), expected)
        config["keep_ratio"] = 0.3
        assert model.generate(ids, attention_mask=mask, cache_config=config, **options, **more).shape == expected.shape


def test_a_second_turn_is_compressed_too(tiny_model, make_ids):
    model, ids = tiny_model("llama"), make_ids(1, 120)
    cache = make_cache(model, "compressed", **SMALL)
    given = {hf_kvcache.CACHE_ARG: cache, "max_new_tokens": 3, "do_sample": False}
    turn = model.generate(ids, **given)
    assert cache.layers[0].table.length < 16
    turn = model.generate(torch.cat([turn, make_ids(1, 100, seed=4)], dim=1), **given)
    assert cache.layers[0].table.length < 16
    stored = torch.tensor([layer.stored_length for layer in cache.layers]).mean()
    assert stored < 0.25 * turn.shape[1] + 16


# --- reference queries


def references(model, most, monkeypatch):
    monkeypatch.setattr("hf_kvcache.policies.attention_matching.MOST_QUERIES", most)
    attention = model.model.layers[0].self_attn
    return References(find_rotary(model, attention, "full_attention", refusal="{reason}"), 2)


@pytest.mark.parametrize("chunks", [[90], [40, 50], [30, *[1] * 60]], ids=["whole", "parts", "steps"])
def test_a_sample_of_all_queries_is_remembered(chunks, tiny_model, monkeypatch):
    observer = references(tiny_model("llama"), 32, monkeypatch)
    states = torch.randn(2, 4, 90, 16, generator=torch.Generator().manual_seed(0))
    begin, first = 0, torch.tensor([0, 20])
    for count in chunks:
        observer.see(Queries(states[:, :, begin : begin + count], begin), first, lambda: None)
        begin += count
    assert observer.slots.tolist() == list(range(0, 90, 4))
    positions = (observer.slots - first[:, None]).clamp(min=0)
    torch.testing.assert_close(
        observer.rotary.turn(observer.states, positions), states[:, :, ::4], atol=1e-4, rtol=1e-4
    )
    observer.forget(30)
    assert observer.slots.tolist() == list(range(0, 60, 4))
    assert observer.states.shape[2] == 15


def test_queries_of_the_second_reading_count_too(tiny_model, make_ids, left_pad, run, monkeypatch):
    monkeypatch.setattr("hf_kvcache.policies.attention_matching._QUERIES_READ", 10)
    counts = []

    def match(queries, keys, values, is_replaced, is_kept, scaling):
        counts.append(len(queries))
        return keys[is_kept], values[is_kept]

    monkeypatch.setattr("hf_kvcache.compressed.fitted_layer.match_attention", match)
    ids, mask = left_pad(make_ids(2, LENGTH), [LENGTH, 51])
    cache = compressed(tiny_model("llama"), ids, run, mask, fit="reading")
    # Two query heads of all tokens that are no sinks, and of every tenth that is read again: slots 0, 10, ..., 80, as
    # the newest five are not.
    assert counts == [2 * (LENGTH - 3 + 9)] * 2 + [2 * (51 - 3 + 5)] * 2 + counts[:4]
    assert cache.layers[0]._log.observer.read is None


# --- what is refused


def test_a_share_is_needed(tiny_model):
    with pytest.raises(ValueError, match=r"keep='selected' keeps a share of the old tokens for good: give keep_ratio"):
        make_cache(tiny_model("llama"), "compressed", keep="selected")
    with pytest.raises(ValueError, match="fit='best' is not allowed"):
        make_cache(tiny_model("llama"), "compressed", keep="selected", keep_ratio=0.2, fit="best")


def test_a_model_whose_queries_cannot_be_turned_gets_clusters(tiny_model):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = tiny_model("llama", rope_parameters=scaling)
    with pytest.raises(NotImplementedError, match=r"cannot turn this model's queries.*fit='none'"):
        make_cache(model, "compressed", **SMALL)
    make_cache(model, "compressed", **SMALL, fit="none")


def test_a_second_reading_needs_the_ids(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(1, LENGTH)
    cache = make_cache(model, "compressed", **SMALL, fit="reading")
    run(model, cache, ids)
    with pytest.raises(ValueError, match="reads the prompt a second time"):
        cache.compress()


def test_tokens_cannot_be_drafted(tiny_model, make_ids):
    model = tiny_model("llama")
    hf_kvcache.enable()
    named = {"cache_implementation": "compressed", "cache_config": SMALL}
    with pytest.raises(NotImplementedError, match="and 'compressed', run the prompt"):
        model.generate(make_ids(1, 40), prompt_lookup_num_tokens=3, max_new_tokens=4, **named)
