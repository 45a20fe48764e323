"""Quantized caches: attention on the stored form against an oracle, bytes that never change, and all of generate()."""

import copy
import importlib.util
import warnings

import pytest
import torch
from transformers import DynamicCache

import hf_kvcache
from hf_kvcache import make_cache
from hf_kvcache.blocks import BlockTable
from hf_kvcache.kernels import decode, native
from hf_kvcache.quantization.coded_layer import CodedLayer

pytestmark = pytest.mark.core

# Small groups, so that a short text has several and an exact tail besides. All models here have head_dim 16 or 32.
OPTIONS = {"q_group_size": 16, "residual_length": 24, "num_sink_tokens": 4}
TOKENS = 40
LENGTH = 111


@pytest.fixture(params=["kernel", "sliced"])
def path(request):
    """The two ways to read encoded tokens: in place by the compiled kernel, or decoded a slice at a time."""
    request.getfixturevalue("kernel" if request.param == "kernel" else "no_kernel")
    return request.param


@pytest.fixture
def kernel_calls(monkeypatch):
    """One entry for each call of the compiled kernel."""
    calls = []

    def attend(*args, **kwargs):
        calls.append(args)
        return decode_attend(*args, **kwargs)

    decode_attend = decode.attend
    monkeypatch.setattr(decode, "attend", attend)
    return calls


class _Decoded(DynamicCache):
    """Oracle: a full cache over the decoded form of a coded cache, sinks exact, with the model's own attention."""

    def __init__(self, coded, config):
        super().__init__(config=config)
        for index, layer in enumerate(coded.layers):
            states = [layer.keys.clone(), layer.values.clone()]
            for state, sink in zip(states, layer.sinks.states, strict=True):
                slots = layer.sinks.slots[:, None, :, None].expand_as(sink)
                state.scatter_(2, slots, sink)
            self.update(*states, index)


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("chunks", [[1], [7]], ids=["decode", "chunk"])
def test_attention_equals_full_attention_over_decoded_states(
    name, is_padded, attention, chunks, path, kernel_calls, tiny_model, make_ids, left_pad, run
):
    model = tiny_model("llama")
    model.set_attn_implementation(attention)
    ids, mask = left_pad(make_ids(3, LENGTH + chunks[0]), [LENGTH + chunks[0], 90, 77] if is_padded else [10**6] * 3)
    mask = mask if is_padded else None
    cache = make_cache(model, name, **OPTIONS)
    run(model, cache, ids[:, :LENGTH], None if mask is None else mask[:, :LENGTH])
    assert cache.layers[0].coded_length == 80
    oracle = _Decoded(cache, model.config)
    got = run(model, cache, ids[:, LENGTH:], mask)
    torch.testing.assert_close(got, run(model, oracle, ids[:, LENGTH:], mask), rtol=1e-4, atol=1e-5)
    is_served = path == "kernel" and attention == "sdpa" and chunks == [1]
    assert len(kernel_calls) == (2 if is_served else 0)


@pytest.mark.parametrize("name", ["fp8", "turboquant", "nf4", "bnb8"])
def test_codecs_of_other_groups_are_read_in_place(name, path, kernel_calls, tiny_model, make_ids, left_pad, run):
    if name in ("nf4", "bnb8"):
        pytest.importorskip("bitsandbytes")
    model = tiny_model("llama", head_dim=64)
    ids, mask = left_pad(make_ids(2, 200), [200, 190])
    cache = make_cache(model, name, residual_length=24, num_sink_tokens=4)
    run(model, cache, ids[:, :-1], mask[:, :-1])
    assert cache.layers[0].coded_length >= 128
    oracle = _Decoded(cache, model.config)
    got = run(model, cache, ids[:, -1:], mask)
    torch.testing.assert_close(got, run(model, oracle, ids[:, -1:], mask), rtol=1e-4, atol=1e-5)
    assert len(kernel_calls) == (2 if path == "kernel" and name != "bnb8" else 0)  # a table of 256 is too long for it


