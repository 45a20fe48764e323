"""Token eviction: every policy against full attention under a mask that hides, head by head, what was evicted."""

import copy

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import hf_kvcache
from hf_kvcache import CACHE_ARG, make_cache
from hf_kvcache.eviction.compression import evicting_layers
from hf_kvcache.registry import TECHNIQUES

pytestmark = pytest.mark.core

LENGTH, NEW = 61, 23
PADDED = [61, 37, 50]
POLICIES = [name for name, technique in TECHNIQUES.items() if technique.number == 9]
OPTIONS = {"lagkv": {"lag_length": 8}, "snapkv": {"observation_window": 3}, "kvzip": {"chunk_length": 25}}
ALL_GLOBAL = {"layer_types": ["full_attention"] * 2}
# Of the logits, which reach 0.7; another order of sums moves their last bits only.
CLOSE = {"atol": 1e-4, "rtol": 0.0}


def options(policy: str, **more) -> dict:
    small = {"num_sink_tokens": 2, "num_recent_tokens": 3, "block_size": 3}
    return small | OPTIONS.get(policy, {}) | ({"budget": 20} if "keep_ratio" not in more else {}) | more


def evicted(layer) -> torch.Tensor:
    """Which slots each head of each row has let go of, bool `[B, H, seen]`; padding counts as gone."""
    slots = layer.held().slots
    gone = torch.ones(*slots.shape[:2], layer.seen + 1, dtype=torch.bool)
    return gone.scatter(2, slots.where(slots >= 0, layer.seen), False)[..., : layer.seen]


class HidingAttention:
    """Full attention in which a query from slot `start` on does not see what `gone[layer]` says."""

    def __init__(self):
        self.events: list[tuple[int, list[torch.Tensor]]] = []  # (first slot that does not see it, gone of each layer)

    def __call__(self, module, query, key, value, mask, scaling=None, **kwargs):
        heads, count, total = query.shape[1], query.shape[2], key.shape[2]
        slots = torch.arange(total)
        own = slots[total - count :]
        seen = (slots <= own[:, None])[None, None].expand(query.shape[0], heads, -1, -1).clone()
        if mask is not None:
            seen &= mask
        for start, layers in self.events:
            gone = layers[module.layer_idx].repeat_interleave(heads // key.shape[1], dim=1).unsqueeze(2)
            width = gone.shape[-1]
            seen[..., :width] &= ~(gone & (own >= start)[:, None])
        groups = heads // key.shape[1]
        keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ keys.transpose(2, 3) * scaling).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1).nan_to_num(0.0) @ values).transpose(1, 2), None


@torch.no_grad()
def hidden_logits(model, ids, mask, events) -> torch.Tensor:
    """The oracle: one forward without a cache in which evicted tokens are hidden from all later queries."""
    attention = HidingAttention()
    attention.events = events
    AttentionInterface.register("hiding", attention)
    AttentionMaskInterface.register("hiding", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("hiding")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation(before)
    return logits


def fill_and_compress(model, run, policy, ids, mask, **more):
    cache = make_cache(model, policy, **options(policy, **more))
    run(model, cache, ids[:, :LENGTH], mask)
    cache.compress(ids[:, :LENGTH])
    return cache


@pytest.fixture(params=[False, True], ids=["full", "padded"])
def batch(request, make_ids, left_pad):
    ids = make_ids(3, LENGTH + NEW)
    return left_pad(ids, [length + NEW for length in PADDED] if request.param else [LENGTH + NEW] * 3)


@pytest.mark.parametrize("chunks", [[1] * NEW, [NEW], [7, 1, 1, 14]], ids=["decode", "turn", "mixed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_equals_full_attention_without_the_evicted_tokens(policy, chunks, batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama"), batch
    cache = fill_and_compress(model, run, policy, ids, mask)
    layers = evicting_layers(cache.layers)
    gone = [evicted(layer) for layer in layers]
    assert all(g.any() for g in gone)
    assert max(layer.stored_length for layer in layers) < LENGTH
    logits = run(model, cache, ids[:, LENGTH:], mask, chunks=chunks)
    expected = hidden_logits(model, ids, mask, [(LENGTH, gone)])[:, LENGTH:]
    torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "qwen3", "mixtral"])
