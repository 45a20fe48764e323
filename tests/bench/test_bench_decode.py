"""The decode benchmark on a tiny model: every figure is there and consistent. Its values are not judged here."""

import json

import pytest
import torch

from hf_kvcache.bench.decode import bench_decode
from hf_kvcache.bench.peak import peak_growth

KV_TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values of 2 layers, 2 heads of 16 floats


@pytest.fixture
def bench(tiny_model):
    return bench_decode(tiny_model("llama"), contexts=(16, 63), steps=3, caches=(("blocks", {}), ("static", {})))


def test_a_row_for_each_cache_and_context(bench):
    assert [(row.context, row.cache) for row in bench.rows] == [
        (context, cache) for context in (16, 63) for cache in ("dynamic", "blocks", "static")
    ]
    assert (bench.model, bench.dtype, bench.device, bench.steps) == ("LlamaForCausalLM", "float32", "cpu", 3)
    assert bench.threads == torch.get_num_threads()


def test_what_evicts_has_evicted(tiny_model):
    options = {"keep_ratio": 0.5, "num_sink_tokens": 0, "num_recent_tokens": 1}
    caches = [(name, options) for name in ("keydiff", "kvzip", "snapkv")]
    rows = bench_decode(tiny_model("llama"), contexts=(480,), steps=1, caches=caches).rows[1:]
    assert [row.cache for row in rows] == [
        f"{name} keep_ratio=0.5 num_sink_tokens=0 num_recent_tokens=1" for name, _ in caches
    ]
    assert all(0.5 * row.stored_bytes <= row.held_bytes < 0.65 * row.stored_bytes for row in rows)


def test_ratios_are_of_the_medians(bench):
    for context in (16, 63):
        rows = {row.cache: row for row in bench.rows if row.context == context}
        for row in rows.values():
            assert 0 < row.step_s <= row.worst_step_s
            assert row.vs_dynamic == row.step_s / rows["dynamic"].step_s
            assert row.vs_static == row.step_s / rows["static"].step_s
        assert rows["dynamic"].vs_dynamic == rows["static"].vs_static == 1.0


def test_bytes_are_measured(bench):
    for row in bench.rows:
        assert row.stored_bytes == row.context * KV_TOKEN_BYTES
        assert row.held_bytes >= row.context * KV_TOKEN_BYTES
        assert row.peak_bytes is None or row.peak_ratio == row.peak_bytes / row.stored_bytes >= 1


def test_it_serialises_and_prints(bench):
    rows = json.loads(json.dumps(bench.to_dict()))["rows"]
    assert [row["cache"] for row in rows] == [row.cache for row in bench.rows]
    assert all("peak_ratio" in row for row in rows)
    assert bench.table().row_count == 6


def test_without_static_there_is_no_ratio_to_it(tiny_model):
    lines: list[str] = []
    bench = bench_decode(tiny_model("llama"), contexts=(16,), steps=1, caches=(("blocks", {}),), progress=lines.append)
    assert [row.vs_static for row in bench.rows] == [None, None]
    assert lines == ["16 tokens: filling 2 caches"]
    assert "-" in list(bench.table().columns[5].cells)


@pytest.mark.parametrize("options", [{"steps": 0}, {"contexts": ()}, {"contexts": (1,)}], ids=str)
def test_sizes_that_measure_nothing_are_refused(options, tiny_model):
    with pytest.raises(ValueError, match="must be at least 1 step and 2 tokens"):
        bench_decode(tiny_model("llama"), **options)


def test_peak_growth_sees_memory_that_is_gone_again():
    size = 64 << 20
    grown = peak_growth(lambda: torch.ones(size, dtype=torch.uint8).max(), torch.device("cpu"))
    if grown is None:
        pytest.skip("this system lets a process read no peak of its own memory")
    assert 0.9 * size < grown < 2 * size
