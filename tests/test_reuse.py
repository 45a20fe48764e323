"""A filled cache given to `generate()` again: right where transformers' own is silently wrong, or a clear error."""

import copy

import pytest
import torch
from transformers import DynamicCache

import hf_kvcache
from hf_kvcache import CACHE_ARG, make_cache

pytestmark = pytest.mark.core

PAST, NEW = 20, 7  # tokens in the cache, and tokens that the prompt has more
TOKENS = 12

# Before 5.24 transformers runs the whole prompt again when a filled cache meets prefill_chunk_size: ours raises there.
CHUNKS_A_FILLED_CACHE = CACHE_ARG == "cache"


@pytest.fixture(params=["llama", "mistral", "gemma3"])
def model(request, tiny_model):
    return tiny_model(request.param)


@pytest.fixture
def prompt(make_ids):
    return make_ids(1, PAST + NEW, seed=3)


@pytest.fixture
def filled(run):
    """`filled(model, ids)`: a cache of ours that has seen `ids`; `dynamic=True`: transformers' own."""

    def fill(model, ids, mask=None, *, dynamic=False):
        cache = DynamicCache(config=model.config) if dynamic else make_cache(model, block_size=3)
        run(model, cache, ids, mask)
        return cache

    return fill


def generate(model, ids, cache=None, **options) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"max_new_tokens": TOKENS, "do_sample": False} | options
    return model.generate(ids, **options, **({} if cache is None else {CACHE_ARG: cache}))


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "num_return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("past", [PAST, PAST + NEW - 1, PAST + NEW], ids=["part", "all_but_one", "covered"])
@pytest.mark.parametrize("mode", MODES)
def test_a_longer_or_covered_prompt_continues_the_cache(model, prompt, filled, mode, past):
    expected = generate(model, prompt, **MODES[mode])
    cache = filled(model, prompt[:, :past])
    assert torch.equal(generate(model, prompt, cache, **MODES[mode]), expected)
    assert cache.get_seq_length() == PAST + NEW + TOKENS - 1 or mode == "prompt_lookup"


OWN_MISTAKES = {
    "covered prompt": ("greedy", PAST + NEW, lambda ids: ids),
    "beams": ("beams", PAST, lambda ids: ids),
    "several sequences": ("num_return_sequences", PAST, lambda ids: ids),
    "assisted": ("prompt_lookup", PAST, lambda ids: ids),
    "only the new tokens": ("greedy", PAST, lambda ids: ids[:, PAST:]),
    "more new tokens than cached": ("greedy", PAST, lambda ids: ids[:, PAST:].repeat(1, 4)),
    "another text": ("greedy", PAST, lambda ids: ids.roll(1)),
}


@pytest.mark.parametrize("mistake", OWN_MISTAKES)
def test_transformers_own_cache_is_wrong_there(tiny_model, prompt, filled, mistake):
    """The reason for this file: what transformers fixes itself, we need not handle any more."""
    model, (mode, past, given) = tiny_model("llama"), OWN_MISTAKES[mistake]
    ids = given(prompt)
    whole = torch.cat([prompt[:, :PAST], ids], 1) if ids.shape[1] != PAST + NEW else ids
    expected = generate(model, whole, **MODES[mode])[:, -TOKENS:]
    cache = filled(model, prompt[:, :past], dynamic=True)
    hf_kvcache.disable()
    try:
        own = generate(model, ids, cache, **MODES[mode])[:, -TOKENS:]
    except (RuntimeError, ValueError, IndexError):
        return
    assert not torch.equal(own, expected)


@pytest.mark.parametrize("past", [PAST, PAST + NEW], ids=["part", "covered"])
def test_an_assistant_continues_a_filled_cache(model, tiny_model, prompt, filled, past):
    expected = generate(model, prompt)
    assistant = tiny_model("llama", seed=1)
    cache = filled(model, prompt[:, :past])
    assert torch.equal(generate(model, prompt, cache, assistant_model=assistant), expected)
    assert "prepare_inputs_for_generation" not in vars(model)


@pytest.mark.parametrize("past", [PAST, PAST + NEW], ids=["part", "covered"])
def test_a_chunked_prefill_continues_a_filled_cache(model, prompt, filled, past):
    expected = generate(model, prompt, prefill_chunk_size=3)
    cache = filled(model, prompt[:, :past])
    if CHUNKS_A_FILLED_CACHE:
        assert torch.equal(generate(model, prompt, cache, prefill_chunk_size=3), expected)
    else:
        with pytest.raises(NotImplementedError, match=r"upgrade to transformers 5\.24"):
            generate(model, prompt, cache, prefill_chunk_size=3)


def test_only_the_new_tokens_with_the_whole_mask(model, prompt, filled):
    expected = generate(model, prompt)[:, PAST:]
    mask = torch.ones_like(prompt)
    cache = filled(model, prompt[:, :PAST])
    assert torch.equal(generate(model, prompt[:, PAST:], cache, attention_mask=mask), expected)


@pytest.mark.parametrize("repeats", [1, 4], ids=["shorter", "longer"])
def test_only_the_new_tokens_without_a_mask_are_refused(model, prompt, filled, repeats):
    """Fewer or more new tokens than cached ones: neither can be told from a whole prompt by its length."""
    new = prompt[:, PAST:].repeat(1, repeats)
    cache = filled(model, prompt[:, :PAST])
    with pytest.raises(ValueError, match=r"already holds 20|holds another text"):
        generate(model, new, cache)
    assert cache.get_seq_length() == PAST, "a refusal changed the cache"


