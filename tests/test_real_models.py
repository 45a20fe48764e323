"""The two pretrained models: the same tokens on natural text, windows that stop growing, sinks that matter."""

import pydoc_data.topics

import pytest
import torch
from transformers import DynamicCache

import hf_kvcache
from hf_kvcache import CACHE_ARG, load_cache, make_cache

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXT = "\n".join(pydoc_data.topics.topics[name] for name in ("assignment", "class", "import", "for"))
PROMPT = 900  # tokens: past Gemma's window of 512
NAMES = ["smollm2", "gemma3"]


def ids_of(tokenizer, length: int, *, skip: int = 0) -> torch.Tensor:
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    first = ids[:, : 1 if ids[0, 0] == tokenizer.bos_token_id else 0]
    start = first.shape[1] + skip
    ids = torch.cat([first, ids[:, start : start + length - first.shape[1]]], dim=1)
    assert ids.shape[1] == length
    return ids


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_dynamic_cache(name, real_model):
    model, tokenizer = real_model(name)
    ids, options = ids_of(tokenizer, PROMPT), {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    expected = model.generate(ids, **options)
    hf_kvcache.enable()
    output = model.generate(ids, **options, cache_implementation="blocks", return_dict_in_generate=True)
    assert expected.shape[1] == PROMPT + 64
    assert torch.equal(output.sequences, expected)
    cache = getattr(output, CACHE_ARG, None) or output.past_key_values
    windows = [layer for layer in cache.layers if layer.is_sliding]
    assert len(windows) == (len(cache.layers) * 5 // 6 if name == "gemma3" else 0)
    assert all(layer.stored_length <= layer.sliding_window + 1 for layer in windows)
    assert all(layer.stored_length == PROMPT + 63 for layer in cache.layers if not layer.is_sliding)


@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_equals_dynamic_cache(name, real_model):
    model, tokenizer = real_model(name)
    texts = [tokenizer.decode(ids_of(tokenizer, n, skip=n)[0], skip_special_tokens=True) for n in (40, 63, 150)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    expected = model.generate(**inputs, **options)
    hf_kvcache.enable()
    assert torch.equal(model.generate(**inputs, **options, cache_implementation="blocks"), expected)


# Over 48 forced steps after 700 tokens (transformers 5.24, torch 2.13, CPU) the same top-1 token came in 0.979 of the
# steps for SmolLM2 and 0.958 for Gemma-3; the largest difference of a logit was 0.53 and 0.38. Logits span 58 and 55,
# and the last bit of a bfloat16 logit between 16 and 32 is 0.125.
AGREEMENT, TOLERANCE = 0.9, 1.0


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_bfloat16_stays_within_rounding(name, real_model, run):
    model, tokenizer = real_model(name)
    ids = ids_of(tokenizer, 748)
    model.to(torch.bfloat16)
    try:
        chunks = [700, *[1] * 48]
        logits = run(model, make_cache(model), ids, chunks=chunks)[:, 700:].float()
        expected = run(model, DynamicCache(config=model.config), ids, chunks=chunks)[:, 700:].float()
    finally:
        model.to(torch.float32)
    agreement = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
    assert agreement >= AGREEMENT
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0.0)


@torch.no_grad()
def nll_of(model, cache, ids, run, begin: int) -> float:
    """Mean negative log-likelihood, in nats, of the tokens from `begin` on, fed in chunks of 100."""
    chunks = [min(100, ids.shape[1] - done) for done in range(0, ids.shape[1], 100)]
    logits = run(model, cache, ids, chunks=chunks)
    return torch.nn.functional.cross_entropy(logits[0, begin - 1 : -1], ids[0, begin:]).item()


def test_sinks_keep_smollm2_fluent_past_its_window(real_model, run):
    """Xiao et al. 2024, figure 1: without the first tokens the model breaks once they leave the window."""
    model, tokenizer = real_model("smollm2")
    ids, nll, kept = ids_of(tokenizer, 900), {}, {}
    for sinks in (0, 4):
        cache = make_cache(model, "sliding_window", sliding_window=252 - sinks, num_sink_tokens=sinks)
        nll[sinks] = nll_of(model, cache, ids, run, begin=300)
        kept[sinks] = {layer.stored_length for layer in cache.layers}
        assert cache.get_seq_length() == 900
    nll["full"] = nll_of(model, DynamicCache(config=model.config), ids, run, begin=300)
    assert kept == {0: {252}, 4: {252}}
    # Measured (fp32, CPU): full 2.143, 4 sinks 2.169, none 2.726 nats a token.
    assert nll[4] < nll["full"] + 0.1
    assert nll[0] > nll[4] + 0.3


def test_a_window_generates_with_bounded_memory(real_model):
    model, tokenizer = real_model("smollm2")
    ids, reserved = ids_of(tokenizer, 100), []
    cache = make_cache(model, "sliding_window", sliding_window=60, num_sink_tokens=4)
    for _ in range(3):
        ids = model.generate(ids, max_new_tokens=60, min_new_tokens=60, do_sample=False, **{CACHE_ARG: cache})
        reserved.append(cache.report().reserved_bytes)
        assert {layer.stored_length for layer in cache.layers} == {64}
    assert max(reserved) <= 1.1 * min(reserved)
    assert ids.shape[1] == 280


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cache_name", ["blocks", "fp8"])
def test_a_saved_conversation_goes_on_with_the_same_bits(cache_name, name, real_model, tmp_path):
    model, tokenizer = real_model(name)
    cache = make_cache(model, cache_name)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    ids = model.generate(ids_of(tokenizer, 600), **options, **{CACHE_ARG: cache})
    cache.save(tmp_path / "chat")
    assert 0 < (tmp_path / "chat").stat().st_size - cache.report().stored_bytes < 120_000
    turn = torch.cat([ids, ids_of(tokenizer, 9, skip=700)], dim=1)
    options |= {"return_dict_in_generate": True, "output_logits": True}
    loaded = load_cache(model, tmp_path / "chat")
    one, other = (model.generate(turn, **options, **{CACHE_ARG: each}) for each in (cache, loaded))
    assert torch.equal(one.sequences, other.sequences)
    assert all(torch.equal(*pair) for pair in zip(one.logits, other.logits, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_question_needs_is_kept(name, real_model):
    """The prompt ends with the question: a tenth of the tokens, chosen by it, says nearly what all of them say."""
    model, tokenizer = real_model(name)
    text = tokenizer.decode(ids_of(tokenizer, PROMPT)[0], skip_special_tokens=True)
    half = len(text) // 2
    fact = " The special magic number for harbour is 48213. "
    question = (
        "\n\nQuestion: What is the special magic number for harbour?\nAnswer: The special magic number for harbour is"
    )
    ids = tokenizer(text[:half] + fact + text[half:] + question, return_tensors="pt").input_ids
    hf_kvcache.enable()
    outputs = {}
    for policy in ("snapkv", "random"):
        options = {"cache_implementation": policy, "cache_config": {"keep_ratio": 0.1}, "return_dict_in_generate": True}
        output = model.generate(ids, max_new_tokens=8, do_sample=False, **options)
        outputs[policy] = tokenizer.decode(output.sequences[0, ids.shape[1] :])
        cache = getattr(output, CACHE_ARG, None) or output.past_key_values
        evicting = [layer for layer in cache.layers if not layer.is_sliding]
        assert len(evicting) == (len(cache.layers) // 6 if name == "gemma3" else len(cache.layers))
        assert all(layer.stored_length <= 0.11 * ids.shape[1] + 8 for layer in evicting)
    assert "48213" in outputs["snapkv"]
    if name == "smollm2":  # for Gemma the number lies within the window of its local layers
        assert "48213" not in outputs["random"]


@pytest.mark.parametrize("cache_name", ["index", "index+int8", "quest+int8"])
def test_what_an_answer_needs_is_read(cache_name, real_model):
    """A tenth of the tokens, chosen anew by each query, exact or encoded, holds the number that the prompt asks for."""
    model, tokenizer = real_model("smollm2")
    text = tokenizer.decode(ids_of(tokenizer, PROMPT)[0], skip_special_tokens=True)
    half = len(text) // 2
    fact = " The special magic number for harbour is 48213. "
    question = (
        "\n\nQuestion: What is the special magic number for harbour?\nAnswer: The special magic number for harbour is"
    )
    ids = tokenizer(text[:half] + fact + text[half:] + question, return_tensors="pt").input_ids
    hf_kvcache.enable()
    options = {"cache_implementation": cache_name, "cache_config": {"keep_ratio": 0.1}, "return_dict_in_generate": True}
    output = model.generate(ids, max_new_tokens=8, do_sample=False, **options)
    assert "48213" in tokenizer.decode(output.sequences[0, ids.shape[1] :])
    cache = getattr(output, CACHE_ARG, None) or output.past_key_values
    assert cache.report().read_ratio < 0.8
