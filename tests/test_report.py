"""The memory report: measured from live tensors, so that nothing can hide from it."""

import json

import pytest
import torch
from transformers import DynamicCache

from hf_kvcache import make_cache, measure
from hf_kvcache.report import bytes_by_device, format_bytes, live_tensors

pytestmark = pytest.mark.core

LENGTH = 63
KV_TOKEN_BYTES = 2 * 2 * 16 * 4  # of a layer: keys and values, 2 heads of 16 floats


@pytest.fixture
def filled(tiny_model, make_ids, run):
    """`filled(name, rows=2)`: a cache that has seen 63 tokens, the last one in a decode step."""

    def fill(name, *, rows=2, cache="blocks", **options):
        model = tiny_model(name)
        built = make_cache(model, cache, **({"block_size": 16} | options))
        run(model, built, make_ids(rows, LENGTH), chunks=[LENGTH - 1, 1])
        return built

    return fill


PLACES = {
    "attribute of a layer": lambda cache, extra: setattr(cache.layers[0], "copy", extra),
    "attribute of the cache": lambda cache, extra: setattr(cache, "copy", extra),
    "in a dict of a list": lambda cache, extra: setattr(cache, "notes", {"a": [extra], 3: None}),
    "in a tuple in a table": lambda cache, extra: setattr(cache.layers[1].table, "copies", (1, (extra,))),
    "behind an object with slots": lambda cache, extra: setattr(cache, "slotted", Slotted(extra)),
}


class Slotted:
    __slots__ = ("tensor", "unset")

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_copy_grows_the_report_by_its_bytes(place, filled):
    cache = filled("llama")
    before, extra = cache.report(), torch.cat([cache.layers[0].keys, cache.layers[0].keys]).clone()
    PLACES[place](cache, extra)
    after = cache.report()
    for figure in ("stored_bytes", "reserved_bytes", "device_bytes"):
        assert getattr(after, figure) - getattr(before, figure) == extra.nbytes
    assert after.dynamic_bytes == before.dynamic_bytes
    assert after.waste_bytes == before.waste_bytes
    assert after.compression_ratio < before.compression_ratio


def test_a_storage_is_counted_once_and_whole(filled):
    cache = filled("llama")
    before = cache.report()
    plane = cache.layers[0].table.arena.planes[0]
    cache.views = [plane, plane[:1], plane.view(-1)[3:7], cache.layers[0].keys]
    assert cache.report() == before
    big = torch.zeros(1000)
    cache.views = [big[:10], big[20:30]]
    assert cache.report().reserved_bytes == before.reserved_bytes + big.nbytes


def test_the_model_is_not_part_of_the_cache(tiny_model, filled):
    cache = filled("llama")
    before = cache.report()
    cache.model = tiny_model("llama")
    assert cache.report() == before


def test_a_cycle_ends():
    loop: dict = {"tensor": torch.zeros(5)}
    loop["self"] = [loop]
    assert measure(loop) == 20
    assert len(list(live_tensors(loop))) == 1


def test_devices_are_told_apart():
    found = bytes_by_device([torch.zeros(5), torch.zeros(7, device="meta"), torch.zeros(9, device="meta")])
    assert found == {torch.device("cpu"): 20, torch.device("meta"): 64}


def test_a_copy_on_another_device_is_the_hosts(filled):
    cache = filled("llama").to("meta")
    before = cache.report()
    cache.copy = torch.zeros(100)
    after = cache.report()
    assert (before.host_bytes, after.host_bytes) == (0, 400)
    assert after.device_bytes == before.device_bytes
    assert after.disk_bytes == 0


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "jamba", "falcon_h1"])
def test_dynamic_bytes_are_those_of_a_real_dynamic_cache(name, filled, tiny_model, make_ids, run):
    model = tiny_model(name)
    reference = DynamicCache(config=model.config)
    run(model, reference, make_ids(2, LENGTH), chunks=[LENGTH - 1, 1])
    # Tensors, not their storages: until its next step a sliding layer there holds on to all that it was given.
    names = ("keys", "values", "conv_states", "recurrent_states")
    states = [t for layer in reference.layers for name in names for t in live_tensors(getattr(layer, name, None))]
    assert filled(name).report().dynamic_bytes == sum(state.nbytes for state in states) > 0


