"""Native windows: local layers keep their window and no more, whole blocks go as it moves on."""

import pytest

import hf_kvcache
from hf_kvcache import make_cache
from hf_kvcache.layers.layer import LayerContext
from hf_kvcache.layers.sliding_layer import SlidingBlockLayer

pytestmark = pytest.mark.core

WINDOW = 8  # of the tiny models


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_local_layers_stop_growing(name, block_size, tiny_model, make_ids, run):
    model = tiny_model(name)
    cache = make_cache(model, block_size=block_size)
    local = [layer for layer in cache.layers if layer.is_sliding]
    assert local
    run(model, cache, make_ids(2, 3 * WINDOW))
    assert all(layer.stored_length == WINDOW for layer in local)
    reserved = set()
    for step in range(5 * WINDOW):
        run(model, cache, make_ids(2, 1, seed=step))
        assert all(WINDOW <= layer.stored_length <= WINDOW + 1 for layer in local)
        reserved.add(sum(layer.table.arena.reserved_bytes for layer in local))
    # A window that moves over block borders covers up to one block more, and never more than that.
    token_bytes = sum(layer.table.arena.block_bytes // block_size for layer in local)
    assert max(reserved) <= 2 * (WINDOW + 1 + 2 * block_size) * token_bytes
    assert all(layer.seen == layer.stored_length == 8 * WINDOW for layer in cache.layers if not layer.is_sliding)


def test_a_step_reads_the_window(tiny_model, make_ids, run):
    model = tiny_model("mistral")
    cache = make_cache(model, block_size=3)
    run(model, cache, make_ids(1, 30), chunks=[29, 1])
    assert {layer.read_bytes for layer in cache.layers} == {2 * WINDOW * 2 * 16 * 4}  # K and V, 2 heads of 16 floats


def test_crop_needs_a_recorded_past(tiny_model, make_ids, run):
    model = tiny_model("gemma3")
    cache = make_cache(model, block_size=3)
    run(model, cache, make_ids(1, 30), chunks=[29, 1])
    with pytest.raises(RuntimeError, match="SlidingBlockLayer cannot take back 4 tokens"):
        cache.crop(-4)
    assert [layer.seen for layer in cache.layers] == [30, 30]
    cache.activate_past_recording()
    run(model, cache, make_ids(1, 9))
    cache.crop(-9)
    assert [layer.seen for layer in cache.layers] == [30, 30]
    assert cache.layers[0].stored_length <= WINDOW


def test_a_window_without_tokens_is_refused():
    context = LayerContext(layer_idx=0, layer_type="sliding_attention", block_size=16)
    with pytest.raises(ValueError, match="sliding_window=0 must be at least 1 token"):
        SlidingBlockLayer(context, sliding_window=0)


def test_layers_do_not_offload_by_themselves(tiny_model):
    hf_kvcache.enable()
    with pytest.raises(NotImplementedError, match=r"use KVCache\.to\(device\)"):
        make_cache(tiny_model("gemma3")).layers[0].offload()