@pytest.mark.parametrize(
    ("bits", "num_runs"),
    [([[[2, 4, 4, 4], 4], 8], 2 + 1), ([[[4, 4, 8, 8], [8, 2, 2, 2]], [4, [2, 4, 2, 4]]], 3 + 4)],
    ids=["keys", "both"],
)
def test_heads_of_other_widths_are_read_in_place(
    bits, num_runs, path, kernel_calls, tiny_model, make_ids, left_pad, run
):
    """A call of the kernel for each run of neighbouring heads whose keys and values have the same widths."""
    model = tiny_model("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    ids, mask = left_pad(make_ids(3, LENGTH), [LENGTH, 90, 77])
    cache = make_cache(model, "int4", bits=bits, **OPTIONS)
    run(model, cache, ids[:, :-1], mask[:, :-1])
    oracle = _Decoded(cache, model.config)
    got = run(model, cache, ids[:, -1:], mask)
    torch.testing.assert_close(got, run(model, oracle, ids[:, -1:], mask), rtol=1e-4, atol=1e-5)
    assert len(kernel_calls) == (num_runs if path == "kernel" else 0)


def test_the_kernel_reads_the_groups_of_beams_where_they_lie(kernel, tiny_model, make_ids, monkeypatch):
    """Beams that crossed over share some groups and own others: no plane of the groups is copied for a step."""
    model, ids = tiny_model("llama"), make_ids(2, LENGTH)
    hf_kvcache.enable()
    arguments = {"max_new_tokens": TOKENS, "do_sample": False, "num_beams": 4, "cache_implementation": "int8"}
    arguments |= {"cache_config": OPTIONS | {"block_size": 3}}
    materialize = BlockTable.materialize

    def only_the_tail(self, begin=None):
        assert self.arena.block_size == 3, "encoded groups were gathered"
        return materialize(self, begin)

    monkeypatch.setattr(BlockTable, "materialize", only_the_tail)
    got = model.generate(ids, **arguments)
    monkeypatch.undo()
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "warn_of_no_library", lambda: None)
    assert torch.equal(got, model.generate(ids, **arguments))


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "fp8", "turboquant"])
def test_equals_the_full_cache_while_nothing_is_encoded(name, tiny_model, make_ids):
    model, ids = tiny_model("llama"), make_ids(2, 60)
    hf_kvcache.enable()
    options = {"residual_length": 128} | ({"q_group_size": 16} if name.startswith("int") else {})
    expected = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    got = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, cache_implementation=name, cache_config=options)
    assert torch.equal(got, expected)


def test_old_blocks_never_change(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(2, LENGTH + 60)
    cache = make_cache(model, "int4", **OPTIONS)
    run(model, cache, ids[:, :LENGTH])
    layer = cache.layers[0]
    before = [plane.clone() for plane in layer.coded.materialize()]
    run(model, cache, ids[:, LENGTH:], chunks=[1] * 60)
    assert layer.coded_length > 80
    for old, new in zip(before, layer.coded.materialize(), strict=True):
        assert torch.equal(new[:, :, : old.shape[2]], old)


def test_bits_a_value_are_those_of_the_live_storages(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(1, 63)
    cache = make_cache(model, "int4", **OPTIONS)
    run(model, cache, make_ids(1, 200))
    layer = cache.layers[0]
    values = layer.coded_length * 2 * 2 * 16  # keys and values, 2 heads of 16
    arena = layer.coded.arena
    assert layer.marginal_bits == 4 + 32 / 16
    assert arena.num_used_blocks * arena.block_bytes * 8 / values == layer.marginal_bits
    full = DynamicCache(config=model.config)
    run(model, full, make_ids(1, 200))
    report = cache.report()
    assert report.marginal_bits_per_value == layer.marginal_bits
    assert report.bits_per_value == 8 * report.stored_bytes / (200 * 2 * 2 * 2 * 16)
    assert report.dynamic_bytes == hf_kvcache.measure(full)
    assert report.stored_bytes < 0.4 * report.dynamic_bytes
    del ids


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_huge_sinks_do_not_coarsen_their_group(is_padded, tiny_model, make_ids, left_pad, run):
    model = tiny_model("llama")
    _, mask = left_pad(make_ids(2, 64), [64, 50] if is_padded else [64, 64])
    caches = []
    for scale in (1, 100):
        cache = make_cache(model, "int4", q_group_size=16, residual_length=0)
        layer = cache.layers[0]
        states = torch.randn(2, 2, 64, 16, generator=torch.Generator().manual_seed(0))
        first = mask.argmax(-1)
        for row, slot in enumerate(first.tolist()):
            states[row, :, : slot + 4] *= scale
        layer.lazy_initialization(states, states)
        layer.seen = 64
        visible = mask.bool()[:, None, None, :].expand(-1, 1, 64, -1)
        layer._advance((states, states), visible if is_padded else None, lambda tail: None)
        caches.append((layer, states))
    (plain, _), (huge, states) = caches
    rest = slice(int(first.max()) + 4, 64)
    assert torch.equal(plain.keys[:, :, rest], huge.keys[:, :, rest])
    assert torch.equal(huge.sinks.states[0][1], states[1, :, int(first[1]) : int(first[1]) + 4])


def test_a_prompt_is_not_kept_in_full_precision(tiny_model, make_ids, run):
    model = tiny_model("llama")
    cache = make_cache(model, "int8", **OPTIONS)
    run(model, cache, make_ids(1, 1000))
    tail = cache.layers[0].table
    assert tail.length < 24 + 16
    assert tail.arena.num_blocks * tail.arena.block_size < 64


@pytest.mark.parametrize("count", [5, 20, 40])
def test_crop_takes_back(count, tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(2, LENGTH)
    cache = make_cache(model, "int8", **OPTIONS)
    run(model, cache, ids)
    cache.activate_past_recording()
    kept = cache.layers[1].keys[:, :, : LENGTH - count].clone()
    cache.crop(-count)
    layer = cache.layers[1]
    assert layer.get_seq_length() == LENGTH - count
    assert torch.equal(layer.keys, kept)
    got = run(model, cache, ids[:, LENGTH - count :])
    # Tokens of a group that was opened again are as exact as int8: the logits are those of the full cache to 1e-2.
    full = DynamicCache(config=model.config)
    expected = run(model, full, ids)[:, -count:]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 33}, {}])
