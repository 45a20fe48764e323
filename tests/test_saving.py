"""Saved caches: generation goes on with the same bits whatever the technique, files hold what is stored and no more."""

import pytest
import torch
from safetensors import safe_open

from hf_kvcache import CACHE_ARG, calibrate, load_cache, make_cache, measure, registry

pytestmark = pytest.mark.core

LENGTH = 111
_CODED = {"residual_length": 24, "num_sink_tokens": 4}
_INTEGER = _CODED | {"q_group_size": 16}
_WINDOW = {"sliding_window": 30, "num_sink_tokens": 4, "block_size": 3}
_EVICTED = {"budget": 40, "when": "both", "interval": 30}
_READ = {"keep_ratio": 0.3, "num_recent_tokens": 5, "block_size": 4}
_READERS = [name for name, technique in registry.TECHNIQUES.items() if technique.number == 7]
_POLICIES = [name for name, technique in registry.TECHNIQUES.items() if technique.number == 9]

# (cache, model, options, config of the model); every technique at least once, past what it keeps of a short text.
CACHES = (
    ("blocks", "llama", {"block_size": 3}, {}),
    ("blocks", "gemma3", {}, {}),
    ("blocks", "jamba", {}, {}),
    ("blocks", "falcon_h1", {"block_size": 3}, {}),
    ("blocks", "deepseek_v3", {}, {}),
    ("blocks", "deepseek_v32", {"block_size": 3}, {}),
    ("blocks", "glm_moe_dsa", {}, {}),
    ("blocks", "minimax_m3", {}, {}),
    ("blocks", "qwen4_exp", {"block_size": 3}, {}),
    ("blocks", "deepseek_v4", {"block_size": 3}, {}),
    ("sliding_window", "llama", _WINDOW, {}),
    ("sliding_window", "gemma3", _WINDOW | {"positions": "cache"}, {}),
    ("blocks+sliding_window", "falcon_h1", _WINDOW, {}),
    ("int8", "llama", _INTEGER, {}),
    ("sliding_window+int4", "llama", _INTEGER | {"sliding_window": 50}, {}),
    ("int4", "gemma3", _INTEGER, {}),
    ("int4", "falcon_h1", _INTEGER, {}),
    ("int4", "deepseek_v3", _INTEGER, {"qk_rope_head_dim": 16}),
    ("int4", "minimax_m3", _INTEGER, {}),
    ("int8", "deepseek_v32", _INTEGER, {}),
    ("int8", "deepseek_v4", _INTEGER, {}),
    ("int2", "llama", _INTEGER | {"key_bits": 4}, {}),
    ("fp8", "llama", _CODED, {}),
    ("nf4", "llama", _CODED, {"head_dim": 32}),
    ("bnb8", "llama", _CODED, {"head_dim": 32}),
    ("fp4", "llama", _CODED, {"head_dim": 32}),
    ("int4", "llama", _INTEGER | {"bits": [[4, 2], [8, 8]]}, {}),
    ("transform", "llama", _CODED, {"max_position_embeddings": 512}),
    ("sliding_window+transform", "falcon_h1", _CODED | {"sliding_window": 200}, {"max_position_embeddings": 512}),
    *((name, "llama", _EVICTED, {}) for name in _POLICIES if name != "kvzip"),
    ("kvzip", "gemma3", {"budget": 40}, {}),
    ("adakv+int8", "llama", _EVICTED | _INTEGER, {}),
    ("adakv+int8", "llama", _EVICTED | _INTEGER | {"bits": [[[8, 4], 4], 8]}, {}),
    ("adakv+transform", "llama", _EVICTED | _CODED, {"max_position_embeddings": 512}),
    ("blend+turboquant", "falcon_h1", _EVICTED | _CODED, {}),
    *((name, "llama", _READ, {"max_position_embeddings": 512}) for name in _READERS),
    ("quest+int4", "llama", _READ | _INTEGER, {"max_position_embeddings": 512}),
    ("index+turboquant", "falcon_h1", _READ | _CODED, {"max_position_embeddings": 512}),
    ("compressed", "gemma3", _READ | {"segment_length": 16}, {}),
    ("compressed", "llama", _READ | {"keep": "selected"}, {}),
    ("compressed", "gemma3", _READ | {"segment_length": 16, "keep": "selected", "fit": "none"}, {}),
    ("turboquant", "llama", _CODED | {"residual_length": 0}, {"max_position_embeddings": 512}),
)


@pytest.fixture(params=CACHES, ids=lambda row: f"{row[0]}-{row[1]}")
def row(request):
    if request.param[0] in ("nf4", "fp4", "bnb8"):
        pytest.importorskip("bitsandbytes")
    return request.param


@pytest.fixture
def model(row, tiny_model):
    return tiny_model(row[1], **row[3])


