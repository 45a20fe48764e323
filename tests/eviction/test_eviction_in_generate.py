"""Eviction inside `generate()`: at the end of a prompt, between its chunks, while decoding, in every kind of search."""

import numpy as np
import pytest
import torch

import hf_kvcache
from hf_kvcache import CACHE_ARG, make_cache, measure
from hf_kvcache.eviction.compression import evicting_layers
from hf_kvcache.registry import TECHNIQUES

pytestmark = pytest.mark.core

POLICIES = [name for name, technique in TECHNIQUES.items() if technique.number == 9]
SMALL = {"num_sink_tokens": 2, "num_recent_tokens": 3, "budget": 16}
NEW = 14
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def options(policy: str, **more) -> dict:
    own = {"lagkv": {"lag_length": 8}, "snapkv": {"observation_window": 3}}
    return SMALL | own.get(policy, {}) | more


@pytest.fixture(autouse=True)
def enabled():
    hf_kvcache.enable()


@pytest.fixture(params=[False, True], ids=["full", "padded"])
def batch(request, make_ids, left_pad):
    return left_pad(make_ids(2, 41), [29, 41] if request.param else [41, 41])


def by_hand(model, run, cache, ids, mask, count=NEW) -> torch.Tensor:
    """Greedy: the prompt, then eviction, then one token at a time."""
    logits = run(model, cache, ids, mask)
    cache.compress(ids)
    for _ in range(count):
        chosen = logits[:, -1:].argmax(-1)
        ids, mask = torch.cat([ids, chosen], 1), torch.cat([mask, torch.ones_like(chosen)], 1)
        logits = run(model, cache, chosen, mask)
    return ids


@pytest.mark.parametrize("policy", POLICIES)
def test_generate_evicts_when_the_prompt_is_in(policy, batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama"), batch
    expected = by_hand(model, run, make_cache(model, policy, **options(policy)), ids, mask)
    chosen = model.generate(
        ids, attention_mask=mask, cache_implementation=policy, cache_config=options(policy), **GREEDY
    )
    assert torch.equal(chosen, expected)
    full = model.generate(ids, attention_mask=mask, **GREEDY)
    assert not torch.equal(chosen, full), "nothing was evicted, or this test cannot fail"


@pytest.mark.parametrize("model_name", ["gemma3", "jamba", "falcon_h1", "qwen2"])
@pytest.mark.parametrize("policy", ["keydiff", "kvzip"])
def test_layers_that_do_not_evict_are_left_alone(model_name, policy, batch, tiny_model, run):
    """The second reading of kvzip must leave windows and states as they were."""
    model, (ids, mask) = tiny_model(model_name), batch
    cache = make_cache(model, policy, **options(policy))
    run(model, cache, ids, mask)
    others = [layer for layer in cache.layers if not evicting_layers([layer])]
    before = [(layer.get_seq_length() if hasattr(layer, "seen") else 0, measure(layer)) for layer in others]
    cache.compress(ids)
    after = [(layer.get_seq_length() if hasattr(layer, "seen") else 0, measure(layer)) for layer in others]
    assert before == after
    assert len(evicting_layers(cache.layers)) >= 1
    assert all(layer.stored_length <= 16 for layer in evicting_layers(cache.layers)) or policy == "kvzip"
    expected = by_hand(model, run, make_cache(model, policy, **options(policy)), ids, mask)
    chosen = model.generate(
        ids, attention_mask=mask, cache_implementation=policy, cache_config=options(policy), **GREEDY
    )
    assert torch.equal(chosen, expected)


@pytest.mark.parametrize("policy", ["snapkv", "adakv"])
def test_drafted_tokens_equal_greedy(policy, batch, tiny_model):
    model, (ids, mask) = tiny_model("llama"), batch
    ids = torch.cat([ids[:, :20], ids[:, :21]], dim=1)[1:]  # repeats itself, so that prompt lookup finds drafts
    mask = mask[1:]
    named = {"cache_implementation": policy, "cache_config": options(policy), "attention_mask": mask, **GREEDY}
    expected = model.generate(ids, **named)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=4, **named), expected)
    assistant = tiny_model("llama", num_hidden_layers=1, seed=1)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **named), expected)


def test_drafting_where_eviction_would_come_between_is_refused(batch, tiny_model):
    model, ids = tiny_model("llama"), batch[0]
    for policy, more in (("snapkv", {"when": "both"}), ("kvzip", {})):
        with pytest.raises(NotImplementedError, match="would draft tokens while others are evicted"):
            model.generate(
                ids[:1],
                prompt_lookup_num_tokens=4,
                cache_implementation=policy,
                cache_config=options(policy, **more),
                **GREEDY,
            )


@pytest.mark.parametrize("policy", ["keydiff", "adakv"])
@pytest.mark.parametrize("when", [{}, {"when": "both", "interval": 4}], ids=["prompt", "both"])
def test_beams_equal_beams_that_share_nothing(policy, when, batch, tiny_model, monkeypatch):
    model, (ids, mask) = tiny_model("llama"), batch
    named = {"cache_implementation": policy, "cache_config": options(policy, **when), "attention_mask": mask}
    search = {"num_beams": 3, "num_return_sequences": 2, **GREEDY}
    shared = model.generate(ids, **named, **search)

    def copy_rows(self, pool, rows):
        self._take(pool, self.rows[rows], np.arange(len(rows)))

    monkeypatch.setattr("hf_kvcache.eviction.kept.Kept.select_rows", copy_rows)
    assert torch.equal(model.generate(ids, **named, **search), shared)