@pytest.mark.parametrize("policy", ["keydiff", "adakv", "kvzip"])
def test_other_models_and_their_own_softmax(name, policy, batch, tiny_model, run):
    """Softcap and sink logits cannot be merged: such layers are attended dense, under a mask a head."""
    config = ALL_GLOBAL if name in ("gpt_oss", "gemma2") else {}
    model, (ids, mask) = tiny_model(name, **config), batch
    model.set_attn_implementation("eager")
    cache = fill_and_compress(model, run, policy, ids, mask)
    whole = make_cache(model, "blocks")
    run(model, whole, ids[:, :LENGTH], mask)
    # The oracle here is the model's own attention, over full keys, under a mask of the heads.
    layers = evicting_layers(cache.layers)
    gone = [evicted(layer) for layer in layers]
    hide_in(whole, gone, model)
    logits = run(model, cache, ids[:, LENGTH:], mask, chunks=[1, 4, 1, NEW - 6])
    expected = run(model, whole, ids[:, LENGTH:], mask)
    torch.testing.assert_close(logits, expected, **CLOSE)


def hide_in(cache, gone, model) -> None:
    """Make the full cache's layers hide tokens through the mask that they give to the model's own attention."""
    for layer, hidden in zip(cache.layers, gone, strict=True):
        layer.__class__ = type("Hiding", (type(layer),), {"update": _update_and_hide, "attend": _attend_hidden})
        layer.hidden = hidden


def _update_and_hide(self, key_states, value_states, *args, **kwargs):
    self.table.append((key_states, value_states))
    self.seen += key_states.shape[2]
    assert hf_kvcache.compat.hand_over(self, kwargs, key_states)
    return key_states, value_states


def _attend_hidden(self, base, module, query, key, value, mask, *args, **kwargs):
    keys, values = self.table.materialize()
    groups = query.shape[1] // keys.shape[1]
    hidden = torch.nn.functional.pad(self.hidden, (0, self.seen - self.hidden.shape[-1]))
    hidden = hidden.repeat_interleave(groups, dim=1).unsqueeze(2)
    if mask is None:
        mask = torch.zeros(1, 1, query.shape[2], self.seen)
    whole = mask.expand(len(query), query.shape[1], -1, -1).masked_fill(hidden, torch.finfo(mask.dtype).min)
    return base(module, query, keys, values, whole, *args, **kwargs)