def test_figures_of_a_plain_cache_by_hand(filled):
    report = filled("llama").report()
    tokens = 2 * LENGTH  # of 2 rows
    assert (report.technique, report.num_layers, report.batch_size) == ("blocks", 2, 2)
    assert (report.tokens_seen, report.tokens_kept) == (LENGTH, LENGTH)
    assert report.stored_bytes == report.dynamic_bytes == report.read_bytes == 2 * tokens * KV_TOKEN_BYTES
    # 63 tokens lie in 4 blocks of 16 a row: one slot of each row is open, and fewer than 16 blocks have no spare one.
    assert report.reserved_bytes == 2 * 2 * 64 * KV_TOKEN_BYTES
    assert report.waste_bytes == 2 * 2 * KV_TOKEN_BYTES
    assert report.shared_bytes == 0
    assert report.compression_ratio == report.dynamic_bytes / report.reserved_bytes
    assert 0.8 < report.compression_ratio <= 1.0


def test_read_bytes_are_what_one_decode_step_reads(filled):
    windows = filled("mistral", rows=1)
    assert windows.report().read_bytes == 2 * 8 * KV_TOKEN_BYTES
    sinks = filled("llama", rows=1, cache="sliding_window", sliding_window=8, num_sink_tokens=4)
    assert sinks.report().read_bytes == 2 * (8 + 4) * KV_TOKEN_BYTES
    assert sinks.report().tokens_kept == 12
    assert sinks.report().compression_ratio > 3


def test_shared_bytes_of_forks_and_repeated_rows(filled, make_ids, tiny_model, run):
    cache = filled("llama", rows=1)
    alone = cache.report()
    fork = cache.fork()
    # Two own the 4 blocks a layer: each saves half of them.
    assert cache.report().shared_bytes == fork.report().shared_bytes == 2 * 64 * KV_TOKEN_BYTES / 2
    assert cache.report().reserved_bytes == alone.reserved_bytes
    run(tiny_model("llama"), fork, make_ids(1, 1))
    # The open block is no longer shared.
    assert cache.report().shared_bytes == 2 * 48 * KV_TOKEN_BYTES / 2
    del fork
    cache.batch_repeat_interleave(4)
    repeated = cache.report()
    assert repeated.shared_bytes == 2 * 64 * KV_TOKEN_BYTES * 3
    assert repeated.dynamic_bytes == 4 * alone.dynamic_bytes
    assert repeated.stored_bytes == alone.stored_bytes


def test_waste_is_bounded_at_any_length(tiny_model, make_ids, run):
    model = tiny_model("llama", max_position_embeddings=1024)
    cache = make_cache(model, block_size=3)
    run(model, cache, make_ids(2, 200))
    for step in range(60):
        run(model, cache, make_ids(2, 1, seed=step))
        report = cache.report()
        blocks = -(-report.tokens_seen // 3)
        spare_tokens = 2 * 2 * (3 + 3 * (blocks // 16))  # layers x rows x (open block + a 16th)
        assert 0 <= report.waste_bytes <= spare_tokens * KV_TOKEN_BYTES


def test_an_unused_cache_holds_nothing(tiny_model):
    report = make_cache(tiny_model("gemma3")).report()
    sizes = {name: value for name, value in report.to_dict().items() if name.endswith("_bytes")}
    assert sizes
    assert not any(sizes.values())
    assert report.compression_ratio == 1.0


def test_it_prints_and_serialises(filled):
    report = filled("llama").report()
    text = str(report)
    assert "KV cache: blocks" in text
    assert "2 x 63" in text
    assert format_bytes(report.stored_bytes) in text
    assert json.loads(json.dumps(report.to_dict()))["waste_bytes"] == report.waste_bytes


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345_678, "12.3 MB"), (5 * 10**15, "5000.0 TB")]
)
def test_sizes_are_in_powers_of_1000(size, text):
    assert format_bytes(size) == text
