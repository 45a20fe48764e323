"""The cache "transform": keys coded without their rotary embedding, by the positions of each row, in all uses."""

import copy

import pytest
import torch
from transformers import DynamicCache

import hf_kvcache
from hf_kvcache import calibrate, make_cache
from hf_kvcache.quantization.coded_layer import CodedLayer

pytestmark = pytest.mark.core

# Groups are of 128 tokens: a row of 300 has two of them and an exact tail.
LENGTH = 300
EXACT = {"residual_length": 24, "num_sink_tokens": 4}
FINE = EXACT | {"key_bits": 8, "value_bits": 4}


@pytest.fixture(scope="module")
def fitted(tiny_model, make_ids):
    """`fitted(name)`: a tiny model and the options of its transform cache, calibrated on random tokens."""
    known = {}

    def build(name: str, **config):
        key = (name, str(config))
        if key not in known:
            model = tiny_model(name, max_position_embeddings=1024, **config)
            known[key] = model, {"calibration": calibrate(model, make_ids(1, 600, seed=9))}
        return known[key]

    return build


class _Decoded(DynamicCache):
    """Oracle: a full cache over the decoded form of a coded cache, sinks exact, with the model's own attention."""

    def __init__(self, coded, config):
        super().__init__(config=config)
        for index, layer in enumerate(coded.layers):
            states = [layer.keys.clone(), layer.values.clone()]
            for state, sink in zip(states, layer.sinks.states, strict=True):
                state.scatter_(2, layer.sinks.slots[:, None, :, None].expand_as(sink), sink)
            self.update(*states, index)


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("chunks", [[1], [7]], ids=["decode", "chunk"])
def test_attention_equals_full_attention_over_decoded_states(
    is_padded, attention, chunks, fitted, make_ids, left_pad, run
):
    model, options = fitted("llama")
    model.set_attn_implementation(attention)
    new = chunks[0]
    ids, mask = left_pad(make_ids(3, LENGTH + new), [LENGTH + new, 200, 140] if is_padded else [10**6] * 3)
    mask = mask if is_padded else None
    cache = make_cache(model, "transform", **EXACT, **options)
    run(model, cache, ids[:, :LENGTH], None if mask is None else mask[:, :LENGTH])
    assert cache.layers[0].coded_length == 256
    oracle = _Decoded(cache, model.config)
    got = run(model, cache, ids[:, LENGTH:], mask)
    torch.testing.assert_close(got, run(model, oracle, ids[:, LENGTH:], mask), rtol=1e-4, atol=1e-5)


MODELS = ["llama", "qwen2", "qwen3", "gemma3", "olmo2", "phi3", "falcon_h1", "gpt_oss", "mqa", "partial", "wide"]
_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
CONFIGS = {
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "partial": ("phi3", {"rope_parameters": _HALF}),
    "wide": ("llama", {"head_dim": 80}),
}


@pytest.mark.parametrize("name", MODELS)
def test_decoded_states_are_close_to_the_models_own(name, fitted, make_ids, run):
    """Under attention bias, normed keys, partial and full rotation, one KV head, a head dimension that is no power."""
    base, config = CONFIGS.get(name, (name, {}))
    model, options = fitted(base, **config)
    ids, errors = make_ids(2, LENGTH), {}
    full = DynamicCache(config=model.config)
    run(model, full, ids)
    for key_bits in (1, 3, 7):
        cache = make_cache(model, "transform", **EXACT, key_bits=key_bits, value_bits=4, **options)
        run(model, cache, ids)
        layer = cache.layers[1]
        part = getattr(layer, "attention", layer)
        assert isinstance(part, CodedLayer)
        keys, values = (s[:, :, 4:256] for s in (full.layers[1].keys, full.layers[1].values))
        centred = keys - keys.mean(2, keepdim=True)
        errors[key_bits] = ((part.keys[:, :, 4:256] - keys).norm() / centred.norm()).item()
        assert (part.values[:, :, 4:256] - values).norm() < 0.15 * values.norm()
        assert torch.equal(part.keys[:, :, 256:], full.layers[1].keys[:, :, 256:])
    assert errors[7] < 0.03
    assert 3 * errors[7] < errors[3] < errors[1] / 1.5 < 0.7


