"""`compressed` with keep="selected" and fit="none": what stays, what is summarised, and attention to both."""

import math

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_kvcache
from hf_kvcache import make_cache
from hf_kvcache.compressed.summary_layer import SummaryLayer
from hf_kvcache.layers.sliding_layer import SlidingBlockLayer

pytestmark = pytest.mark.core

SMALL = {"keep": "selected", "fit": "none", "num_sink_tokens": 3, "num_recent_tokens": 5, "block_size": 4}
SMALL |= {"cluster_size": 4, "segment_length": 16, "keep_ratio": 0.25}
LENGTH = 91


def heads_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
    kinds = [SummaryLayer if name == "llama" else SlidingBlockLayer, SummaryLayer]
    assert [type(layer) for layer in cache.layers] == kinds
    assert cache.layers[-1].entries.length > 100
    real = mask > 0
    torch.testing.assert_close(got[real], expected[real], atol=1e-4, rtol=1e-4)


def closed(tiny_model, *, lengths=(86, 86), options=SMALL):
    """A layer of two rows with one segment and 5 newer tokens, the states that went in, and its first real slots."""
    model = tiny_model("llama")
    layer = make_cache(model, "compressed", **options).layers[0]
    states = [heads_of(seed, 2, 2, 91, 16) for seed in (0, 1)]
    layer.lazy_initialization(*states)
    layer.seen = 91
    first = torch.tensor([86 - length for length in lengths])
    mask = (torch.arange(91) >= first[:, None])[:, None, None]
    layer._store(states)
    layer.first.note(mask, 91)
    layer._summarise(mask)
    return model, layer, states, first


