"""Reading in place: no copy of the context a step, and run by run when the blocks are fragmented."""

import pytest
import torch
from transformers import DynamicCache

import hf_kvcache
from hf_kvcache import CACHE_ARG, make_cache
from hf_kvcache.attention import attend_merged
from hf_kvcache.blocks import BlockTable, runs
from hf_kvcache.kernels import decode, native
from hf_kvcache.layers import block_layer

pytestmark = pytest.mark.core


@pytest.fixture
def no_copies(monkeypatch):
    """`no_copies()`: from here on the test fails when a table copies its tokens, or the context is concatenated."""
    concatenate = torch.cat

    def gathered(self, plane, span, first, last, origin):
        assert span.runs, "blocks were gathered"
        view = self.arena.view
        return [(run.row_start, view(plane, run, first - origin, last - first)) for run in span.runs]

    def checked_cat(tensors, dim=0, **kwargs):
        assert all(t.ndim != 4 or t.shape[2] < 200 for t in tensors), "the context was concatenated"
        return concatenate(tensors, dim, **kwargs)

    def begin():
        monkeypatch.setattr(BlockTable, "_read", gathered)
        monkeypatch.setattr(torch, "cat", checked_cat)

    return begin


def test_decoding_reads_the_blocks_in_place(no_copies, tiny_model, make_ids, run):
    model = tiny_model("llama", max_position_embeddings=1024)
    cache = make_cache(model, block_size=16)
    run(model, cache, make_ids(3, 300))
    no_copies()
    for step in range(20):
        run(model, cache, make_ids(3, 1, seed=step))
        for layer in cache.layers:
            assert layer.keys.data_ptr() == layer.table.arena.planes[0].data_ptr()
            assert layer.read_bytes == layer.keys.nbytes + layer.values.nbytes


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens_per_run", [1, 32], ids=["runs", "runs_and_gathers"])
def test_fragmented_beams_attend_run_by_run(tokens_per_run, padded, monkeypatch, tiny_model, make_ids, left_pad):
    monkeypatch.setattr(runs, "MIN_TOKENS_PER_RUN", tokens_per_run)
    model = tiny_model("llama", max_position_embeddings=1024)
    ids, mask = left_pad(make_ids(2, 63), [63, 40 if padded else 63])
    options = {"max_new_tokens": 40, "do_sample": False, "num_beams": 4, "attention_mask": mask}
    expected = model.generate(ids, **options)
    cache, num_groups = make_cache(model, block_size=3), []

    def watch(query, groups, scaling):
        num_groups.append(len(groups))
        return attend_merged(query, groups, scaling)

    monkeypatch.setattr(block_layer, "attend_merged", watch)
    assert torch.equal(model.generate(ids, **options, **{CACHE_ARG: cache}), expected)
    assert num_groups, "the beams never fragmented their blocks"
    assert max(num_groups) > 1
    # What the 8 beams share is read less often than once a beam, and each token of a beam at least once.
    layer = cache.layers[0]
    whole = layer.keys.nbytes + layer.values.nbytes
    assert whole / 8 < layer.read_bytes < whole


def test_beams_share_the_prompt(tiny_model, make_ids):
    model = tiny_model("llama")
    ids, options = make_ids(1, 63), {"max_new_tokens": 9, "do_sample": False, "num_beams": 4}
    cache = make_cache(model, block_size=3)
    with torch.no_grad():
        model(ids[:, :62], **{CACHE_ARG: cache})
    stored = cache.report().stored_bytes
    model.generate(ids, **options, **{CACHE_ARG: cache})
    report = cache.report()
    # 4 beams hold the 63 prompt tokens once and at most 8 tokens and an open block of their own.
    assert report.stored_bytes <= stored * (63 + 4 * (8 + 3)) / 62
    assert report.shared_bytes >= 3 * stored * 60 / 62
    assert report.dynamic_bytes == stored * 4 * (63 + 8) / 62


def test_the_hook_is_not_needed(tiny_model, make_ids, run):
    """A cache used after `disable()` gives all its keys back to the model, as any cache does."""
    model, ids = tiny_model("llama"), make_ids(2, 30)
    cache = make_cache(model, block_size=3)
    run(model, cache, ids[:, :20])
    hf_kvcache.disable()
    logits = run(model, cache, ids[:, 20:], chunks=[1] * 10)
    expected = run(model, DynamicCache(config=model.config), ids)[:, 20:]
    torch.testing.assert_close(logits, expected)
    assert not hf_kvcache.is_enabled()


