"""Merging: evicted tokens that count in kept ones, against full attention with values and scores changed by hand."""

import math

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import hf_kvcache
from hf_kvcache import CACHE_ARG, make_cache
from hf_kvcache.blocks import BlockPool
from hf_kvcache.eviction.compression import evicting_layers
from hf_kvcache.eviction.kept import Kept
from hf_kvcache.policies.base import Held, Queries
from hf_kvcache.policies.merging import merge_evicted
from hf_kvcache.policies.reconstruction import Reconstruction

pytestmark = pytest.mark.core

LENGTH, NEW = 61, 40
OPTIONS = {"budget": 24, "num_sink_tokens": 2, "num_recent_tokens": 3, "block_size": 3, "merge": 0.2}


def merge_by_hand(keys, values, mass, kept, targets, gone, similarity):
    """One head: values `[n, D]` and log mass `[n]` after each of `gone` has joined its nearest target."""
    total, weighed = mass.clone(), values * mass[:, None]
    for token in gone:
        cosines = [torch.cosine_similarity(keys[token], keys[target], dim=0).item() for target in targets]
        if cosines and max(cosines) >= similarity:
            target = targets[int(np.argmax(cosines))]
            total[target] += mass[token]
            weighed[target] += values[token] * mass[token]
    return torch.where((total > mass)[:, None], weighed / total[:, None], values), total.log()


@pytest.fixture
def held():
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 3, 30, 8, generator=generator) for _ in range(2))
    slots = torch.arange(30).expand(2, 3, -1)
    log_mass = torch.rand(2, 3, 30, generator=generator)
    return Held(keys, values, slots, slots, torch.tensor([0, 7]), 30, 8**-0.5, log_mass)


@pytest.mark.parametrize("similarity", [-1.0, 0.3])
def test_what_goes_joins_the_nearest_target(held, similarity, monkeypatch):
    monkeypatch.setattr("hf_kvcache.policies.merging._TOKENS_AT_A_TIME", 7)
    keep = torch.rand(2, 3, 30, generator=torch.Generator().manual_seed(1)) < 0.4
    keep &= held.is_held
    targets = keep & ~held.are_sinks(4)
    merged = merge_evicted(held, keep, targets, similarity)
    for row in range(2):
        for head in range(3):
            gone = (held.is_held & ~keep)[row, head].nonzero()[:, 0].tolist()
            where = targets[row, head].nonzero()[:, 0].tolist()
            state = (held.keys[row, head], held.values[row, head], held.log_mass[row, head].exp())
            values, mass = merge_by_hand(*state, None, where, gone, similarity)
            own = keep[row, head]
            torch.testing.assert_close(merged.values[row, head, own], values[own])
            torch.testing.assert_close(merged.log_mass[row, head, own], mass[own])
            if similarity == -1.0:  # everything counts somewhere
                everything = held.log_mass[row, head][held.is_held[row, head]].exp().sum()
                torch.testing.assert_close(merged.log_mass[row, head, own].exp().sum(), everything)
    assert merged.keys is held.keys