@pytest.mark.parametrize("lengths", [(86, 86), (86, 40)], ids=["whole", "padded"])
def test_entries_are_the_best_tokens_and_clusters_of_the_others(lengths, tiny_model):
    _, layer, (keys, values), first = closed(tiny_model, lengths=lengths)
    count = round(0.25 * 86)
    assert (layer.table.start, layer.table.length, layer.entries.length) == (86, 5, count + (86 - count) // 4)
    found_keys, found_values, sizes = layer.entries.materialize()
    torch.testing.assert_close(sizes[..., 0].exp().sum(-1), torch.tensor(lengths).float()[:, None].expand(2, 2))
    for row in range(2):
        real = torch.arange(first[row], 86)
        for head in range(2):
            kept = [torch.nonzero((keys[row, head] == key).all(-1)).item() for key in found_keys[row, head, :count]]
            assert kept == sorted(set(kept))
            assert set(range(int(first[row]), int(first[row]) + 3)) <= set(kept), "sinks stay"
            assert torch.equal(found_values[row, head, :count], values[row, head, kept])
            rest = sorted(set(real.tolist()) - set(kept))
            weight = sizes[row, head, count:, 0].exp()[:, None]
            for found, states in ((found_keys, keys), (found_values, values)):
                whole = (found[row, head, count:] * weight).sum(0)
                torch.testing.assert_close(whole, states[row, head, rest].sum(0), atol=1e-4, rtol=1e-4)
            directions = torch.nn.functional.normalize(keys[row, head, real], dim=1)
            mean = directions.mean(0)
            likeness = (directions @ mean / mean.norm())[3:]
            near = torch.stack([likeness[max(0, i - 6) : i + 7].mean() for i in range(len(likeness))])
            order = [int(slot) for slot in real[3:][near.argsort()]]
            assert set(kept) - set(real[:3].tolist()) == set(order[: count - 3])


@pytest.mark.parametrize("length", [1, 7], ids=["decode", "chunk"])
@pytest.mark.parametrize("lengths", [(86, 86), (86, 40)], ids=["whole", "padded"])
def test_attention_is_one_softmax_over_entries_and_newer_tokens(length, lengths, tiny_model):
    model, layer, (keys, values), first = closed(tiny_model, lengths=lengths)
    new = [heads_of(seed, 2, 2, length, 16) for seed in (5, 6)]
    layer._store(new)
    layer.seen += length
    query = heads_of(7, 2, 4, length, 16)
    slots = torch.arange(91 + length)
    mask = (slots <= torch.arange(91, 91 + length)[:, None]) & (slots >= first[:, None, None])
    module, settings = model.model.layers[0].self_attn, {"scaling": 0.3}
    got = layer._attend_selected(sdpa_attention_forward, module, query, mask[:, None], (), settings)[0]
    found = [plane.repeat_interleave(2, dim=1) for plane in layer.entries.materialize()]
    tail = [
        torch.cat([s[:, :, 86:], n], 2).repeat_interleave(2, dim=1) for s, n in zip((keys, values), new, strict=True)
    ]
    scores = 0.3 * query @ torch.cat([found[0], tail[0]], 2).transpose(2, 3)
    entries = found[2].transpose(2, 3).expand(-1, -1, length, -1)
    newer = torch.zeros(2, 1, length, 5 + length).masked_fill(~mask[:, None, :, 86:], -math.inf).expand(-1, 4, -1, -1)
    weights = (scores + torch.cat([entries, newer], -1)).softmax(-1)
    torch.testing.assert_close(got, (weights @ torch.cat([found[1], tail[1]], 2)).transpose(1, 2), atol=1e-5, rtol=1e-4)


def test_clusters_of_equal_tokens_are_exact(tiny_model):
    model = tiny_model("llama")
    layer = make_cache(model, "compressed", **(SMALL | {"cluster_size": 2, "num_sink_tokens": 0})).layers[0]
    which = torch.randint(5, (80,), generator=torch.Generator().manual_seed(0))
    states = [heads_of(seed, 1, 2, 5, 16)[:, :, which] for seed in (0, 1)]
    layer.fill(*states)
    assert layer.stored_length < 60
    query, module = heads_of(2, 1, 4, 1, 16), model.model.layers[0].self_attn
    got = layer._attend_selected(sdpa_attention_forward, module, query, None, (), {"scaling": 0.25})[0]
    expected = sdpa_attention_forward(module, query, *states, None, scaling=0.25)[0]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_memory_is_what_the_entries_take(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(2, 240)
    cache = make_cache(model, "compressed", **SMALL)
    run(model, cache, ids, chunks=[200, *[1] * 40])
    layer = cache.layers[0]
    assert layer.table.length < 5 + 16
    report = cache.report()
    assert report.stored_bytes < 0.5 * report.dynamic_bytes
    assert report.tokens_kept == layer.stored_length < 0.6 * 240
    # A value and a 32nd of a float for the size, for a quarter and a quarter of three quarters of the tokens.
    assert layer.marginal_bits == pytest.approx(32 * (1 + 1 / 32) * (0.25 + 0.75 / 4))


def test_only_newer_tokens_can_be_taken_back(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(1, LENGTH)
    cache = make_cache(model, "compressed", **SMALL)
    run(model, cache, ids)
    with pytest.raises(RuntimeError, match="cannot take back 6 tokens"):
        cache.crop(-6)
    more = make_ids(1, 3, seed=2)
    first = run(model, cache, more, chunks=[1] * 3)
    cache.crop(-2)
    torch.testing.assert_close(run(model, cache, more[:, 1:], chunks=[1, 1]), first[:, 1:])
    cache.activate_past_recording()
    before = cache.layers[0].entries.length
    run(model, cache, make_ids(1, 30, seed=1))
    assert cache.layers[0].entries.length == before
    cache.crop(-30)


def test_generate_and_beams(tiny_model, make_ids):
    model, ids = tiny_model("llama"), make_ids(2, 60)
    hf_kvcache.enable()
    options = {"max_new_tokens": 30, "do_sample": False}
    for more in ({}, {"num_beams": 3}):
        expected = model.generate(ids, **options, **more)
        config = SMALL | {"keep_ratio": 1.0}
        got = model.generate(ids, **options, **more, cache_implementation="compressed", cache_config=config)
        assert torch.equal(got, expected)


def test_a_share_is_needed(tiny_model):
    with pytest.raises(ValueError, match=r"keep='selected' keeps a share of the old tokens for good: give keep_ratio"):
        make_cache(tiny_model("llama"), "compressed", keep="selected")
    with pytest.raises(ValueError, match="keep='some' is not allowed"):
        make_cache(tiny_model("llama"), "compressed", keep="some")
