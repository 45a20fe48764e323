"""A policy and an encoding together: what is kept is encoded once, and attention reads what it decodes to."""

import copy

import pytest
import torch

import hf_kvcache
from hf_kvcache import make_cache, measure
from hf_kvcache.codecs.by_head import HeadCodecs
from hf_kvcache.codecs.exact import ExactCodec
from hf_kvcache.eviction.compression import evicting_layers
from hf_kvcache.eviction.kept_tokens import KeptTokens

pytestmark = pytest.mark.core

LENGTH, NEW = 301, 180
CONFIG = {"head_dim": 32, "max_position_embeddings": 1024}
OPTIONS = {"budget": 190, "num_sink_tokens": 3, "num_recent_tokens": 5, "residual_length": 40, "block_size": 3}
EXACT = HeadCodecs(ExactCodec(), ExactCodec())
CLOSE = {"atol": 1e-4, "rtol": 0.0}
NAMES = {
    "keydiff+int4": {"q_group_size": 32},
    "adakv+int8": {"q_group_size": 16},
    "snapkv+turboquant": {},
    "h2o+fp8": {},
}


@pytest.fixture(params=[False, True], ids=["full", "padded"])
def batch(request, make_ids, left_pad):
    ids = make_ids(2, LENGTH + NEW)
    return left_pad(ids, [LENGTH + NEW - 44, LENGTH + NEW] if request.param else [LENGTH + NEW] * 2)


def compressed(name, model, run, ids, mask, **more):
    cache = make_cache(model, name, **OPTIONS, **NAMES.get(name, {}), **more)
    run(model, cache, ids[:, :LENGTH], mask)
    cache.compress(ids[:, :LENGTH])
    return cache


def decoded(cache):
    """The same cache, with everything encoded replaced by what it decodes to."""
    plain = copy.deepcopy(cache)
    for layer in evicting_layers(plain.layers):
        layer.codecs = None
        layer.kept.codecs = None
        stores = {name: _decode(layer, store) for name, store in layer.kept.stores.items()}
        layer.kept._hold(stores, layer.kept.rows)
    return plain


def _decode(layer, store):
    states, slots = store.padded(layer.kept.rows), store.padded_slots(layer.kept.rows)
    width = -slots.shape[-1] % ExactCodec.group_length
    states = [torch.nn.functional.pad(state, (0, 0, 0, width)) for state in states]
    slots = torch.nn.functional.pad(slots, (0, width), value=-1)
    return KeptTokens(layer.context.pool(layer.device), EXACT, states, slots)