@pytest.mark.parametrize("lengths", [[300, 300], [300, 171]])
def test_positions_are_those_of_each_row(lengths, fitted, make_ids, left_pad, run):
    """A row decodes to the same keys whatever padding is before it (all but tokens in other groups than alone)."""
    model, options = fitted("llama")
    ids, mask = left_pad(make_ids(2, 300), lengths)
    cache = make_cache(model, "transform", **FINE, **options)
    run(model, cache, ids, mask)
    first = 300 - lengths[1]
    alone = make_cache(model, "transform", **FINE, **options)
    run(model, alone, ids[1:, first:])
    # The first layer's keys depend on tokens and positions alone, so they are the same bytes coded and decoded.
    common = slice(first + 4, first + 128)
    together = cache.layers[0].keys[1, :, common]
    differs = (together - alone.layers[0].keys[0, :, 4:128]).abs() > 1e-4
    assert differs.float().mean() < 0.02, "beyond a token whose scale was on the edge"


def test_coarse_keys_are_coded_where_they_vary_least(fitted, make_ids, left_pad, run):
    """Turned back by wrong positions, keys would not fit the calibration: their error would be far larger."""
    model, options = fitted("llama")
    ids, mask = left_pad(make_ids(1, 300, seed=9), [172])
    full = DynamicCache(config=model.config)
    run(model, full, ids, mask)
    errors = []
    for positions in ("right", "wrong"):
        cache = make_cache(model, "transform", **EXACT, key_bits=1.5, **options)
        if positions == "wrong":
            # Without position_ids, the model itself counts padding.
            with torch.no_grad():
                model(ids, attention_mask=mask, use_cache=True, **{hf_kvcache.CACHE_ARG: cache})
            reference = DynamicCache(config=model.config)
            with torch.no_grad():
                model(ids, attention_mask=mask, use_cache=True, **{hf_kvcache.CACHE_ARG: reference})
        else:
            run(model, cache, ids, mask)
            reference = full
        keys = reference.layers[0].keys[:, :, 132:256]
        errors.append((cache.layers[0].keys[:, :, 132:256] - keys).square().mean().item())
    assert errors[0] < 0.9 * errors[1]


def test_a_large_key_bias_costs_nothing(tiny_model, make_ids, run):
    """Qwen2's k_proj bias is the same for all tokens before the rotation, so it is part of the mean."""
    errors = []
    for bias in (0.0, 60.0):
        model, ids = tiny_model("qwen2", max_position_embeddings=1024), make_ids(2, LENGTH)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.bias[::7] += bias
        cache = make_cache(model, "transform", **EXACT, key_bits=3, calibration=calibrate(model, make_ids(1, 600, 9)))
        full = DynamicCache(config=model.config)
        run(model, cache, ids)
        run(model, full, ids)
        errors.append((cache.layers[0].keys - full.layers[0].keys)[:, :, 4:256].norm().item())
    assert errors[1] < 1.3 * errors[0]


def test_equals_the_full_cache_while_nothing_is_encoded(fitted, make_ids):
    model, options = fitted("llama")
    ids = make_ids(2, 60)
    hf_kvcache.enable()
    arguments = {"max_new_tokens": 40, "do_sample": False}
    expected = model.generate(ids, **arguments)
    got = model.generate(ids, **arguments, cache_implementation="transform", cache_config=options)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 133}, {}])
def test_many_bits_generate_what_the_full_cache_does(mode, fitted, make_ids):
    model, options = fitted("llama")
    # A text on which no two tokens are so near to each other that 4-bit values could swap them.
    ids = make_ids(1, LENGTH, seed=7)
    hf_kvcache.enable()
    arguments = {"max_new_tokens": 8, "do_sample": False} | mode
    expected = model.generate(ids, **arguments)
    got = model.generate(ids, cache_implementation="transform", cache_config=FINE | options, **arguments)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("count", [5, 60, 200])
def test_crop_takes_back(count, fitted, make_ids, run):
    model, options = fitted("llama")
    ids = make_ids(2, LENGTH)
    cache = make_cache(model, "transform", **FINE, **options)
    run(model, cache, ids)
    cache.activate_past_recording()
    kept = cache.layers[1].keys[:, :, : LENGTH - count].clone()
    cache.crop(-count)
    assert torch.equal(cache.layers[1].keys, kept)
    got = run(model, cache, ids[:, LENGTH - count :])
    expected = run(model, DynamicCache(config=model.config), ids)[:, -count:]
    # As exact as 4-bit values.
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-2)


