"""A window of encoded tokens: equal to all tokens encoded under a mask of window and sinks, in bounded memory."""

import copy

import pytest
import torch

import hf_kvcache
from hf_kvcache import CACHE_ARG, make_cache
from hf_kvcache.kernels import native
from hf_kvcache.quantization.coded_layer import CodedLayer
from hf_kvcache.quantization.coded_window import CodedWindowLayer

pytestmark = pytest.mark.core

WINDOW, SINKS = 50, 4
OPTIONS = {"q_group_size": 16, "residual_length": 24, "num_sink_tokens": SINKS}
WINDOWED = OPTIONS | {"sliding_window": WINDOW}
LENGTH = 140


@torch.no_grad()
def run_masked(model, cache, ids, first, chunks, *, window=WINDOW, sinks=SINKS):
    """Logits of `ids` under the rule of the window written as a mask; `first` is each row's first real slot."""
    logits, begin = [], cache.get_seq_length()
    for chunk in ids.split(chunks, dim=1):
        queries = torch.arange(begin, begin + chunk.shape[1])[:, None]
        slots = torch.arange(begin + chunk.shape[1])
        after = slots - first[:, None, None]  # [B, 1, slots]
        allowed = (slots <= queries) & (after >= 0) & ((slots > queries - window) | (after < sinks))
        positions = (queries.T - first[:, None]).clamp(min=0)
        mask = allowed[:, None]
        if model.config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        inputs = {"attention_mask": mask, "position_ids": positions, CACHE_ARG: cache, "use_cache": True}
        logits.append(model(input_ids=chunk, **inputs).logits)
        begin += chunk.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("chunks", [[LENGTH - 9] + [1] * 9, [30] + [1] * 110, [70, 1, 1, 60, 8]], ids=["p", "d", "c"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("name", "model_name", "attention", "options"),
    [
        ("int8", "llama", "sdpa", {}),
        ("int4", "llama", "eager", {}),
        ("int4", "llama", "sdpa", {"num_sink_tokens": 0}),
        ("int2", "qwen3", "sdpa", {"residual_length": 0}),
        ("fp8", "llama", "sdpa", {}),
        ("int4", "gpt_oss", "eager", {}),
    ],
)
def test_equals_all_tokens_encoded_under_a_mask(
    name, model_name, attention, options, is_padded, chunks, no_kernel, tiny_model, make_ids, left_pad, run
):
    extra = {"layer_types": ["full_attention"] * 2} if model_name == "gpt_oss" else {}
    model = tiny_model(model_name, **extra)
    model.set_attn_implementation(attention)
    lengths = [LENGTH, 90, 67] if is_padded else [LENGTH] * 3
    ids, mask = left_pad(make_ids(3, LENGTH), lengths)
    options = {key: value for key, value in (OPTIONS | options).items() if name != "fp8" or key != "q_group_size"}
    full = make_cache(model, name, **options)
    expected = run_masked(model, full, ids, LENGTH - torch.tensor(lengths), chunks, sinks=options["num_sink_tokens"])
    cache = make_cache(model, f"sliding_window+{name}", sliding_window=WINDOW, **options)
    if is_padded or len(chunks) < 20:
        got = run(model, cache, ids, mask if is_padded else None, chunks=chunks)
    else:
        # With a mask, as the reference has: where attention rounds in another way, a code here and there is another.
        got = run_masked(model, cache, ids, torch.zeros(3).long(), chunks, window=LENGTH)
    is_real = mask.bool()
    torch.testing.assert_close(got[is_real], expected[is_real], rtol=1e-4, atol=1e-5)
    assert all(isinstance(layer, CodedWindowLayer) for layer in cache.layers)
    assert cache.layers[0].coded.start > 0
    assert cache.report().stored_bytes < 0.9 * full.report().stored_bytes


def test_groups_of_a_codebook(tiny_model, make_ids, run):
    model = tiny_model("llama", max_position_embeddings=1024)
    ids, options = make_ids(2, 700), {"residual_length": 100}
    full, first, chunks = make_cache(model, "turboquant", **options), torch.zeros(2).long(), [690] + [1] * 10
    expected = run_masked(model, full, ids, first, chunks, window=300)
    cache = make_cache(model, "sliding_window+turboquant", sliding_window=300, **options)
    torch.testing.assert_close(run(model, cache, ids, chunks=chunks), expected, rtol=1e-4, atol=1e-5)
    assert cache.layers[0].coded.start == 3


def test_equals_the_cache_without_a_window_while_it_holds_all(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(2, LENGTH)
    chunks = [100] + [1] * 40
    cache = make_cache(model, "int4+sliding_window", **OPTIONS, sliding_window=LENGTH)
    assert torch.equal(
        run(model, cache, ids, chunks=chunks), run(model, make_cache(model, "int4", **OPTIONS), ids, chunks=chunks)
    )
    assert cache.layers[0].stored_length == LENGTH


def test_memory_stops_growing(tiny_model, make_ids, run):
    model = tiny_model("llama", max_position_embeddings=2048)
    cache, reserved = make_cache(model, "sliding_window+int4", **WINDOWED), []
    for seed in range(6):
        run(model, cache, make_ids(1, 90, seed=seed), chunks=[10] + [1] * 80)
        layer, report = cache.layers[0], cache.report()
        reserved.append(report.reserved_bytes)
        # The window, the rest of its oldest group, and the sinks.
        assert WINDOW + SINKS <= layer.stored_length < WINDOW + 16 + SINKS
        assert layer.stored_length == (layer.coded.length * 16 + layer.table.length + SINKS)
    assert max(reserved[1:]) <= 1.1 * min(reserved[1:])
    run(model, cache, make_ids(1, 1000))
    assert cache.layers[0].stored_length < WINDOW + 16 + SINKS
    assert cache.report().reserved_bytes <= 1.3 * max(reserved)


def test_a_prompt_before_the_window_is_never_encoded(tiny_model, make_ids, run, monkeypatch):
    model = tiny_model("llama", max_position_embeddings=2048)
    cache, encoded = make_cache(model, "sliding_window+int4", **WINDOWED), []
    codec = cache.layers[0].codecs[0]
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda states: encoded.append(states.shape[2]) or encode(states))
    run(model, cache, make_ids(1, 1000))
    assert encoded == [32]  # slots 944 to 976: the window begins at 950 and the tail at 976


@pytest.mark.parametrize("count", [1, 20, 45])
def test_crop_takes_back_what_was_recorded(count, tiny_model, make_ids, run):
    model, ids, first = tiny_model("llama"), make_ids(2, LENGTH), torch.zeros(2).long()
    cache, full = make_cache(model, "sliding_window+int8", **WINDOWED), make_cache(model, "int8", **OPTIONS)
    run(model, cache, ids[:, :90])
    run_masked(model, full, ids[:, :90], first, [90])
    for each in (cache, full):
        each.activate_past_recording()
    run(model, cache, make_ids(2, count, seed=1))
    run_masked(model, full, make_ids(2, count, seed=1), first, [count])
    for each in (cache, full):
        each.crop(-count)
        each.stop_past_recording()
    expected = run_masked(model, full, ids[:, 90:], first, [1, 40, 9])
    torch.testing.assert_close(run(model, cache, ids[:, 90:], chunks=[1, 40, 9]), expected, rtol=1e-4, atol=1e-5)


def test_the_newest_token_can_always_be_taken_back_and_not_many(tiny_model, make_ids, run):
    model = tiny_model("llama")
    for length in range(100, 120):
        cache = make_cache(model, "sliding_window+int8", **WINDOWED)
        run(model, cache, make_ids(1, length), chunks=[length - 1, 1])
        assert cache.is_croppable
        cache.crop(-1)
        assert cache.get_seq_length() == length - 1
    # 118 seen: groups are held from slot 64 on, and the window before slot 113 begins there.
    assert cache.layers[0].coded.start == 4
    assert [layer.can_crop(5) for layer in cache.layers] == [True, True]
    with pytest.raises(RuntimeError, match="CodedWindowLayer cannot take back 6 tokens: older ones"):
        cache.crop(-6)
    assert cache.get_seq_length() == 118


def test_crop_commits_what_was_recorded(tiny_model, make_ids, run):
    cache = make_cache(tiny_model("llama"), "sliding_window+int8", **WINDOWED)
    run(tiny_model("llama"), cache, make_ids(1, 90))
    cache.activate_past_recording()
    run(tiny_model("llama"), cache, make_ids(1, 40, seed=1))
    assert cache.layers[0].coded.length == 2  # slots 32 to 64, which the window before slot 90 reaches
    cache.crop(0)
    assert cache.layers[0].coded.length == 0  # the window before slot 130 begins at slot 81


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 33}, {}])
def test_int8_generates_what_the_exact_window_does(mode, tiny_model, make_ids):
    model, ids = tiny_model("llama"), make_ids(1, 111)
    hf_kvcache.enable()
    arguments = {"max_new_tokens": 60, "do_sample": False} | mode
    window = {"sliding_window": WINDOW, "num_sink_tokens": SINKS}
    expected = model.generate(ids, **arguments, **{CACHE_ARG: make_cache(model, "sliding_window", **window)})
    got = model.generate(ids, cache_implementation="sliding_window+int8", cache_config=WINDOWED, **arguments)
    assert torch.equal(got, expected)