def test_two_caches_in_turns_do_not_meet(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), [make_ids(2, 30, seed=seed) for seed in (1, 2)]
    caches = [make_cache(model, block_size=3), make_cache(model, "sliding_window", sliding_window=64)]
    logits = [[], []]
    for step in range(30):
        for i in range(2):
            logits[i].append(run(model, caches[i], ids[i][:, step : step + 1]))
    for i in range(2):
        expected = run(model, DynamicCache(config=model.config), ids[i])
        torch.testing.assert_close(torch.cat(logits[i], 1), expected)


def test_an_update_that_no_attention_follows_does_not_reach_another_model(tiny_model, make_ids, run):
    cache, model, ids = make_cache(tiny_model("llama"), block_size=3), tiny_model("qwen2"), make_ids(2, 9)
    run(tiny_model("llama"), cache, ids)
    cache.update(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16), 0)
    logits = run(model, DynamicCache(config=model.config), ids)
    hf_kvcache.disable()
    torch.testing.assert_close(logits, run(model, DynamicCache(config=model.config), ids))


def test_memory_returns_when_most_of_it_is_free(tiny_model, make_ids, run):
    model = tiny_model("llama", max_position_embeddings=1024)
    cache = make_cache(model, block_size=16)
    run(model, cache, make_ids(4, 300))
    full = cache.report().reserved_bytes
    cache.batch_select_indices(torch.tensor([2]))
    assert cache.report().reserved_bytes < full / 2
    cache.crop(-200)
    assert cache.report().reserved_bytes < full / 8


def test_a_full_pool_names_the_cap(tiny_model, make_ids):
    model = tiny_model("llama")
    hf_kvcache.enable()
    options = {"cache_implementation": "blocks", "cache_config": {"max_bytes": 20_000}}
    with pytest.raises(RuntimeError, match=r"the block pool on cpu is empty: \d+ bytes are needed and max_bytes=20000"):
        model.generate(make_ids(1, 63), max_new_tokens=4, **options)


@pytest.fixture
def kernel_calls(monkeypatch):
    """The lengths of the sequences that the compiled kernel attended to, as on a machine where it gains time."""
    monkeypatch.setattr(block_layer, "HAS_WIDE_VECTORS", True)
    lengths, attend = [], decode.attend

    def watched(query, segments, **kwargs):
        lengths.append(segments[0].struct.length)
        return attend(query, segments, **kwargs)

    monkeypatch.setattr(decode, "attend", watched)
    return lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_long_sequences_are_attended_to_by_the_kernel(
    is_padded, dtype, kernel, kernel_calls, monkeypatch, tiny_model, make_ids, left_pad, run
):
    monkeypatch.setattr(block_layer, "MIN_KERNEL_LENGTH", 63)
    model = tiny_model("llama").to(dtype)
    ids, mask = left_pad(make_ids(3, 70), [70, 40, 66] if is_padded else [70] * 3)
    mask = mask if is_padded else None
    chunks = [60] + [1] * 10
    cache = make_cache(model, block_size=3)
    got = run(model, cache, ids, mask, chunks=chunks)
    assert kernel_calls == [length for length in range(63, 71) for _ in cache.layers]
    assert cache.layers[0].read_bytes == cache.layers[0].keys.nbytes + cache.layers[0].values.nbytes
    expected = run(model, DynamicCache(config=model.config), ids, mask, chunks=chunks)
    visible = slice(None) if mask is None else mask.bool()
    tolerance = {} if dtype == torch.float32 else {"rtol": 0.0, "atol": 0.02}  # a few roundings of values near 1
    torch.testing.assert_close(got[visible], expected[visible], **tolerance)


def test_without_a_compiler_torch_attends_and_nothing_is_said(monkeypatch, kernel_calls, tiny_model, make_ids, run):
    monkeypatch.setattr(block_layer, "MIN_KERNEL_LENGTH", 1)
    monkeypatch.setattr(native, "_library", lambda: (None, "no compiler here"))
    model, ids = tiny_model("llama"), make_ids(2, 30)
    got = run(model, make_cache(model, block_size=3), ids, chunks=[20] + [1] * 10)
    torch.testing.assert_close(got, run(model, DynamicCache(config=model.config), ids))
    assert not kernel_calls


def test_without_wide_vectors_torch_attends(monkeypatch, kernel, kernel_calls, tiny_model, make_ids, run):
    monkeypatch.setattr(block_layer, "MIN_KERNEL_LENGTH", 1)
    monkeypatch.setattr(block_layer, "HAS_WIDE_VECTORS", False)
    run(tiny_model("llama"), make_cache(tiny_model("llama"), block_size=3), make_ids(2, 22), chunks=[20, 1, 1])
    assert not kernel_calls