def test_old_blocks_never_change_and_chunks_do_not_matter(fitted, make_ids, run):
    model, options = fitted("llama")
    ids = make_ids(2, LENGTH + 130)
    cache = make_cache(model, "transform", **EXACT, **options)
    run(model, cache, ids[:, :LENGTH], chunks=[5, 133, 1, 161])
    before = [plane.clone() for plane in cache.layers[0].coded.materialize()]
    run(model, cache, ids[:, LENGTH:], chunks=[1] * 130)
    assert cache.layers[0].coded_length == 384
    whole = make_cache(model, "transform", **EXACT, **options)
    run(model, whole, ids)
    for old, new, other in zip(
        before, cache.layers[0].coded.materialize(), whole.layers[0].coded.materialize(), strict=True
    ):
        assert torch.equal(new[:, :, :2], old[:, :, :2])
        assert (new != other).float().mean() < 1e-3, "another chunking gave other codes, beyond rounding"


def test_bits_a_value_are_those_of_the_live_storages(fitted, make_ids, run):
    model, options = fitted("llama")
    cache = make_cache(model, "transform", **EXACT, key_bits=2.25, **options)
    run(model, cache, make_ids(1, LENGTH))
    layer, arena = cache.layers[0], cache.layers[0].coded.arena
    # Keys: their bits and 8 a token and head; values: 2 bits and a float16 scale a token and head. Heads of 16.
    assert layer.marginal_bits == ((2.25 + 8 / 16) + (2 + 16 / 16)) / 2
    assert arena.num_used_blocks * arena.block_bytes * 8 == layer.marginal_bits * 256 * layer.values_per_token
    report = cache.report()
    assert report.marginal_bits_per_value == layer.marginal_bits
    assert report.reserved_bytes == hf_kvcache.measure(cache)


def test_beams_fork_copy_move_reset(fitted, make_ids, run):
    model, options = fitted("llama")
    ids, more = make_ids(2, LENGTH), make_ids(2, 130, seed=1)
    cache = make_cache(model, "transform", **EXACT, **options)
    run(model, cache, ids)
    others = [cache.fork(), copy.deepcopy(cache), cache.to("cpu")]
    expected = run(model, others[1].fork(), more, chunks=[1, 129])
    for other in others:
        torch.testing.assert_close(run(model, other, more, chunks=[1, 129]), expected)
    swapped = make_cache(model, "transform", **EXACT, **options)
    run(model, swapped, ids)
    swapped.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(run(model, swapped, more.flip(0), chunks=[1, 129]), expected.flip(0))
    cache.reset()
    torch.testing.assert_close(
        run(model, cache, ids), run(model, make_cache(model, "transform", **EXACT, **options), ids)
    )


def test_padding_is_followed_by_beams(fitted, make_ids, left_pad, run):
    """First real slots move with their rows."""
    model, options = fitted("llama")
    ids, mask = left_pad(make_ids(2, LENGTH), [LENGTH, 170])
    cache = make_cache(model, "transform", **(EXACT | {"num_sink_tokens": 0}), **options)
    run(model, cache, ids, mask)
    keys = cache.layers[0].keys.clone()
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(cache.layers[0].keys, keys[[1, 1]])


def test_half_precision_is_decoded_to_its_own_dtype(fitted, make_ids, run):
    model, options = fitted("llama")
    model = copy.deepcopy(model).to(torch.bfloat16)
    cache = make_cache(model, "transform", **EXACT, **options)
    logits = run(model, cache, make_ids(2, LENGTH), chunks=[LENGTH - 1, 1])
    assert cache.layers[0].keys.dtype == logits.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()


def test_bad_options_name_what_is_allowed(fitted):
    model, options = fitted("llama")
    for key_bits in (0, 9, True, "2", float("nan")):
        with pytest.raises(ValueError, match=r"key_bits=.* is not allowed .* a number from 0.25 to 8"):
            make_cache(model, "transform", key_bits=key_bits, **options)
    with pytest.raises(ValueError, match=r"value_bits=1 is not allowed .* one of 2, 3, 4"):
        make_cache(model, "transform", value_bits=1, **options)
