"""What every cache promises, whatever it stores: one matrix of caches x rules, each at its identity setting."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_kvcache
from hf_kvcache import CACHE_ARG, make_cache, measure
from hf_kvcache.eviction.evicting_layer import EvictingLayer
from hf_kvcache.layers.attending_layer import AttendingLayer
from hf_kvcache.layers.sliding_window import SinkWindowLayer
from hf_kvcache.layers.states import StateLayer
from hf_kvcache.quantization.decoded_layer import DecodedLayer
from hf_kvcache.sparse.reading_layer import ReadingLayer

pytestmark = pytest.mark.core

LENGTH = 63  # tokens: no multiple of any block size below, and far past the models' own windows of 8
TOKENS = 17


@dataclass(frozen=True)
class Row:
    """A cache at its identity setting, on a tiny model whose layers it must serve."""

    cache: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        size = f"-{self.options['block_size']}" if "block_size" in self.options else ""
        positions = "-positions" if "positions" in self.options else ""
        return f"{self.cache}-{self.model}{size}{positions}"

    @property
    def has_states(self) -> bool:
        return self.model in ("jamba", "falcon_h1", "qwen4_exp")

    @property
    def has_own_windows(self) -> bool:
        return self.model in ("gemma3", "mistral", "gpt_oss", "deepseek_v4")

    @property
    def counts_padding(self) -> bool:
        """Whether the model itself cuts slots, padding included, into the blocks that it compresses or chooses."""
        return self.model in ("deepseek_v4", "minimax_m3")


_FITTED = {"keep": "selected", "keep_ratio": 1.0, "num_recent_tokens": 10}
_SUMMARIES = _FITTED | {"fit": "none", "segment_length": 16}
_WINDOW = {"sliding_window": 128, "num_sink_tokens": 4}
# An indexer that chooses few tokens chooses others when rounding moves its scores, which chunks and rows do.
_ALL = {"index_topk": 128}
_CODED = {"residual_length": 128, "q_group_size": 16}

CACHES = (
    Row("blocks", "llama", {"block_size": 16}),
    Row("blocks", "llama", {"block_size": 3}),
    Row("blocks", "mistral", {"block_size": 3}),
    Row("blocks", "gemma3", {"block_size": 16}),
    Row("blocks", "gpt_oss", {"block_size": 3}),
    Row("blocks", "jamba", {"block_size": 16}),
    Row("blocks", "falcon_h1", {"block_size": 3}),
    Row("blocks", "deepseek_v3", {"block_size": 16}),
    Row("blocks", "deepseek_v32", {"block_size": 3}, _ALL),
    Row("blocks", "glm_moe_dsa", {"block_size": 16}, _ALL),
    Row("blocks", "minimax_m3", {"block_size": 3}),
    Row("blocks", "qwen4_exp", {"block_size": 16}),
    Row("blocks", "deepseek_v4", {"block_size": 3}, _ALL),
    Row("int8", "deepseek_v32", _CODED, _ALL),
    Row("int8", "deepseek_v3", _CODED, {"qk_rope_head_dim": 16}),
    Row("sliding_window", "llama", _WINDOW | {"block_size": 3}),
    Row("sliding_window", "gemma3", _WINDOW | {"positions": "cache"}),
    Row("blocks+sliding_window", "falcon_h1", _WINDOW | {"block_size": 16}),
    Row("expected_attention", "llama", {"budget": 128, "when": "both", "interval": 5, "block_size": 3}),
    Row("adakv", "gemma3", {"keep_ratio": 1.0, "positions": "cache"}),
    Row("h2o", "falcon_h1", {"budget": 128, "when": "decode"}),
    Row("kvzip", "gpt_oss", {"budget": 128}),
    Row("quest", "llama", {"block_size": 3}),
    Row("index", "gemma3", {"top_p": 1.0}),
    Row("page_mean", "falcon_h1", {"keep_ratio": 1.0, "block_size": 4}),
    Row("sparq", "gpt_oss", {"budget": 128}),
    Row("topk", "llama", {"budget": 128, "block_size": 3}),
    Row("compressed", "llama", {"block_size": 3, "segment_length": 16}),
    Row("compressed", "gemma3", _SUMMARIES),
    Row("compressed", "falcon_h1", _FITTED),
    Row("compressed", "llama", _FITTED | {"fit": "reading", "block_size": 3}),
)


@pytest.fixture(params=CACHES, ids=str)
def row(request) -> Row:
    return request.param


@pytest.fixture
def model(row, tiny_model):
    return tiny_model(row.model, **row.config)


@pytest.fixture
def new_cache(row, model):
    return lambda: make_cache(model, row.cache, **row.options)


@pytest.fixture
def assert_close(row):
    """`assert_close(logits, expected)` of the same tokens in other chunks or rows."""
    # transformers' own Jamba moves its logits by 3e-4 when a prompt is split (measured with DynamicCache); mixed-up
    # rows or tokens move them by 1e-1.
    tolerance = {"atol": 1e-3, "rtol": 0.0} if row.model == "jamba" else {}
    return lambda actual, expected: torch.testing.assert_close(actual, expected, **tolerance)


def dynamic(model) -> DynamicCache:
    return DynamicCache(config=model.config)


def keys_and_values(cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer that has attention, what it stores."""
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [(layer.keys, layer.values) for layer in layers]