def test_a_second_turn_is_compressed_too(batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama"), batch
    cache = fill_and_compress(model, run, "expected_attention", ids, mask)
    layers = evicting_layers(cache.layers)
    events = [(LENGTH, [evicted(layer) for layer in layers])]
    run(model, cache, ids[:, LENGTH : LENGTH + 10], mask, chunks=[1, 9])
    before = [layer.stored_length for layer in layers]
    cache.compress()
    assert all(layer.stored_length < length for layer, length in zip(layers, before, strict=True))
    events.append((LENGTH + 10, [evicted(layer) for layer in layers]))
    logits = run(model, cache, ids[:, LENGTH + 10 :], mask, chunks=[1, NEW - 11])
    torch.testing.assert_close(logits, hidden_logits(model, ids, mask, events)[:, LENGTH + 10 :], **CLOSE)


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "adakv", "tova", "lagkv"])
def test_eviction_while_decoding(policy, batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama"), batch
    cache = make_cache(model, policy, **options(policy, when="decode", interval=6))
    layers, events, logits = evicting_layers(cache.layers), [], []
    for step in range(LENGTH):
        logits.append(run(model, cache, ids[:, step : step + 1], mask))
        if layers[0]._last_eviction == step + 1 and layers[0].kept:
            events.append((step + 1, [evicted(layer) for layer in layers]))
        assert max(layer.stored_length for layer in layers) <= 20 + 6
    assert len(events) >= 6
    expected = hidden_logits(model, ids[:, :LENGTH], mask[:, :LENGTH], events)
    real = mask[:, :LENGTH].bool()
    torch.testing.assert_close(torch.cat(logits, 1)[real], expected[real], **CLOSE)


def test_prompts_in_chunks_never_hold_more_than_budget_and_chunk(batch, tiny_model):
    model, (ids, mask) = tiny_model("llama"), batch
    hf_kvcache.enable()
    held = []
    cache = make_cache(model, "snapkv", **options("snapkv"))
    layer = evicting_layers(cache.layers)[0]
    step = layer._step
    layer._step = lambda *args: (step(*args), held.append(layer.stored_length))[0]
    chunked = {"prefill_chunk_size": 16, "max_new_tokens": 3, "do_sample": False}
    model.generate(ids, attention_mask=mask, **chunked, **{CACHE_ARG: cache})
    assert len(held) == -(-ids.shape[1] // 16) + 2
    assert max(held) <= 20 + 2


def rotate(states: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    half = states.shape[-1] // 2
    angles = positions.unsqueeze(-1) * theta ** (-torch.arange(half) / half)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    return states * cos + torch.cat([-states[..., half:], states[..., :half]], dim=-1) * sin


@pytest.mark.parametrize("policy", ["keydiff", "adakv"])
def test_cache_positions_turn_kept_keys_next_to_the_newer_tokens(policy, batch, tiny_model, run):
    """Twice: what is kept once is turned on from where it stood."""
    model, (ids, mask) = tiny_model("llama"), batch
    whole = make_cache(model, "blocks")
    run(model, whole, ids, mask)
    cache = fill_and_compress(model, run, policy, ids, mask, positions="cache")
    for end in (LENGTH, LENGTH + NEW):
        if end > LENGTH:
            run(model, cache, ids[:, LENGTH:], mask)
            cache.compress()
        layer = evicting_layers(cache.layers)[0]  # its keys do not depend on what was evicted
        held, begin = layer.held(), layer.table.start
        for row in range(3):
            for head in range(2):
                kept = (held.slots[row, head, : layer.kept.stores["older"].counts.max() + 15] >= 0) & (
                    held.slots[row, head, : layer.kept.stores["older"].counts.max() + 15] < begin
                )
                slots = held.slots[row, head, : len(kept)][kept]
                original = whole.layers[0].keys[row, head, slots]
                target = begin - len(slots) + torch.arange(len(slots))
                expected = rotate(original, target - slots)
                torch.testing.assert_close(held.keys[row, head, : len(kept)][kept], expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_sinks_and_recent_tokens_stay_and_budgets_hold(policy, batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama"), batch
    cache = fill_and_compress(model, run, policy, ids, mask)
    total = torch.zeros(3)
    for layer in evicting_layers(cache.layers):
        gone = evicted(layer)
        for row in range(3):
            first = int(mask[row].argmax())
            assert gone[row, :, :first].all()
            assert not gone[row, :, first : first + 2].any()
            assert not gone[row, :, -3:].any()
        total += (~gone).float().sum(dim=(1, 2)) / gone.shape[1]
    # On average over layers and heads, no row keeps more than the budget, and none that could keeps less.
    assert torch.allclose(total / 2, torch.full((3,), 20.0), atol=0.5)


def test_ratios_are_of_each_rows_own_tokens(make_ids, left_pad, tiny_model, run):
    ids, mask = left_pad(make_ids(3, LENGTH), PADDED)
    model = tiny_model("llama")
    cache = make_cache(model, "knorm", **options("knorm", keep_ratio=0.4))
    run(model, cache, ids, mask)
    cache.compress()
    kept = (~evicted(evicting_layers(cache.layers)[0])).sum(dim=-1)
    assert kept.tolist() == [[-(-length * 4 // 10)] * 2 for length in PADDED]


def test_bytes_are_a_budget_too(make_ids, tiny_model, run):
    model, ids = tiny_model("llama"), make_ids(2, 200)
    cache = make_cache(model, "keydiff", budget_bytes=2 * 64 * 2 * 2 * 16 * 4)  # 64 tokens in each of two layers
    run(model, cache, ids)
    cache.compress()
    assert [layer.stored_length for layer in cache.layers] == [64, 64]
    assert cache.report().stored_bytes <= 2 * 2 * 64 * 2 * 2 * 16 * 4 * 1.05


@pytest.mark.parametrize("policy", ["keydiff", "adakv", "kvzip"])
def test_memory_is_really_freed(policy, make_ids, tiny_model, run):
    model, ids = tiny_model("llama", max_position_embeddings=1024), make_ids(2, 800)
    cache = make_cache(model, policy, keep_ratio=0.25)
    run(model, cache, ids)
    before = cache.report()
    cache.compress(ids)
    after = cache.report()
    assert after.dynamic_bytes == before.dynamic_bytes
    # Slots (4 bytes beside 128 of keys and values) and groups that are not full are all there is more than a quarter.
    assert after.stored_bytes <= 0.28 * after.dynamic_bytes
    assert after.reserved_bytes == hf_kvcache.measure(cache) <= 0.28 * after.dynamic_bytes


def test_heads_keep_other_numbers_of_tokens(make_ids, tiny_model, run):
    model, ids = tiny_model("llama"), make_ids(2, 200)
    cache = make_cache(model, "adakv", keep_ratio=0.3, safeguard=0.0)
    run(model, cache, ids)
    cache.compress()
    counts = np.stack([layer.kept.stores["older"].counts for layer in evicting_layers(cache.layers)])
    assert len(np.unique(counts)) > 1
    assert (counts.sum(axis=-1) == 2 * (60 - 16)).all()


def test_rows_share_what_they_keep_until_few_are_left(make_ids, tiny_model, run):
    model, ids = tiny_model("llama"), make_ids(3, LENGTH + NEW)
    for policy in ("keydiff", "adakv"):
        cache = fill_and_compress(model, run, policy, ids, None)
        copied, layer = copy.deepcopy(cache), evicting_layers(cache.layers)[0]
        kept = layer.kept.stores["older"]
        for rows in ([2, 0, 2], [0, 0, 1, 2], [2, 2, 2]):
            index = torch.tensor(rows)
            cache.reorder_cache(index)
            is_shared = layer.kept.stores["older"] is kept
            for each in evicting_layers(copied.layers):  # without sharing: all rows copied
                each.kept._take(each.context.pool(each.device), each.kept.rows[rows], np.arange(len(rows)))
                each.table.select_rows(np.array(rows))
                each.first_slots.select_rows(np.array(rows))
            step = torch.full((len(rows), 1), 5)
            torch.testing.assert_close(run(model, cache, step), run(model, copied, step), **CLOSE)
            assert is_shared == (rows != [2, 2, 2])
        assert layer.kept.stores["older"].num_rows == 1


def test_crop_reaches_back_to_what_was_kept_and_no_further(make_ids, tiny_model, run):
    model, ids = tiny_model("llama"), make_ids(2, LENGTH + NEW)
    cache = fill_and_compress(model, run, "snapkv", ids, None)
    expected = run(model, copy.deepcopy(cache), ids[:, LENGTH:])
    run(model, cache, ids[:, :7])
    cache.crop(-7)
    torch.testing.assert_close(run(model, cache, ids[:, LENGTH:]), expected, **CLOSE)
    with pytest.raises(RuntimeError, match="older ones"):
        cache.crop(-(NEW + 4))  # three recent tokens are whole


def test_what_cannot_be_is_refused(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(2, 40)
    with pytest.raises(ValueError, match="leaves no room beside 20 sinks and recent tokens"):
        make_cache(model, "snapkv", budget=20)
    with pytest.raises(ValueError, match=r"weights=\[1, 2\] does not say how much each of scorers=.* counts"):
        make_cache(model, "blend", weights=[1, 2])
    for wrong in ([], [-1], [0], [float("inf")], [float("nan")], ["1"]):
        with pytest.raises(ValueError, match=r"weights=.* is not allowed .* a list of numbers of at least 0"):
            make_cache(model, "adakv", scorers=["keydiff"], weights=wrong)
    with pytest.raises(ValueError, match="budget and keep_ratio all say how much is kept"):
        make_cache(model, "snapkv", budget=200, keep_ratio=0.5)
    with pytest.raises(ValueError, match="evicts nothing"):
        make_cache(model, "blocks").compress()
    with pytest.raises(NotImplementedError, match="snapkv cannot serve layer 0: DeepseekV3Attention"):
        make_cache(tiny_model("deepseek_v3"), "snapkv")
    with pytest.raises(
        NotImplementedError, match="snapkv works on full-attention layers, and MistralForCausalLM has none"
    ):
        make_cache(tiny_model("mistral"), "snapkv")
    rotary = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    with pytest.raises(NotImplementedError, match=r"expected_attention cannot turn this model's keys.*keydiff"):
        make_cache(tiny_model("llama", **rotary), "expected_attention")
    cache = make_cache(model, "kvzip", budget=25)
    run(model, cache, ids)
    with pytest.raises(ValueError, match="reads the prompt a second time"):
        cache.compress()
    with pytest.raises(ValueError, match=r"ids of shape \(2, 41\)"):
        cache.compress(make_ids(2, 41))
    cache = make_cache(model, "adakv", budget=25)
    run(model, cache, ids)
    cache.compress()
    model.config._attn_implementation = "flash_attention_2"
    layer = evicting_layers(cache.layers)[0]
    with pytest.raises(NotImplementedError, match="adakv keeps other tokens for each head"):
        layer._attend(
            None, model.model.layers[0].self_attn, torch.zeros(2, 4, 1, 16), layer.table.materialize(), None, (), {}
        )


def test_sinks_share_their_scores_with_nobody(tiny_model, make_ids, run):
    """Pooling spreads a score over its neighbours; those of the sinks would lift the text that follows them."""
    model, ids = tiny_model("llama"), make_ids(1, 40)
    cache = make_cache(model, "snapkv", **options("snapkv", kernel_size=5))
    run(model, cache, ids)
    layer = evicting_layers(cache.layers)[0]
    held = layer.held()
    scores = torch.ones(held.slots.shape)
    scores[..., :2] = 1000.0
    finished = layer.finish(scores, held)
    assert torch.isinf(finished[..., :2]).all()
    assert torch.equal(finished[..., 2:-3], torch.ones(1, 2, 35))
    assert torch.isinf(finished[..., -3:]).all()


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "expected_attention", "blend"])
def test_queries_that_were_taken_back_have_no_say(policy, tiny_model, make_ids, run):
    model, ids, wrong = tiny_model("llama"), make_ids(2, LENGTH), make_ids(2, 5, seed=1)
    caches = [make_cache(model, policy, **options(policy, when="both", interval=500)) for _ in range(2)]
    for cache in caches:
        run(model, cache, ids)
    caches[0].activate_past_recording()
    run(model, caches[0], wrong, chunks=[1, 3, 1])
    caches[0].crop(-5)
    caches[0].stop_past_recording()
    for cache in caches:
        cache.compress()
    for one, other in zip(*(evicting_layers(cache.layers) for cache in caches), strict=True):
        assert torch.equal(one.held().slots, other.held().slots)
        assert torch.equal(one.held().keys, other.held().keys)