def test_sampled_sequences_are_those_of_a_repeated_prompt(batch, tiny_model):
    model, (ids, mask) = tiny_model("llama"), batch
    named = {"cache_implementation": "adakv", "cache_config": options("adakv"), "max_new_tokens": NEW}
    torch.manual_seed(3)
    sampled = model.generate(ids, attention_mask=mask, do_sample=True, num_return_sequences=3, **named)
    torch.manual_seed(3)
    repeated = ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)
    assert torch.equal(model.generate(repeated[0], attention_mask=repeated[1], do_sample=True, **named), sampled)


@pytest.mark.parametrize("policy", ["expected_attention", "kvzip", "h2o"])
def test_turns_are_compressed_one_after_the_other(policy, batch, tiny_model, make_ids):
    model, (ids, mask) = tiny_model("llama"), batch
    cache = make_cache(model, policy, **options(policy))
    for turn in range(3):
        ids = model.generate(ids, attention_mask=mask, **GREEDY, **{CACHE_ARG: cache})
        for layer in evicting_layers(cache.layers):
            # The budget, and what this turn has generated; kvzip shares its budget among layers.
            assert layer.stored_length <= (2 if policy == "kvzip" else 1) * 16 + NEW
        assert cache.num_tokens_seen == ids.shape[1] - 1
        ids = torch.cat([ids, make_ids(2, 9, seed=turn)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, NEW + 9), value=1)


def test_a_long_generation_keeps_its_memory_flat(make_ids, tiny_model):
    model, ids = tiny_model("llama", max_position_embeddings=1024), make_ids(1, 100)
    cache = make_cache(model, "h2o", budget=64, when="both", interval=16)
    sizes = []

    def note(*args, **kwargs):
        sizes.append(measure(cache))

    model.register_forward_pre_hook(note)
    model.generate(ids, max_new_tokens=400, do_sample=False, **{CACHE_ARG: cache})
    assert cache.num_tokens_seen == 499
    assert max(sizes[50:]) == max(sizes[50:150])
    assert max(sizes[2:]) < 0.5 * cache.report().dynamic_bytes


@pytest.mark.parametrize(
    ("policy", "limit"),
    # A query takes a token's memory here: a window of 64 and no more than 16 that wait.
    [("h2o", 28), ("snapkv", 80), ("tova", 28), ("expected_attention", 28), ("blend", 28)],
)
def test_what_is_remembered_of_queries_takes_less_than_a_few_tokens(policy, limit, make_ids, tiny_model, run):
    """At every step of an interval, in tokens' keys and values, beside a policy that remembers nothing."""
    model = tiny_model("llama", max_position_embeddings=1024)
    ids, interval, most = make_ids(1, 200), 70, 0
    caches = [
        make_cache(model, name, budget=60, when="both", interval=interval, block_size=16)
        for name in (policy, "streaming_llm")
    ]
    token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, channels, bytes
    for cache in caches:
        run(model, cache, ids[:, :120])
        cache.compress()
    for step in range(120, 200):
        for cache in caches:
            run(model, cache, ids[:, step : step + 1])
        most = max(most, measure(caches[0]) - measure(caches[1]))
    assert 0 < most < limit * token


def test_prompts_no_longer_than_the_budget_lose_nothing(tiny_model, make_ids):
    """Peers fail on prompts shorter than their observation window."""
    model = tiny_model("llama")
    for length in (1, 3, 15):
        ids = make_ids(2, length)
        expected = model.generate(ids, **GREEDY)
        for policy in POLICIES:
            named = {"cache_implementation": policy, "cache_config": {"budget": 64}}
            assert torch.equal(model.generate(ids, **named, **GREEDY), expected), policy


def test_two_caches_of_one_model_do_not_meet(batch, tiny_model, run):
    model, (ids, mask) = tiny_model("llama"), batch
    first, second = (make_cache(model, "adakv", **options("adakv")) for _ in range(2))
    expected = by_hand(model, run, make_cache(model, "adakv", **options("adakv")), ids, mask)
    logits = run(model, first, ids, mask)
    first.compress()
    run(model, second, ids.flip(0), mask)
    second.compress()
    chosen = logits[:, -1:].argmax(-1)
    longer = torch.cat([mask, torch.ones_like(chosen)], 1)
    assert torch.equal(run(model, first, chosen, longer)[:, -1].argmax(-1), expected[:, 42])


def test_a_second_reading_needs_ids(batch, tiny_model):
    model, (ids, mask) = tiny_model("llama"), batch
    embeds = model.get_input_embeddings()(ids)
    named = {"attention_mask": mask, "cache_config": options("kvzip"), **GREEDY}
    with pytest.raises(ValueError, match=r"'kvzip' reads the prompt a second time and was given no token ids"):
        model.generate(inputs_embeds=embeds, cache_implementation="kvzip", **named)
    by_embeds = model.generate(inputs_embeds=embeds, cache_implementation="blend", **named)
    by_ids = model.generate(ids, cache_implementation="blend", **named)
    assert torch.equal(by_embeds, by_ids[:, ids.shape[1] :])


def test_drafts_of_a_model_with_its_own_kvzip_cache_are_not_compressed(batch, tiny_model):
    model, (ids, mask) = tiny_model("llama"), batch
    assistant = tiny_model("llama", num_hidden_layers=1, seed=1)
    assistant.generation_config.cache_implementation = "kvzip"
    assistant.generation_config.cache_config = options("kvzip")
    given = {"attention_mask": mask[1:], **GREEDY}
    expected = model.generate(ids[1:], **given)
    assert torch.equal(model.generate(ids[1:], assistant_model=assistant, **given), expected)
