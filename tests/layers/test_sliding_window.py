"""Sinks and a window on models trained with full attention, against a plain mask (and plain re-rotated keys)."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import hf_kvcache
from hf_kvcache import CACHE_ARG, make_cache
from hf_kvcache.layers.sliding_window import SinkWindowLayer

pytestmark = pytest.mark.core

LENGTH, PADDED = 41, [41, 30, 38]
CHUNKS = {"whole": [41], "mixed": [20, 1, 1, 1, 18], "sevens": [7, 7, 7, 7, 7, 6], "decode": [3, *[1] * 38]}
ALL_GLOBAL = {"layer_types": ["full_attention"] * 2}
MODELS = {
    "llama": {},
    "qwen3": {},
    "mixtral": {},
    "gpt_oss": ALL_GLOBAL,  # sink logits
    "gemma2": ALL_GLOBAL,  # softcap
    "gemma3": ALL_GLOBAL,
}


def window(**options) -> dict:
    return {"sliding_window": 8, "num_sink_tokens": 4, "block_size": 3} | options


def allowed(mask: torch.Tensor, sliding_window: int, num_sink_tokens: int) -> torch.Tensor:
    """What each query may see, `[B, 1, T, T]`: its window, and the first real tokens of its row."""
    query, key = torch.arange(mask.shape[1])[:, None], torch.arange(mask.shape[1])[None]
    first = mask.argmax(-1)[:, None, None]
    causal = (key <= query)[None] & mask.bool()[:, None]
    return (causal & ((key > query - sliding_window)[None] | (key[None] < first + num_sink_tokens)))[:, None]


@torch.no_grad()
def masked_logits(model, ids, mask, sliding_window, num_sink_tokens) -> torch.Tensor:
    """The oracle: full attention without a cache, under an explicit mask."""
    seen = allowed(mask, sliding_window, num_sink_tokens)
    if model.config._attn_implementation == "eager":
        seen = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(ids, attention_mask=seen, position_ids=positions, use_cache=False).logits


@pytest.fixture(params=[False, True], ids=["full", "padded"])
def batch(request, make_ids, left_pad):
    return left_pad(make_ids(3, LENGTH), PADDED if request.param else [LENGTH] * 3)


# Of the logits, which reach 0.7. Another softmax order moves the last bits only; the mask moves them by 1e-1.
CLOSE = {"atol": 1e-5, "rtol": 0.0}


@pytest.mark.parametrize("size", [(8, 4), (8, 0), (1, 1), (5, 12), (64, 4)], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_full_attention_under_the_mask(name, attention, size, batch, tiny_model, run):
    model, (ids, mask) = tiny_model(name, **MODELS[name]), batch
    model.set_attn_implementation("eager" if name in ("gpt_oss", "gemma2") else attention)
    expected = masked_logits(model, ids, mask, *size)
    for chunks in CHUNKS.values():
        cache = make_cache(model, "sliding_window", **window(sliding_window=size[0], num_sink_tokens=size[1]))
        logits = run(model, cache, ids, mask if (mask == 0).any() else None, chunks=chunks)
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **CLOSE)


def rotate(states: torch.Tensor, position: int, theta: float = 10000.0) -> torch.Tensor:
    half = states.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)
    return states * cos + torch.cat([-states[..., half:], states[..., :half]], dim=-1) * sin


def reference_attention(first: list[int], sliding_window: int, num_sink_tokens: int):
    """Row by row, query by query: the sinks are seen as if the tokens between them and the window did not exist."""

    def attention(module, query, key, value, mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        output = torch.zeros(query.shape).transpose(1, 2)
        for row, begin in enumerate(first):
            sinks_end = begin + num_sink_tokens
            for i in range(begin, query.shape[2]):
                oldest = max(begin, i - sliding_window + 1)
                sinks = list(range(begin, min(sinks_end, oldest)))
                near = rotate(query[row, :, i], -max(0, oldest - sinks_end))
                scores = torch.cat(
                    [
                        torch.einsum("hd,htd->ht", near, key[row, :, sinks]),
                        torch.einsum("hd,htd->ht", query[row, :, i], key[row, :, oldest : i + 1]),
                    ],
                    dim=-1,
                )
                values = torch.cat([value[row, :, sinks], value[row, :, oldest : i + 1]], dim=1)
                output[row, i] = torch.einsum("ht,htd->hd", (scores * scaling).softmax(-1), values)
        return output, None

    return attention


@pytest.mark.parametrize("chunks", CHUNKS)
def test_cache_positions_equal_the_reference(batch, chunks, tiny_model, run):
    model, (ids, mask) = tiny_model("llama"), batch
    AttentionInterface.register("by_hand", reference_attention(mask.argmax(-1).tolist(), 8, 3))
    AttentionMaskInterface.register("by_hand", sdpa_mask)
    model.set_attn_implementation("by_hand")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation("sdpa")
    options = window(num_sink_tokens=3)
    logits = run(
        model, make_cache(model, "sliding_window", positions="cache", **options), ids, mask, chunks=CHUNKS[chunks]
    )
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **CLOSE)
    original = run(model, make_cache(model, "sliding_window", **options), ids, mask)
    assert (original - expected)[mask.bool()].abs().max() > 1e-3, "positions='cache' changes nothing here"


@pytest.mark.parametrize(
    ("options", "windowed"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"layers": [1, 4]}, [1, 4]),
        ({"layers": []}, []),
        ({"global_every": 3}, [0, 1, 3, 4]),
        ({"global_every": 1}, []),
    ],
    ids=str,
)
def test_the_chosen_layers_get_the_window(options, windowed, tiny_model, make_ids, run):
    model = tiny_model("llama", num_hidden_layers=6)
    cache = make_cache(model, "sliding_window", **window(**options))
    assert [i for i, layer in enumerate(cache.layers) if isinstance(layer, SinkWindowLayer)] == windowed
    run(model, cache, make_ids(1, 41), chunks=[40, 1])
    assert [layer.stored_length for layer in cache.layers] == [12 if i in windowed else 41 for i in range(6)]


def test_layers_that_have_no_full_attention_get_none(tiny_model):
    model = tiny_model("gemma3")
    assert [type(layer).__name__ for layer in make_cache(model, "sliding_window").layers] == [
        "SlidingBlockLayer",
        "SinkWindowLayer",
    ]
    with pytest.raises(ValueError, match=r"layers=\[0, 7\] cannot get a window: .* full-attention layers are \[1\]"):
        make_cache(model, "sliding_window", layers=[0, 1, 7])


@pytest.mark.parametrize("positions", ["original", "cache"])
def test_memory_is_bounded_far_past_the_trained_context(positions, tiny_model, make_ids):
    model = tiny_model("llama", max_position_embeddings=32)
    cache, ids = make_cache(model, "sliding_window", **window(positions=positions)), make_ids(2, 5)
    reserved, options = [], {"do_sample": False, "max_new_tokens": 30}
    for _ in range(6):
        ids = model.generate(ids, **options, **{CACHE_ARG: cache})
        assert all(layer.stored_length == 12 for layer in cache.layers)
        reserved.append(cache.report().reserved_bytes)
    assert cache.get_seq_length() == 5 + 6 * 30 - 1 > 5 * 32
    assert max(reserved) <= 1.25 * reserved[0], "memory grows with the text"
    hf_kvcache.enable()
    names = {"cache_implementation": "sliding_window", "cache_config": window(positions=positions)}
    assert torch.equal(model.generate(ids[:, :5], do_sample=False, max_new_tokens=180, **names), ids)


@pytest.mark.parametrize("mode", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": True}], ids=["lookup", "model"])
@pytest.mark.parametrize("positions", ["original", "cache"])
def test_assisted_decoding_takes_tokens_back_across_the_window(mode, positions, tiny_model, make_ids):
    model, ids = tiny_model("llama"), make_ids(1, 7).repeat(1, 2)
    if "assistant_model" in mode:
        mode = {"assistant_model": tiny_model("llama", seed=1)}
    options = {"do_sample": False, "max_new_tokens": 60}
    new = lambda: make_cache(model, "sliding_window", **window(positions=positions))  # noqa: E731
    expected = model.generate(ids, **options, **{CACHE_ARG: new()})
    assert torch.equal(model.generate(ids, **options, **mode, **{CACHE_ARG: new()}), expected)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_recorded_tokens_are_taken_back_sinks_included(count, tiny_model, make_ids, left_pad, run):
    model = tiny_model("llama")
    ids, mask = left_pad(make_ids(2, 31), [31, 23])
    wrong = make_ids(2, 9, seed=1)
    for past in (2, 10, 22):
        cache = make_cache(model, "sliding_window", **window())
        run(model, cache, ids[:, :past], mask[:, :past])
        cache.activate_past_recording()
        run(model, cache, wrong[:, :count], torch.cat([mask[:, :past], torch.ones_like(wrong[:, :count])], 1))
        cache.crop(-count)
        cache.stop_past_recording()
        logits = run(model, cache, ids[:, past:], mask, chunks=[1, 30 - past])
        expected = run(model, make_cache(model, "sliding_window", **window()), ids, mask)[:, past:]
        torch.testing.assert_close(logits[mask[:, past:].bool()], expected[mask[:, past:].bool()], **CLOSE)


def test_tokens_that_left_the_window_cannot_come_back(tiny_model, make_ids, run):
    model = tiny_model("llama")
    cache = make_cache(model, "sliding_window", **window())
    run(model, cache, make_ids(1, 41), chunks=[40, 1])
    cache.crop(-1)
    with pytest.raises(RuntimeError, match=r"SinkWindowLayer cannot take back 5 tokens: .* activate_past_recording"):
        cache.crop(-5)
    assert [layer.seen for layer in cache.layers] == [40, 40]


class TestRefusals:
    @pytest.mark.parametrize(("length", "mask"), [(20, None), (1, torch.ones(1, 1))], ids=["prompt", "padded step"])
    def test_an_attention_that_cannot_take_our_mask(self, length, mask, tiny_model):
        layer = make_cache(tiny_model("llama"), "sliding_window", **window()).layers[0]
        module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="flash_attention_2"))
        states = torch.randn(1, 2, length, 16)
        layer.update(states, states, kwargs={})
        with pytest.raises(NotImplementedError, match="attn_implementation='flash_attention_2': load the model with"):
            layer.attend(pytest.fail, module, torch.randn(1, 4, length, 16), states, states, mask)

    def test_a_model_that_changes_what_its_cache_returns(self, tiny_model):
        with pytest.raises(NotImplementedError, match="DeepseekV3Attention changes the keys and values"):
            make_cache(tiny_model("deepseek_v3"), "sliding_window")

    @pytest.mark.parametrize("rope", ["dynamic", "longrope"])
    def test_positions_that_depend_on_the_length(self, rope, tiny_model):
        parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
        if rope == "longrope":
            parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128}
        model = tiny_model("llama", rope_parameters=parameters)
        with pytest.raises(NotImplementedError, match=rf"rope_type='{rope}' changes with length"):
            make_cache(model, "sliding_window", positions="cache")
        make_cache(model, "sliding_window", positions="original")

    @pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
    def test_an_attention_that_cannot_be_merged(self, name, tiny_model, make_ids, run):
        model = tiny_model(name, **ALL_GLOBAL)
        model.set_attn_implementation("eager")
        cache = make_cache(model, "sliding_window", positions="cache", **window())
        with pytest.raises(NotImplementedError, match="does not allow: use attn_implementation='sdpa'"):
            run(model, cache, make_ids(1, 20), chunks=[10, 10])

    def test_a_cache_whose_hooks_were_removed(self, tiny_model, make_ids, run):
        model = tiny_model("llama")
        cache = make_cache(model, "sliding_window", **window())
        run(model, cache, make_ids(1, 20))
        hf_kvcache.disable()
        with pytest.raises(RuntimeError, match=r"hf_kvcache.enable\(\) in force"):
            run(model, cache, make_ids(1, 1))
