"""The growth benchmark: a full cache grows by each token's bytes, an evicting one stays."""

import json

import pytest

from hf_kvcache.bench.growth import bench_growth

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, dims, float32


def test_bytes_of_a_full_and_of_an_evicting_cache(tiny_model, make_ids):
    options = {"budget": 40, "when": "both", "interval": 8, "num_recent_tokens": 8, "block_size": 16}
    bench = bench_growth(
        tiny_model("llama"), make_ids(1, 100), caches=[("dynamic", {}), ("keydiff", options)], new_tokens=101
    )
    assert bench.marks == (0, 25, 50, 75, 100)
    full, evicting = bench.rows
    assert full.held_bytes == tuple((100 + mark) * TOKEN_BYTES for mark in bench.marks)
    assert full.most_bytes == 200 * TOKEN_BYTES
    assert evicting.held_bytes[0] < 70 * TOKEN_BYTES
    assert evicting.most_bytes < 90 * TOKEN_BYTES
    assert json.loads(json.dumps(bench.to_dict()))["rows"][0]["cache"] == "dynamic"
    assert bench.table().row_count == 2


def test_looks_are_few_in_a_long_run(tiny_model, make_ids, monkeypatch):
    monkeypatch.setattr("hf_kvcache.bench.growth._NUM_LOOKS", 10)
    bench = bench_growth(tiny_model("llama"), make_ids(1, 8), caches=[("blocks", {})], new_tokens=47)
    assert bench.marks == (0, 10, 20, 30, 45)


def test_too_few_tokens_are_refused(tiny_model, make_ids):
    with pytest.raises(ValueError, match="new_tokens=4 shows no growth: give at least 16"):
        bench_growth(tiny_model("llama"), make_ids(1, 8), caches=[], new_tokens=4)