@pytest.mark.parametrize("name", NAMES)
def test_attention_reads_what_the_groups_decode_to(name, batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama", **CONFIG), batch
    cache = compressed(name, model, run, ids, mask)
    assert "older" in evicting_layers(cache.layers)[0].kept.stores
    plain = decoded(cache)
    chunks = [1, 1, 5, 40, 1]
    end = LENGTH + sum(chunks)
    logits = run(model, cache, ids[:, LENGTH:end], mask, chunks=chunks)
    torch.testing.assert_close(logits, run(model, plain, ids[:, LENGTH:end], mask, chunks=chunks), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_newer_tokens_are_encoded_once_when_they_have_become_older(name, batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama", **CONFIG), batch
    cache = compressed(name, model, run, ids, mask)
    layer = evicting_layers(cache.layers)[0]
    before = [
        layer.kept.stores["older"].padded_slots(layer.kept.rows),
        *layer.kept.stores["older"].padded(layer.kept.rows),
    ]
    num_settled = 0
    for step in range(LENGTH, LENGTH + NEW):
        length = layer.table.length
        run(model, cache, ids[:, step : step + 1], mask)
        num_settled += layer.table.length < length
        assert layer.table.length < 40 + 128 + layer.codecs.group_length
    assert num_settled >= 1
    assert "newest" not in layer.kept.stores
    # All slots that were kept, and all since, in order; the old groups' tokens have not changed by a bit.
    slots = layer.slots()
    old, keys, values = before
    after = [
        layer.kept.stores["older"].padded_slots(layer.kept.rows),
        *layer.kept.stores["older"].padded(layer.kept.rows),
    ]
    for row in range(2):
        for head in range(2):
            kept = slots[row, head][slots[row, head] >= 0]
            assert torch.equal(kept, kept.sort().values)
            assert set(range(LENGTH, LENGTH + NEW)) <= set(kept.tolist())
            is_old = old[row, head] >= 0
            place = {slot: i for i, slot in enumerate(after[0][row, head].tolist())}
            index = [place[slot] for slot in old[row, head][is_old].tolist()]
            assert torch.equal(after[1][row, head, index], keys[row, head][is_old])
            assert torch.equal(after[2][row, head, index], values[row, head][is_old])
    sinks = layer.kept.stores["sinks"]
    assert sinks.is_exact
    assert (sinks.counts == 3).all()


def test_prompts_within_the_budget_are_encoded_too(batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama", **CONFIG), batch
    cache = make_cache(model, "keydiff+int8", **OPTIONS | {"budget": 900}, q_group_size=32)
    whole = make_cache(model, "blocks")
    logits, expected = (run(model, c, ids, mask, chunks=[LENGTH, *[1] * NEW]) for c in (cache, whole))
    layer = evicting_layers(cache.layers)[0]
    assert layer.table.length < 40 + 128 + 32
    assert not torch.equal(logits, expected)
    real = mask.bool()
    assert (logits - expected)[real].abs().max() < 0.05  # of logits that reach 0.7: eight bits, and nothing evicted


def test_encoded_memory_is_freed(make_ids, tiny_model, run):
    model, ids = tiny_model("llama", head_dim=64, max_position_embeddings=4096), make_ids(1, 3000)
    cache = make_cache(model, "keydiff+int4", keep_ratio=0.25)
    run(model, cache, ids)
    cache.compress()
    report = cache.report()
    # A quarter of the tokens: 128 newest ones and sinks exact, the others at 4.5 bits and a slot.
    exact, coded = 128 + 16, 750 - 128
    expected = 2 * 2 * (exact * 2 * 64 * 4 + coded * 2 * 64 * 4.5 / 8 + 750 * 4)
    assert report.stored_bytes <= 1.1 * expected
    assert report.reserved_bytes == measure(cache) < 0.11 * report.dynamic_bytes
    assert report.compression_ratio > 9


def test_beams_and_copies(batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama", **CONFIG), batch
    cache = compressed("adakv+int8", model, run, ids, mask)
    forked = cache.fork()
    index = torch.tensor([1, 0, 1])
    step = ids[:, LENGTH : LENGTH + 1]
    longer = mask[:, : LENGTH + 1]
    expected = run(model, copy.deepcopy(cache), step, longer)[index]
    forked.batch_select_indices(index)
    logits = run(model, forked, step[index], longer[index])
    torch.testing.assert_close(logits, expected, **CLOSE)
    for count in range(1, NEW):  # rows that share settle, each with its own newer tokens
        at = slice(LENGTH + count, LENGTH + count + 1)
        run(model, forked, ids[index][:, at], mask[index][:, : LENGTH + count + 1])
        run(model, cache, ids[:, at], mask[:, : LENGTH + count + 1]) if count > 1 else run(
            model, cache, ids[:, LENGTH : LENGTH + 2], mask[:, : LENGTH + 2]
        )
    last, both = torch.full((3, 1), 5), torch.full((2, 1), 5)
    grown = torch.cat([mask, torch.ones_like(both)], 1)
    torch.testing.assert_close(run(model, forked, last, grown[index]), run(model, cache, both, grown)[index], **CLOSE)


def test_generate_takes_compositions(tiny_model, make_ids):
    model, ids = tiny_model("gemma3", **CONFIG), make_ids(1, LENGTH)
    hf_kvcache.enable()
    out = model.generate(
        ids,
        max_new_tokens=20,
        do_sample=False,
        cache_implementation="snapkv+int8",
        cache_config={"budget": 190, "q_group_size": 32},
        return_dict_in_generate=True,
    )
    cache = out.past_key_values
    assert [type(layer).__name__ for layer in cache.layers] == ["SlidingBlockLayer", "EvictingLayer"]
    assert set(cache.layers[1].kept.stores) == {"sinks", "older", "newest"}


def test_bytes_are_of_the_stored_form(make_ids, tiny_model, run):
    """The same bytes hold more tokens where a token takes fewer."""
    model, ids = tiny_model("llama", head_dim=64, max_position_embeddings=4096), make_ids(1, 3000)
    kept = {}
    for name in ("keydiff", "keydiff+int4"):
        cache = make_cache(model, name, budget_bytes=400_000)
        run(model, cache, ids)
        cache.compress()
        kept[name] = cache.layers[0].stored_length
    assert kept["keydiff"] == 400_000 // (2 * 2 * 2 * 64 * 4)
    assert kept["keydiff+int4"] == 400_000 // (2 * 2 * 2 * 64 * 4.5 / 8)


def test_steps_and_settling_copy_nothing_of_what_is_kept(batch, tiny_model, run, monkeypatch):
    """Between evictions, no dense copy of kept tokens is made, and their slots are not joined, step after step."""
    model, (ids, mask) = tiny_model("llama", **CONFIG), batch
    cache = compressed("snapkv+int8", model, run, ids, mask, q_group_size=32)
    layer, joined = evicting_layers(cache.layers)[0], []
    slots = layer.slots
    monkeypatch.setattr(layer, "slots", lambda: joined.append(layer.seen) or slots())
    monkeypatch.setattr("hf_kvcache.eviction.kept.Kept.padded", lambda self: pytest.fail("kept tokens were copied"))
    run(model, cache, ids[:, LENGTH:], mask, chunks=[1] * NEW)
    assert len(set(joined)) == 1  # where newer tokens became older ones, once