def test_int8_generates_what_the_full_cache_does(mode, tiny_model, make_ids):
    model, ids = tiny_model("llama"), make_ids(1, LENGTH)
    hf_kvcache.enable()
    arguments = {"max_new_tokens": TOKENS, "do_sample": False} | mode
    expected = model.generate(ids, **arguments)
    got = model.generate(ids, cache_implementation="int8", cache_config=OPTIONS, **arguments)
    assert torch.equal(got, expected)


def test_local_layers_stay_exact_windows(tiny_model, make_ids, run):
    model = tiny_model("gemma3")
    cache = make_cache(model, "int4", **OPTIONS)
    run(model, cache, make_ids(1, LENGTH))
    assert not isinstance(cache.layers[0], CodedLayer)
    assert isinstance(cache.layers[1], CodedLayer)
    assert cache.layers[0].stored_length <= 9
    assert cache.report().marginal_bits_per_value == cache.layers[1].marginal_bits == 6


def test_reuse_fork_copy_reset(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(1, LENGTH)
    cache = make_cache(model, "int4", **OPTIONS)
    run(model, cache, ids)
    others = [cache.fork(), copy.deepcopy(cache), cache.to("cpu")]
    expected = run(model, others[1].fork(), make_ids(1, 30, seed=1), chunks=[1] * 30)
    for other in others:
        torch.testing.assert_close(run(model, other, make_ids(1, 30, seed=1), chunks=[1] * 30), expected)
    cache.reset()
    assert cache.report().reserved_bytes == 0
    fresh = make_cache(model, "int4", **OPTIONS)
    torch.testing.assert_close(run(model, cache, ids), run(model, fresh, ids))


def test_outlier_key_channels_survive_four_bits(tiny_model, make_ids):
    """Qwen2's k_proj bias: a few key channels are huge. Ranges a channel keep them apart from the others."""
    model, ids = tiny_model("qwen2"), make_ids(1, LENGTH)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[::7] += 60.0
    hf_kvcache.enable()
    arguments = {"max_new_tokens": 50, "do_sample": False}
    expected = model.generate(ids, **arguments)
    got = model.generate(ids, cache_implementation="int4", cache_config=OPTIONS, **arguments)
    assert torch.equal(got, expected)


def test_bad_options_name_what_is_allowed(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"key_bits=5 is not allowed .* one of 2, 4, 8"):
        make_cache(model, "int4", key_bits=5)
    with pytest.raises(ValueError, match=r"q_group_size=64 does not divide the head dimension 16: choose from \[16\]"):
        make_cache(model, "int4")
    with pytest.raises(ValueError, match="'int4' and 'int8' do not compose: both decide the encoding"):
        make_cache(model, "int4+int8")
    with pytest.raises(ValueError, match=r"'nf4' needs a head dimension that 32 divides, not 16"):
        make_cache(model, "nf4")
    with pytest.raises(NotImplementedError, match="int4 cannot serve layer 0: DeepseekV3Attention changes"):
        make_cache(tiny_model("deepseek_v3"), "sliding_window+int4", q_group_size=16)


def test_missing_bitsandbytes_names_the_command(tiny_model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'hf_kvcache\[bnb\]'"):
        make_cache(tiny_model("llama", head_dim=32), "nf4")


def test_without_a_compiler_one_warning_and_the_same_result(kernel, tiny_model, make_ids, run, monkeypatch):
    model, ids = tiny_model("llama"), make_ids(1, LENGTH + 8)
    expected = run(model, make_cache(model, "int4", **OPTIONS), ids, chunks=[LENGTH] + [1] * 8)
    monkeypatch.setattr(native, "_library", lambda: (None, "no compiler here"))
    native.warn_of_no_library.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = run(model, make_cache(model, "int4", **OPTIONS), ids, chunks=[LENGTH] + [1] * 8)
    native.warn_of_no_library.cache_clear()
    (warning,) = caught
    assert str(warning.message).startswith("hf_kvcache cannot compile its decode kernel here (no compiler here)")
    torch.testing.assert_close(got, expected)