@pytest.fixture
def new_cache(row, model, make_ids):
    options = row[2]
    if "transform" in row[0]:
        options = options | {"calibration": calibrate(model, make_ids(1, 400, seed=9))}
    return lambda: make_cache(model, row[0], **options)


@pytest.fixture
def reload(tmp_path):
    """`reload(model, cache)`: the cache, saved and loaded."""

    def save_and_load(model, cache, **options):
        cache.save(tmp_path / "cache.safetensors")
        return load_cache(model, tmp_path / "cache.safetensors", **options)

    return save_and_load


def assert_same_future(model, caches, run, ids, mask=None):
    """The same bits in every logit of the steps and chunks that follow, and the same bytes held."""
    one, other = (run(model, cache, ids, mask, chunks=[1] * 20 + [7, 1]) for cache in caches)
    assert torch.equal(one, other)
    assert one.isfinite().all()
    assert caches[0].report().to_dict() == caches[1].report().to_dict()


def test_every_technique_is_here():
    assert {name for row in CACHES for name in row[0].split("+")} == set(registry.TECHNIQUES)


def test_generation_goes_on_with_the_same_bits(model, new_cache, run, make_ids, reload):
    cache = new_cache()
    run(model, cache, make_ids(2, LENGTH + 60), chunks=[LENGTH] + [1] * 60)
    loaded = reload(model, cache)
    assert loaded.get_seq_length() == LENGTH + 60
    assert loaded.report().stored_bytes == cache.report().stored_bytes
    assert measure(loaded) == measure(cache)
    assert_same_future(model, [cache, loaded], run, make_ids(2, 28, seed=1))


def test_generate_gives_the_same_tokens(model, new_cache, make_ids, reload):
    cache = new_cache()
    first = model.generate(make_ids(1, LENGTH), max_new_tokens=20, do_sample=False, **{CACHE_ARG: cache})
    loaded = reload(model, cache)
    ids = torch.cat([first, make_ids(1, 9, seed=1)], dim=1)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options, **{CACHE_ARG: cache})
    assert torch.equal(model.generate(ids, **options, **{CACHE_ARG: loaded}), expected)


def test_left_padded_rows(model, new_cache, run, make_ids, left_pad, reload):
    ids, mask = left_pad(make_ids(3, LENGTH + 28), [LENGTH + 28, 41, 60])
    cache = new_cache()
    run(model, cache, ids[:, :LENGTH], mask[:, :LENGTH])
    assert_same_future(model, [cache, reload(model, cache)], run, ids[:, LENGTH:], mask)


def test_rows_that_beams_have_crossed(model, new_cache, run, make_ids, reload):
    cache = new_cache()
    run(model, cache, make_ids(3, LENGTH))
    for seed, beams in enumerate(([2, 0, 0], [1, 1, 2], [0, 2, 1])):
        run(model, cache, make_ids(3, 7, seed=seed), chunks=[1] * 7)
        cache.reorder_cache(torch.tensor(beams))
    assert_same_future(model, [cache, reload(model, cache)], run, make_ids(3, 28, seed=9))


def test_after_a_crop_and_with_a_recorded_past(row, model, new_cache, run, make_ids, reload):
    if row[1] in ("jamba", "falcon_h1", "qwen4_exp"):
        pytest.skip("recurrent states cannot be cropped")
    cache = new_cache()
    run(model, cache, make_ids(2, LENGTH))
    cache.activate_past_recording()
    run(model, cache, make_ids(2, 40, seed=1))
    loaded = reload(model, cache)
    for each in (cache, loaded):
        each.crop(-30)
    assert_same_future(model, [cache, loaded], run, make_ids(2, 28, seed=2))
    cache.crop(-5)
    assert_same_future(model, [cache, reload(model, cache)], run, make_ids(2, 28, seed=3))


def test_the_file_holds_the_stored_bytes_and_a_header(model, new_cache, run, make_ids, tmp_path):
    path, cache = tmp_path / "cache", new_cache()
    run(model, cache, make_ids(2, LENGTH))
    cache.save(path)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    host = (
        "block_ids",
        "sha256",
        "counts",
        "num_groups",
        "kept.rows",
        "scaling",
        "segments.ends",
    )  # no tensors of the cache
    overhead = sum(t.nbytes for name, t in tensors.items() if name.endswith(host) or name.startswith("calibration"))
    # A calibrated codec's own tensors are made from its statistics, which is what the file has.
    parts = [getattr(layer, "attention", layer) for layer in cache.layers]
    of_model = measure([*(getattr(part, "codecs", None) for part in parts), cache.recipe.options.get("calibration")])
    assert path.stat().st_size == 8 + header + overhead + cache.report().stored_bytes - of_model
    assert header + overhead < 30_000