def assert_same_storage(cache, reference, *, exact: bool) -> None:
    """Equal stored states; a native window may hold up to two tokens more than DynamicCache does, for a rollback."""
    ours, theirs = keys_and_values(cache), keys_and_values(reference)
    assert len(ours) == len(theirs) > 0
    for pair, expected in zip(ours, theirs, strict=True):
        for state, wanted in zip(pair, expected, strict=True):
            assert state.shape[2] - wanted.shape[2] in (0, 1, 2)
            state = state[:, :, -wanted.shape[2] :]
            if exact:
                assert torch.equal(state, wanted)
            else:
                torch.testing.assert_close(state, wanted)


def test_prefill_and_decode_match_dynamic_cache(model, new_cache, run, make_ids):
    ids, cache, reference = make_ids(2, LENGTH), new_cache(), dynamic(model)
    prompt, rest = ids[:, :-TOKENS], ids[:, -TOKENS:]
    torch.testing.assert_close(run(model, cache, prompt), run(model, reference, prompt))
    assert_same_storage(cache, reference, exact=True)
    steps = [1] * TOKENS
    torch.testing.assert_close(run(model, cache, rest, chunks=steps), run(model, reference, rest, chunks=steps))
    assert_same_storage(cache, reference, exact=False)
    assert cache.get_seq_length() == reference.get_seq_length() == LENGTH


def test_chunked_prefill_matches_one_prefill(model, new_cache, run, make_ids, assert_close):
    ids, whole, chunked = make_ids(2, LENGTH), new_cache(), new_cache()
    expected = run(model, whole, ids)
    assert_close(run(model, chunked, ids, chunks=[20, 1, 1, 7, 3, 31]), expected)


def test_generate_picks_the_tokens_of_a_manual_loop(row, model, new_cache, run, make_ids):
    ids = make_ids(2, 19)
    chosen, cache = ids, new_cache()
    logits = run(model, cache, ids)
    for _ in range(TOKENS):
        chosen = torch.cat([chosen, logits[:, -1:].argmax(-1)], dim=1)
        logits = run(model, cache, chosen[:, -1:])
    options = {"max_new_tokens": TOKENS, "do_sample": False}
    assert torch.equal(model.generate(ids, **options, **{CACHE_ARG: new_cache()}), chosen)
    hf_kvcache.enable()
    by_name = model.generate(ids, **options, cache_implementation=row.cache, cache_config=dict(row.options))
    assert torch.equal(by_name, chosen)


def test_batch_rows_are_independent(row, model, new_cache, run, make_ids, left_pad, assert_close):
    if row.counts_padding:
        pytest.skip("with this model padding is no padding under transformers' own cache either")
    ids, mask = left_pad(make_ids(3, LENGTH), [LENGTH, 11, 42])
    together = run(model, new_cache(), ids, mask, chunks=[40, 1, 1, 21])
    for i, length in enumerate([LENGTH, 11, 42]):
        alone = run(model, new_cache(), ids[i : i + 1, -length:])
        assert_close(together[i : i + 1, -length:], alone)


def test_reset_equals_new(model, new_cache, run, make_ids):
    cache = new_cache()
    run(model, cache, make_ids(2, LENGTH), chunks=[LENGTH - 1, 1])
    cache.reset()
    assert (cache.get_seq_length(), measure(cache)) == (0, 0)
    # Another batch size and dtype than before.
    ids, model = make_ids(3, 21, seed=1), model.to(torch.bfloat16)
    fresh, steps = new_cache(), [18, 1, 1, 1]
    assert torch.equal(run(model, cache, ids, chunks=steps), run(model, fresh, ids, chunks=steps))
    assert_same_storage(cache, fresh, exact=True)
    assert measure(cache) == measure(fresh)


@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("past", [0, 5, 8, 33])
def test_get_mask_sizes_equals_what_update_returns(model, new_cache, past, length):
    cache, seen = new_cache(), past + length
    hf_kvcache.disable()  # or a layer would leave the attention to itself and return less
    states = torch.arange(seen, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, seen, 16)
    checked = 0
    for index, layer in enumerate(cache.layers):
        part = getattr(layer, "attention", layer)
        if isinstance(part, (StateLayer, AttendingLayer)) and not isinstance(part, DecodedLayer):
            continue  # no keys, or never returned without the attention hook
        if past:
            cache.update(states[:, :, :past], states[:, :, :past], index)
        kv_length, kv_offset = layer.get_mask_sizes(length)
        keys, values = cache.update(states[:, :, past:], states[:, :, past:], index)
        expected = torch.arange(kv_offset, kv_offset + kv_length, dtype=torch.float32)
        assert torch.equal(keys[0, 0, :, 0], expected)
        assert torch.equal(values[0, 0, :, 0], expected)
        checked += 1
    if not checked:
        pytest.skip("this cache returns all its tokens to the attention hook only")