def test_only_the_chosen_layers_get_a_window(tiny_model):
    model = tiny_model("llama", num_hidden_layers=4)
    cache = make_cache(model, "sliding_window+int4", **WINDOWED, global_every=2)
    assert [type(layer) for layer in cache.layers] == [CodedWindowLayer, CodedLayer] * 2
    gemma = make_cache(tiny_model("gemma3"), "sliding_window+int4", **WINDOWED)
    assert [layer.is_sliding for layer in gemma.layers] == [True, False]


def test_what_is_refused(tiny_model, make_ids, run):
    model = tiny_model("llama")
    with pytest.raises(
        ValueError, match=r"sliding_window=24 holds no more than the residual_length=24 .* nothing would"
    ):
        make_cache(model, "sliding_window+int4", **OPTIONS, sliding_window=24)
    with pytest.raises(
        ValueError, match="positions='cache' is not possible with 'int4': encoded keys stay as they were"
    ):
        make_cache(model, "sliding_window+int4", **WINDOWED, positions="cache")
    cache = make_cache(model, "sliding_window+int4", **WINDOWED)
    model.config._attn_implementation = "flash_attention_2"
    layer, states = cache.layers[0], torch.zeros(1, 2, 3, 16)
    layer.update(states, states, kwargs={})
    with pytest.raises(NotImplementedError, match="cannot mask with attn_implementation='flash_attention_2'"):
        layer.attend(None, model.model.layers[0].self_attn, states, states, states, None)


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", ["int8", "int4", "turboquant"])
def test_the_kernel_sees_the_same_window(name, sinks, is_padded, kernel, tiny_model, make_ids, left_pad, run):
    """One step from the same stored tokens, by the kernel and a slice at a time: no code is rounded in between."""
    model = tiny_model("llama", max_position_embeddings=1024)
    length = 800 if name == "turboquant" else LENGTH
    ids, mask = left_pad(make_ids(3, length), [length, length - 20, length - 31] if is_padded else [length] * 3)
    mask = mask if is_padded else None
    options = {"residual_length": 16, "num_sink_tokens": sinks, "sliding_window": length // 2}
    options |= {} if name == "turboquant" else {"q_group_size": 16}
    cache = make_cache(model, f"sliding_window+{name}", **options)
    run(model, cache, ids[:, :-1], None if mask is None else mask[:, :-1])
    other = copy.deepcopy(cache)
    step = run(model, cache, ids[:, -1:], mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        patch.setattr(native, "warn_of_no_library", lambda: None)
        expected = run(model, other, ids[:, -1:], mask)
    assert cache.layers[0].coded.start > 0
    torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-5)