@pytest.mark.parametrize("is_even", [True, False], ids=["even", "uneven"])
def test_merging_equal_tokens_is_exact(is_even):
    """Attention to one of each equal tokens, with its mass, is attention to all of them."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 3, 20, 16, generator=generator).repeat(1, 1, 3, 1) for _ in range(2))
    slots = torch.arange(60).expand(2, 3, -1)
    held = Held(keys, values, slots, slots, torch.tensor([0, 0]), 60, 16**-0.5)
    keep = (slots < 20).clone()
    if not is_even:
        keep[0, 1] = slots[0, 1] < 40
    kept = Kept(None, 0)
    pool = BlockPool(torch.device("cpu"))
    kept.replace(pool, merge_evicted(held, keep, keep, 0.99), keep, 60)
    query = torch.randn(2, 6, 5, 16, generator=generator)
    [(output, logsumexp)] = kept.attend(query, None, 16**-0.5)
    scores = query @ keys.repeat_interleave(2, 1).transpose(2, 3) / 4
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output, scores.softmax(-1) @ values.repeat_interleave(2, 1), atol=1e-5, rtol=1e-5)


class MergedAttention:
    """Full attention in which queries from slot `LENGTH` on see merged values, with their mass, and nothing evicted."""

    def __init__(self, layers):
        self.kept = []
        for layer in layers:
            seen = torch.zeros(layer.batch_size, 2, LENGTH + 1, dtype=torch.bool)
            slots = layer.held().slots
            self.kept.append(seen.scatter(2, slots.where(slots >= 0, LENGTH), True)[..., :LENGTH])

    def __call__(self, module, query, key, value, mask, scaling=None, **kwargs):
        kept, total = self.kept[module.layer_idx], key.shape[2]
        slots = torch.arange(total)
        causal = (slots <= slots[:, None])[None, None].expand(len(query), 1, -1, -1)
        causal = causal if mask is None else causal & mask
        first = causal[:, 0].any(1).int().argmax(-1)
        outputs = []
        for row in range(len(query)):
            for head in range(query.shape[1]):
                own, states = kept[row, head // 2], (key[row, head // 2], value[row, head // 2])
                scores = (query[row, head] @ states[0].T * scaling).masked_fill(~causal[row, 0], -torch.inf)
                early = scores.softmax(-1).nan_to_num(0.0) @ states[1]
                gone = [s for s in range(int(first[row]), LENGTH) if not own[s]]
                targets = [s for s in range(int(first[row]) + 2, LENGTH - 3) if own[s]]
                values, mass = merge_by_hand(*states, torch.ones(total), None, targets, gone, 0.2)
                scores = (scores + mass).index_fill(1, torch.tensor(gone), -torch.inf)
                outputs.append(torch.cat([early[:LENGTH], (scores.softmax(-1) @ values)[LENGTH:]]))
        return torch.stack(outputs).unflatten(0, query.shape[:2]).transpose(1, 2), None


@pytest.fixture(params=[False, True], ids=["full", "padded"])
def batch(request, make_ids, left_pad):
    return left_pad(make_ids(2, LENGTH + NEW), [LENGTH + NEW, (37 if request.param else LENGTH) + NEW])


def fill_and_compress(model, run, name, ids, mask, **more):
    cache = make_cache(model, name, **(OPTIONS | more))
    run(model, cache, ids[:, :LENGTH], mask)
    cache.compress()
    return cache


@pytest.mark.parametrize("chunks", [[1] * NEW, [NEW], [7, 1, 1, 31]], ids=["decode", "turn", "mixed"])
@pytest.mark.parametrize("policy", ["keydiff", "adakv"])
def test_equals_full_attention_with_merged_values(policy, chunks, batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama"), batch
    cache = fill_and_compress(model, run, policy, ids, mask)
    layers = evicting_layers(cache.layers)
    assert all(layer.kept.log_mass().max() > 0.6 for layer in layers)
    attention = MergedAttention(layers)
    logits = run(model, cache, ids[:, LENGTH:], mask, chunks=chunks)
    expected = oracle_logits(model, attention, ids, mask)[:, LENGTH:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


@torch.no_grad()
def oracle_logits(model, attention, ids, mask):
    AttentionInterface.register("merged", attention)
    AttentionMaskInterface.register("merged", sdpa_mask)
    model.set_attn_implementation("merged")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation("sdpa")
    return logits


def test_the_decode_kernel_adds_the_mass(batch, tiny_model, run, kernel, monkeypatch):
    model, (ids, mask) = tiny_model("llama"), batch
    outputs = []
    for least in (0, 10**9):
        monkeypatch.setattr("hf_kvcache.eviction.kept_kernel.MIN_LENGTH", least)
        cache = fill_and_compress(model, run, "adakv", ids, mask, block_size=16)
        outputs.append(run(model, cache, ids[:, LENGTH:], mask, chunks=[1] * NEW))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", ["keydiff", "keydiff+int8"])
def test_rows_files_and_later_evictions_keep_the_mass(name, batch, tiny_model, run, tmp_path):
    model, (ids, mask) = tiny_model("llama"), batch
    more = {"when": "both", "interval": 9} | ({"q_group_size": 16, "residual_length": 8} if "+" in name else {})
    cache = fill_and_compress(model, run, name, ids, mask, **more)
    cache.save(tmp_path / "cache.safetensors")
    loaded = hf_kvcache.load_cache(model, tmp_path / "cache.safetensors")
    swapped = cache.fork()
    swapped.reorder_cache(torch.tensor([1, 0]))
    logits = run(model, cache, ids[:, LENGTH:], mask, chunks=[1] * NEW)
    assert torch.equal(run(model, loaded, ids[:, LENGTH:], mask, chunks=[1] * NEW), logits)
    other = run(model, swapped, ids[:, LENGTH:].flip(0), mask.flip(0), chunks=[1] * NEW)
    torch.testing.assert_close(other.flip(0), logits, atol=1e-4, rtol=0.0)
    for layer in evicting_layers(cache.layers):
        total = layer.held().mass.where(layer.held().is_held, 0.0).sum(-1)
        assert (total <= mask.sum(-1)[:, None] + 1e-3).all()
        assert (total > layer.held().is_held.sum(-1) + 5).all()  # of the first eviction, carried through later ones


def test_tokens_that_are_encoded_later_keep_their_mass(batch, tiny_model, run, monkeypatch):
    monkeypatch.setattr("hf_kvcache.eviction.kept_layer._SETTLES_AT_A_TIME", 16)
    model, (ids, mask) = tiny_model("llama"), batch
    cache = fill_and_compress(model, run, "keydiff+int8", ids, mask, q_group_size=16, residual_length=20)
    before = [layer.held().mass.where(layer.held().is_held, 0.0).sum(-1) for layer in cache.layers]
    run(model, cache, ids[:, LENGTH:], mask, chunks=[1] * NEW)
    assert all(layer.table.length < NEW for layer in cache.layers)
    for layer, mass in zip(cache.layers, before, strict=True):
        torch.testing.assert_close(layer.held().mass.where(layer.held().is_held, 0.0).sum(-1), mass + NEW)


def test_generate_merges_and_kvzip_does_not(tiny_model, make_ids):
    model, ids = tiny_model("llama"), make_ids(1, LENGTH)
    cache = make_cache(model, "snapkv", **OPTIONS)
    model.generate(ids, max_new_tokens=3, do_sample=False, **{CACHE_ARG: cache})
    assert all(layer.kept.log_mass().max() > 0 for layer in evicting_layers(cache.layers))
    with pytest.raises(ValueError, match="no option 'merge'"):
        make_cache(model, "kvzip", merge=0.8)


def test_a_second_reading_sees_as_many_tokens_as_one_stands_for(held):
    """Two equal tokens, and one that stands for both: the same outputs, and twice the weight of either."""
    twice = held._replace(log_mass=None)
    for state in twice[:2]:
        state[:, :, 21] = state[:, :, 20]
    once = twice.columns(torch.tensor([*range(21), *range(22, 30)]))
    once = once._replace(log_mass=torch.zeros_like(once.slots, dtype=torch.float32))
    once.log_mass[:, :, 20] = math.log(2)
    generator = torch.Generator().manual_seed(1)
    queries = Queries(torch.randn(2, 6, 5, 8, generator=generator), 30)
    states = [torch.randn(2, 3, 5, 8, generator=generator) for _ in range(2)]
    outputs, most = [], []
    for each in (twice, once):
        reading = Reconstruction(each, looks_at_all=True, is_last=False)
        reading.begin_chunk(10, None)
        outputs.append(reading.attend(queries, states, each))
        most.append(reading.most)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(most[1][:, :, 20], 2 * most[0][:, :, 20])
    torch.testing.assert_close(most[1][:, :, :20], most[0][:, :, :20])