def test_beam_reorder(model, new_cache, run, make_ids, assert_close):
    prompt, rest, beams = make_ids(3, 30), make_ids(3, 5, seed=1), torch.tensor([2, 0, 0])
    cache = new_cache()
    run(model, cache, prompt)
    cache.reorder_cache(beams)
    expected = run(model, new_cache(), torch.cat([prompt[beams], rest], 1))[:, -5:]
    assert_close(run(model, cache, rest, chunks=[1] * 5), expected)


def test_rows_are_repeated_and_selected(model, new_cache, run, make_ids, assert_close):
    prompt, rest = make_ids(2, 30), make_ids(3, 5, seed=1)
    cache = new_cache()
    run(model, cache, prompt)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    expected = run(model, new_cache(), torch.cat([prompt[[1, 0, 0]], rest], 1))[:, -5:]
    assert_close(run(model, cache, rest, chunks=[1, 4]), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: cache.fork()], ids=["deepcopy", "fork"])
def test_copies_are_independent(model, new_cache, run, make_ids, duplicate, assert_close):
    prompt, endings = make_ids(2, 30), [make_ids(2, 9, seed=seed) for seed in (1, 2)]
    cache = new_cache()
    run(model, cache, prompt)
    caches = [cache, duplicate(cache)]
    expected = [run(model, new_cache(), torch.cat([prompt, ending], 1))[:, -9:] for ending in endings]
    logits = [[], []]
    for step in range(9):  # in turns, so that each writes while the other holds on to what they share
        for i in range(2):
            logits[i].append(run(model, caches[i], endings[i][:, step : step + 1]))
    for i in range(2):
        assert_close(torch.cat(logits[i], 1), expected[i])
    caches.pop(0).reset()
    cache.reset()
    run(model, caches[0], endings[0], chunks=[9])


@pytest.mark.parametrize("count", [1, 5])
def test_crop_equals_never_having_seen(row, model, new_cache, run, make_ids, count, assert_close):
    prompt, wrong, rest = make_ids(2, 40), make_ids(2, count, seed=1), make_ids(2, 9, seed=2)
    cache = new_cache()
    run(model, cache, prompt)
    if row.has_own_windows:
        cache.activate_past_recording()
    run(model, cache, wrong)
    if row.has_states:
        before = cache.get_seq_length()
        with pytest.raises(RuntimeError, match="a recurrent state keeps no history"):
            cache.crop(-count)
        assert cache.get_seq_length() == before, "a refused crop changed a layer"
        return
    cache.crop(-count)
    assert cache.get_seq_length() == 40
    expected = run(model, new_cache(), torch.cat([prompt, rest], 1))[:, -9:]
    assert_close(run(model, cache, rest, chunks=[1, 1, 7]), expected)


def test_bytes_are_those_of_the_stored_tokens(model, new_cache, run, make_ids):
    cache = new_cache()
    run(model, cache, make_ids(2, LENGTH), chunks=[LENGTH - 1, 1])
    report = cache.report()
    states = [(layer.conv_states, layer.recurrent_states) for layer in cache.layers if isinstance(layer, StateLayer)]
    parts = [getattr(layer, "attention", layer) for layer in cache.layers]
    sinks = [part.sinks for part in parts if isinstance(part, SinkWindowLayer)]
    notes = [(part.first_slots, part._log) for part in parts if isinstance(part, EvictingLayer)]
    reading = [part for part in parts if isinstance(part, ReadingLayer)]
    notes += [(part.first, part.fitted) for part in reading]
    notes += [part.sinks for part in parts if isinstance(part, DecodedLayer)]
    streams = [getattr(part, "streams", ()) for part in parts]
    streams = [stream for each in streams for stream in (each.values() if isinstance(each, dict) else each)]
    notes += [plane.clone() for stream in streams if stream.table for plane in stream.read()]
    shared = [layer.keys.nbytes for layer in parts if getattr(layer, "shares_values", False)]
    # The keys and values of entries are among those of the layer.
    planes = [
        plane for part in reading for n, s in part.sides.items() for plane in s.materialize()[2 * (n == "entries") :]
    ]
    tokens = sum(state.nbytes for pair in keys_and_values(cache) for state in pair) - sum(shared)
    summaries = sum(plane.nbytes for plane in planes)
    assert report.stored_bytes == tokens + summaries + measure(states) + measure(sinks) + measure(notes)
    assert report.reserved_bytes == measure(cache)
    assert report.tokens_seen == LENGTH