@pytest.mark.parametrize("position", [0, 5, 19])
def test_another_text_is_named_at_the_first_token_that_differs(tiny_model, prompt, filled, position):
    model = tiny_model("llama")
    cache = filled(model, prompt[:, :PAST])
    other = prompt.clone()
    other[:, position:] = (other[:, position:] - 2 + 1) % 95 + 2
    with pytest.raises(ValueError, match=rf"another text than this prompt: they differ from token {position} on"):
        generate(model, other, cache)
    # What the message says to do works.
    cache.crop(position - cache.get_seq_length())
    assert torch.equal(generate(model, other, cache), generate(model, other))


def test_another_text_in_a_window_is_named_too(tiny_model, prompt, filled):
    model = tiny_model("mistral")
    cache = filled(model, prompt[:, :PAST])
    other = prompt.clone()
    other[:, PAST - 3] = other[:, PAST - 3] % 95 + 2
    with pytest.raises(ValueError, match=rf"they differ from token {PAST - 3} on"):
        generate(model, other, cache)


def test_one_row_of_another_text_is_noticed(model, make_ids, left_pad, filled):
    ids, mask = left_pad(make_ids(2, PAST + NEW), [PAST + NEW, 11])
    cache = filled(model, ids[:, :PAST], mask)
    other = ids.clone()
    other[1, PAST - 1] = other[1, PAST - 1] % 95 + 2
    with pytest.raises(ValueError, match=rf"they differ from token {PAST - 1} on"):
        generate(model, other, cache, attention_mask=mask)


def test_a_shorter_prompt_is_refused(model, prompt, filled):
    with pytest.raises(ValueError, match=r"the prompt has 20 tokens and the cache already holds 27: give the whole"):
        generate(model, prompt[:, :PAST], filled(model, prompt))


def test_a_mask_of_the_wrong_length_is_refused(model, prompt, filled):
    cache = filled(model, prompt[:, :PAST])
    with pytest.raises(ValueError, match=r"attention_mask covers 13 tokens: expected 7 .* or 27"):
        generate(model, prompt[:, PAST:], cache, attention_mask=torch.ones(1, 13, dtype=torch.long))


def test_a_batch_that_does_not_divide_is_refused(model, make_ids, filled):
    ids = make_ids(3, PAST + NEW)
    with pytest.raises(ValueError, match="the cache holds 2 sequences and generate"):
        generate(model, ids, filled(model, ids[:2, :PAST]))


def test_an_assistant_needs_the_whole_prompt(model, prompt, filled):
    cache, mask = filled(model, prompt[:, :PAST]), torch.ones_like(prompt)
    with pytest.raises(ValueError, match="assisted decoding with a filled cache needs the whole prompt"):
        generate(model, prompt[:, PAST:], cache, attention_mask=mask, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("mode", ["greedy", "beams", "sampling"])
def test_a_left_padded_batch_continues(model, make_ids, left_pad, filled, mode):
    ids, mask = left_pad(make_ids(3, PAST + NEW), [PAST + NEW, 11, NEW + 3])
    expected = generate(model, ids, attention_mask=mask, **MODES[mode])
    for past in (PAST, PAST + NEW):
        cache = filled(model, ids[:, :past], mask)
        assert torch.equal(generate(model, ids, cache, attention_mask=mask, **MODES[mode]), expected)


@pytest.mark.parametrize("first", ["greedy", "prompt_lookup", "assistant", "chunked"])
def test_a_conversation_continues_after_each_mode(model, tiny_model, prompt, make_ids, first):
    cache = make_cache(model, block_size=3)
    options = MODES.get(first, {"prefill_chunk_size": 5})
    if first == "assistant":
        options = {"assistant_model": tiny_model("llama", seed=1)}
    text = generate(model, prompt, cache, **options)
    for turn in range(3):
        text = torch.cat([text, make_ids(1, 5, seed=turn)], dim=1)
        expected = generate(model, text)
        text = generate(model, text, cache)
        assert torch.equal(text, expected)
    # Windows forget again once a mode that records for rollbacks is over.
    windows = [layer for layer in cache.layers if layer.is_sliding]
    assert all(layer.stored_length <= layer.sliding_window + 1 for layer in windows)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: cache.fork()], ids=["deepcopy", "fork"])
def test_one_prefix_serves_several_prompts(model, prompt, make_ids, filled, duplicate):
    prefix = filled(model, prompt)
    for seed in range(3):
        text = torch.cat([prompt, make_ids(1, 5, seed=seed)], dim=1)
        assert torch.equal(generate(model, text, duplicate(prefix)), generate(model, text))
    assert prefix.get_seq_length() == PAST + NEW


@pytest.mark.parametrize("name", ["jamba", "bamba", "falcon_h1"])
def test_hybrids_continue_or_say_that_they_cannot(name, tiny_model, prompt, filled):
    model = tiny_model(name)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}):
        # The reference continues as well: splitting a prompt moves the logits of these models, in transformers too.
        rows = prompt[:, :PAST].expand(3 if options else 1, -1)
        expected = generate(model, prompt, filled(model, rows), **options)
        assert torch.equal(generate(model, prompt, filled(model, prompt[:, :PAST]), **options), expected)
    with pytest.raises(RuntimeError, match="a recurrent state keeps no history"):
        generate(model, prompt, filled(model, prompt))
    with pytest.raises((NotImplementedError, ValueError), match=r"stateful|recurrent"):
        generate(model, prompt, filled(model, prompt[:, :PAST]), prompt_lookup_num_tokens=3)
