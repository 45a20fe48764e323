"""Layers whose model compresses its past or chooses what it reads: the numbers of transformers' own cache."""

import copy
import gc
import importlib
import weakref

import pytest
import torch
import transformers as tf
from transformers import DynamicCache, configuration_utils

import hf_kvcache
from hf_kvcache import CACHE_ARG, build, load_cache, make_cache
from hf_kvcache.native.indexed_layer import IndexedLayer
from hf_kvcache.native.native_layers import NATIVE
from hf_kvcache.quantization.decoded_layer import DecodedLayer
from hf_kvcache.report import live_tensors
from hf_kvcache.reuse import check_same_prompt

pytestmark = pytest.mark.core

CHOOSING = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "minimax_m3", "qwen4_exp")
NATIVE_MODELS = (*CHOOSING, "deepseek_v4")
CHUNKS = [30, *[1] * 9, 5, *[1] * 6, 13]
CODED = {"q_group_size": 16, "residual_length": 16}

_MLA = {"kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
_DSA = _MLA | _MOE | {"n_shared_experts": 1, "index_topk": 6, "index_head_dim": 16, "index_n_heads": 2}
_SMALL = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "bos_token_id": 1},
}
_SWA = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 32, "head_dim": 24}

# Decoders of models that also see or hear: model -> (class prefix, what its config adds to `_SMALL`).
DECODERS = {
    # Layer 1 reads the latents of layer 0 and has an indexer of its own.
    "mistral_large4": ("MistralLarge4Text", _DSA | {"first_k_dense_replace": 1, "kv_source_layers": [0, 0, 2]}),
    # Its indexer stores keys, gates and a flag, and it has no rotary part.
    "glm5_next": (
        "Glm5NextText",
        _DSA
        | {"qk_rope_head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2, "index_kpool": 3}
        | {"layer_types": ["indexed_attention", "linear_attention", "indexed_attention"]},
    ),
    "dots3_note": (
        "Dots3NoteText",
        _DSA
        | {f"swa_{name}": size for name, size in _SWA.items()}
        | {"swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16, "head_dim": 24, "sliding_window": 8}
        | {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"]},
    ),
    "unlimited_ocr": ("UnlimitedOcrText", _MOE | {"sliding_window": 8}),
}


def make_decoder(name: str):
    """The tiny random decoder of a model of `DECODERS`."""
    prefix, extra = DECODERS[name]
    if not hasattr(tf, f"{prefix}Config"):
        pytest.skip(f"this transformers has no {prefix}Config")
    config = getattr(tf, f"{prefix}Config")(**(_SMALL | extra))
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    return getattr(module, f"{prefix}Model")(config).eval()


@torch.no_grad()
def hidden_states(model, cache, ids, chunks) -> torch.Tensor:
    states = []
    for part in ids.split(chunks, dim=1):
        states.append(model(part, use_cache=True, **{CACHE_ARG: cache}).last_hidden_state)
    return torch.cat(states, dim=1)


def dynamic(model) -> DynamicCache:
    return DynamicCache(config=model.config)


def held_bytes(cache) -> int:
    """Bytes of the elements of every tensor of transformers' cache; its slices lie in larger storages."""
    tensors = {(t.data_ptr(), t.shape, t.stride()): t.nbytes for t in live_tensors(cache) if t.ndim}
    return sum(tensors.values())


def test_every_layer_type_of_transformers_is_known():
    types = set(configuration_utils.ALLOWED_ATTN_LAYER_TYPES)
    types -= configuration_utils._LEGACY_LAYER_TYPE_REMAP.keys() | {"moe", "window_attention"}  # no cache of a decoder
    assert types <= {*build._FULL, *build._SLIDING, *build._STATES, *NATIVE}


@pytest.mark.parametrize("name", NATIVE_MODELS)
def test_logits_are_those_of_transformers_own_cache(name, tiny_model, make_ids, run):
    model, ids = tiny_model(name), make_ids(2, sum(CHUNKS))
    hf_kvcache.enable()
    expected = run(model, dynamic(model), ids, chunks=CHUNKS)
    cache = make_cache(model, block_size=3)
    torch.testing.assert_close(run(model, cache, ids, chunks=CHUNKS), expected)


@pytest.mark.parametrize("name", NATIVE_MODELS)
def test_beams_are_those_of_transformers_own_cache(name, tiny_model, make_ids, run):
    model, ids, beams = tiny_model(name), make_ids(3, 43), torch.tensor([2, 0, 0])
    if "reorder_cache" not in vars(type(dynamic(model).layers[-2])) and name == "deepseek_v4":
        pytest.skip("transformers' own layers mix up beams in this version")
    logits = []
    for cache in (dynamic(model), make_cache(model, block_size=3)):
        run(model, cache, ids[:, :30])
        cache.reorder_cache(beams)
        logits.append(run(model, cache, ids[:, 30:], chunks=[1] * 9 + [4]))
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_of_models_that_see_or_hear(name, make_ids, tmp_path):
    decoder = make_decoder(name)
    ids, caches = make_ids(2, 50), [dynamic(decoder), make_cache(decoder, block_size=3)]
    chunks = [20, *[1] * 13, 7]
    expected, states = (hidden_states(decoder, cache, ids[:, :40], chunks) for cache in caches)
    torch.testing.assert_close(states, expected)
    cache = caches[1]
    assert cache.report().dynamic_bytes == held_bytes(caches[0])
    cache.save(tmp_path / "cache")
    copies = [load_cache(decoder, tmp_path / "cache"), cache.fork()]
    expected = hidden_states(decoder, cache, ids[:, 40:], [1] * 5 + [5])
    for each in copies:
        assert torch.equal(hidden_states(decoder, each, ids[:, 40:], [1] * 5 + [5]), expected)


@pytest.mark.parametrize("length", [5, 6, 28, 29, 75])
@pytest.mark.parametrize("name", NATIVE_MODELS)
def test_the_report_knows_what_transformers_would_store(name, length, tiny_model, make_ids, run):
    model, ids = tiny_model(name), make_ids(2, length)
    cache, reference = make_cache(model, block_size=3), dynamic(model)
    for each in (cache, reference):
        run(model, each, ids, chunks=[length - 1, 1])
    assert cache.report().dynamic_bytes == held_bytes(reference)


# --- DeepSeek-V4


def test_a_window_that_is_key_and_value_is_stored_once(tiny_model, make_ids, run):
    model = tiny_model("deepseek_v4")
    cache = make_cache(model, block_size=1)
    run(model, cache, make_ids(2, 60))
    for layer in cache.layers:
        assert layer.shares_values
        assert layer.table.arena.block_bytes * layer.stored_length * 2 == layer.keys.nbytes
        assert torch.equal(layer.keys, layer.values)


def test_what_is_kept_beside_entries_does_not_grow(tiny_model, make_ids, run):
    model, ids = tiny_model("deepseek_v4"), make_ids(1, 140)
    cache, sizes = make_cache(model, block_size=1), []
    for part in (ids[:, :70], ids[:, 70:]):
        run(model, cache, part, chunks=[1] * 35 + [35])
        layer = cache.layers[0]
        compressor = layer.compressors["indexer"]
        assert compressor.entries.stop == layer.seen // 4
        sizes.append([stream.stop - stream.start for stream in (compressor.tokens, compressor.windows)])
    assert sizes == [[4, 2], [4, 2]]


@pytest.mark.parametrize("length", range(24, 33))
def test_the_newest_token_can_always_be_taken_back(length, tiny_model, make_ids, run):
    model, ids = tiny_model("deepseek_v4"), make_ids(2, length + 9)
    cache = make_cache(model, block_size=3)
    run(model, cache, ids[:, :length], chunks=[length - 3, 1, 1, 1])
    cache.crop(-1)
    fresh = make_cache(model)
    run(model, fresh, ids[:, : length - 1], chunks=[length - 3, 1, 1])
    rest = ids[:, length - 1 :]
    torch.testing.assert_close(run(model, cache, rest, chunks=[1] * 10), run(model, fresh, rest, chunks=[1] * 10))


def test_tokens_of_a_closed_entry_cannot_be_taken_back_unrecorded(tiny_model, make_ids, run):
    model = tiny_model("deepseek_v4", sliding_window=64)
    cache = make_cache(model)
    run(model, cache, make_ids(1, 40))
    with pytest.raises(RuntimeError, match=r"EntriesLayer cannot take back 9 tokens.*activate_past_recording"):
        cache.crop(-9)
    assert [layer.seen for layer in cache.layers] == [40] * 3


# --- conversations


@pytest.mark.parametrize("name", NATIVE_MODELS)
def test_a_conversation_goes_on(name, tiny_model, make_ids):
    model = tiny_model(name)

    def generate(ids, cache, count=8):
        options = {"max_new_tokens": count, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        return model.generate(ids, **options, **{CACHE_ARG: cache})

    cache, reference = make_cache(model, block_size=3), dynamic(model)
    ids = generate(make_ids(2, 19), cache)
    assert torch.equal(generate(ids[:, :19], reference), ids)
    ids = torch.cat([ids, make_ids(2, 5, seed=1)], dim=1)
    again = generate(ids, cache)
    assert torch.equal(again, generate(ids, reference))
    assert cache.get_seq_length() == again.shape[1] - 1
    if name != "qwen4_exp":  # all is cached: the last token runs again, which a recurrent state cannot
        assert torch.equal(generate(again[:, :-1], cache, count=1), again)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "minimax_m3", "qwen4_exp"])
def test_another_text_is_refused_and_changes_nothing(name, tiny_model, make_ids, run):
    types = {"layer_types": ["indexed_attention", "linear_attention"]} if name == "qwen4_exp" else {}
    model, ids = tiny_model(name, **types), make_ids(1, 24)
    cache = make_cache(model)
    run(model, cache, ids[:, :20])
    before = [tensor.nan_to_num() for tensor in live_tensors(cache)]
    other = ids.clone()
    other[0, 15] = 96 if ids[0, 15] != 96 else 95
    hf_kvcache.enable()
    with pytest.raises(ValueError, match=r"differ from token 15 on \(of 20 cached\)"):
        model.generate(other, max_new_tokens=2, **{CACHE_ARG: cache})
    assert all(map(torch.equal, before, (tensor.nan_to_num() for tensor in live_tensors(cache))))


def test_the_prompt_of_a_reference_window_is_compared(make_ids):
    decoder, ids = make_decoder("unlimited_ocr"), make_ids(1, 40)
    cache = make_cache(decoder)
    hidden_states(decoder, cache, ids, [20, *[1] * 20])
    check_same_prompt(decoder, cache, ids, {})
    ids[0, 7] = 96 if ids[0, 7] != 96 else 95
    with pytest.raises(ValueError, match=r"differ from token 7 on \(of 40 cached\)"):
        check_same_prompt(decoder, cache, ids, {})


def test_a_reference_window_keeps_the_prompt_and_forgets_the_middle(make_ids):
    decoder = make_decoder("unlimited_ocr")
    cache = make_cache(decoder, block_size=1)
    for layer in cache.layers:
        layer.set_prefill_length(20)
    ids = make_ids(2, 60)
    hidden_states(decoder, cache, ids[:, :46], [13, 7, *[1] * 26])  # a prompt in two chunks
    assert [layer.stored_length for layer in cache.layers] == [28] * 3
    cache.crop(-1)
    with pytest.raises(RuntimeError, match="cannot take back 2 tokens"):
        cache.crop(-2)
    cache.activate_past_recording()
    hidden_states(decoder, cache, ids[:, 45:55], [10])
    cache.crop(-10)
    fresh = make_cache(decoder)
    for layer in fresh.layers:
        layer.set_prefill_length(20)
    hidden_states(decoder, fresh, ids[:, :45], [20, *[1] * 25])
    rest = [hidden_states(decoder, each, ids[:, 45:], [1] * 15) for each in (cache, fresh)]
    torch.testing.assert_close(*rest)
    cache.crop(-45)  # into the prompt
    assert cache.get_seq_length() == 15
    again = hidden_states(decoder, cache, ids[:, 15:30], [5, *[1] * 10])
    fresh.reset()
    torch.testing.assert_close(again, hidden_states(decoder, fresh, ids[:, :30], [20, *[1] * 10])[:, 15:])


# --- encoded


@pytest.mark.parametrize("name", NATIVE_MODELS)
def test_encodings_take_fewer_bits_and_stay_near(name, tiny_model, make_ids, run):
    # An indexer that chooses everything: others choose other tokens, and random weights make much of one token.
    key = {"minimax_m3": "index_topk_blocks", "qwen4_exp": "indexer_budget"}.get(name, "index_topk")
    model, ids = tiny_model(name, **{key: 512}), make_ids(2, 260)
    chunks = [200, *[1] * 50, 10]
    exact = make_cache(model)
    expected = run(model, exact, ids, chunks=chunks)
    errors = []
    for technique in ("int8", "int2"):
        cache = make_cache(model, technique, **CODED)
        errors.append((run(model, cache, ids, chunks=chunks) - expected).norm() / expected.norm())
        report, whole = cache.report(), exact.report()
        assert report.marginal_bits_per_value < 0.35 * whole.marginal_bits_per_value
        assert report.stored_bytes < whole.stored_bytes
        assert report.dynamic_bytes == whole.dynamic_bytes
    assert errors[0] < 0.04
    assert errors[0] < 0.5 * errors[1]


def test_entries_and_indexer_keys_lie_in_codes(tiny_model, make_ids, run):
    for name, longest_tail in (("deepseek_v32", 31), ("deepseek_v4", 15)):
        model = tiny_model(name)
        cache = make_cache(model, "int4", **CODED)
        run(model, cache, make_ids(2, 200))
        layer = cache.layers[0]
        is_indexed = name == "deepseek_v32"
        for stream in [layer.index] if is_indexed else [part.entries for part in layer.compressors.values()]:
            assert 0 <= stream.stop - stream.coded.length * 16 <= longest_tail
            # 16 tokens of 16 values: half a byte a value, and a scale and a zero point for each token.
            assert [plane.dim * plane.dtype.itemsize for plane in stream.coded.arena.specs] == [128, 32, 32]
            assert stream.bytes_per_token == 12


@pytest.mark.parametrize("technique", ["int8", "int4", "fp8", "turboquant"])
def test_decoded_layers_equal_those_that_attend_themselves(technique, tiny_model, make_ids, run, monkeypatch):
    model, ids = tiny_model("llama"), make_ids(2, 220)
    options = CODED if technique.startswith("int") else {"residual_length": 16}
    chunks = [170, *[1] * 40, 10]
    expected = run(model, make_cache(model, technique, **options), ids, chunks=chunks)
    monkeypatch.setattr(build, "passes_straight_through", lambda cls: False)
    cache = make_cache(model, technique, **options)
    assert all(type(layer) is DecodedLayer for layer in cache.layers)
    torch.testing.assert_close(run(model, cache, ids, chunks=chunks), expected, atol=2e-5, rtol=1e-4)


def test_encoded_layers_crop_into_a_group(tiny_model, make_ids, run):
    for name in ("deepseek_v32", "deepseek_v4"):
        model, ids = tiny_model(name), make_ids(2, 150)
        cache = make_cache(model, "int8", **CODED)
        run(model, cache, ids[:, :100])
        cache.activate_past_recording()
        run(model, cache, ids[:, 100:], chunks=[20, 30])
        whole, twin = cache.fork(), cache.fork()
        cache.crop(-50)
        assert cache.get_seq_length() == 100
        again = run(model, cache, ids[:, 100:], chunks=[20, 30])
        expected = make_cache(model)
        reference = run(model, expected, ids, chunks=[100, 20, 30])[:, 100:]
        assert (again - reference).norm() / reference.norm() < 0.3
        torch.testing.assert_close(whole.layers[0].keys, twin.layers[0].keys)


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3", "deepseek_v4"])
@pytest.mark.parametrize("technique", ["sliding_window", "snapkv", "kvzip+int4", "quest", "compressed"])
def test_a_second_choice_of_tokens_is_refused(name, technique, tiny_model):
    with pytest.raises(NotImplementedError, match=r"cannot serve layer 0: it is of type '\w+'.*Use cache 'blocks'"):
        make_cache(tiny_model(name), technique)


def test_what_cannot_be_found_out_for_these_layers_is_refused(tiny_model, make_ids, run):
    model = tiny_model("deepseek_v32")
    with pytest.raises(
        NotImplementedError, match=r"transform looks at keys and queries, which layer 0 of type 'indexed"
    ):
        make_cache(model, "transform")
    for measured in (model, tiny_model("deepseek_v3")):
        with pytest.raises(
            NotImplementedError, match=r"bits='auto' looks at keys and queries.*'turboquant' with fixed"
        ):
            make_cache(measured, "int4", bits="auto", bits_per_value=4.0, **CODED)
    with pytest.raises(ValueError, match=r"bits of layer 0 has a width for each head"):
        make_cache(model, "int4", bits=[[[4, 2, 4, 4], 4], [4, 4]], **CODED)
    mixed = make_cache(model, "int4", bits=[[8, 4], [4, 2]], **CODED)
    run(model, mixed, make_ids(1, 60))
    assert [codec.nbits for layer in mixed.layers for codec in (*layer.codecs, *layer.index.codecs)] == [
        8,
        4,
        4,
        4,
        2,
        2,
    ]


def test_an_indexer_that_stores_more_than_keys_is_not_encoded(make_ids):
    decoder = make_decoder("glm5_next")
    with pytest.raises(NotImplementedError, match=r"cannot serve layer 0.*Use cache 'blocks'"):
        hidden_states(decoder, make_cache(decoder, "fp8"), make_ids(1, 9), [9])


def test_latents_without_a_group_size_name_the_remedy(tiny_model, make_ids, run):
    model = tiny_model("deepseek_v3")
    with pytest.raises(ValueError, match=r"does not divide the head dimension 8: no other does; use 'fp8'"):
        run(model, make_cache(model, "int4", q_group_size=16), make_ids(1, 9))
    run(model, make_cache(model, "fp8"), make_ids(1, 9))


def test_a_copy_copies_no_model_and_keeps_none_alive(tiny_model, make_ids, run):
    for name in ("deepseek_v32", "deepseek_v4"):
        model = tiny_model(name)
        cache, alive = make_cache(model, "int8", **CODED), weakref.ref(model)
        run(model, cache, make_ids(1, 40))
        twin = copy.deepcopy(cache)
        del model
        gc.collect()
        assert alive() is None
        assert twin.report().to_dict() == cache.report().to_dict()


def test_positions_of_indexer_keys_follow_their_rows(tiny_model, make_ids, run, left_pad, tmp_path):
    model, (ids, mask) = tiny_model("qwen4_exp"), left_pad(make_ids(2, 40), [40, 21])
    cache, expected = make_cache(model, block_size=3), (mask.cumsum(-1) - 1).clamp(min=0)
    run(model, cache, ids[:, :30], mask[:, :30], chunks=[20, *[1] * 10])
    cache.save(tmp_path / "cache")
    loaded = load_cache(model, tmp_path / "cache")
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    (layer,) = (layer for layer in cache.layers if isinstance(layer, IndexedLayer))
    assert torch.equal(layer.indexer_position_ids, expected[[1, 0, 1], :30].expand(3, -1, -1))
    rest = run(model, loaded, ids[:, 30:], mask)[[1, 0, 1]]
    torch.testing.assert_close(run(model, cache, ids[[1, 0, 1], 30:], mask[[1, 0, 1]]), rest)
    whole = run(model, make_cache(model), ids, mask)[[1, 0, 1], 30:]
    torch.testing.assert_close(rest, whole)


def test_layers_that_choose_always_return_everything(tiny_model, make_ids, run, monkeypatch):
    model, ids = tiny_model("deepseek_v32"), make_ids(1, 12)
    expected = run(model, make_cache(model), ids, chunks=[10, 1, 1])
    monkeypatch.setattr(build, "passes_straight_through", lambda cls: True)
    torch.testing.assert_close(run(model, make_cache(model), ids, chunks=[10, 1, 1]), expected)


def test_another_batch_is_refused_by_a_stream(tiny_model, make_ids, run):
    model = tiny_model("deepseek_v32")
    cache = make_cache(model)
    run(model, cache, make_ids(2, 9))
    with pytest.raises(ValueError, match=r"the cache holds 2 sequences and was given 3"):
        cache.update_indexer(torch.zeros(3, 1, 16), 0)


def test_moving_takes_every_stream_along(tiny_model, make_ids, run):
    for name in ("qwen4_exp", "deepseek_v4"):
        model = tiny_model(name)
        cache = make_cache(model, "int8", **CODED)
        run(model, cache, make_ids(2, 90), chunks=[80, 10])
        stored = cache.report().stored_bytes
        cache.to("meta")
        assert {tensor.device.type for tensor in live_tensors(cache)} == {"meta"}
        assert cache.report().stored_bytes == stored
