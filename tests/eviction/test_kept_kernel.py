"""The decode kernel over kept tokens against attention without it, for every kind of store."""

import copy

import pytest
import torch

from hf_kvcache import make_cache
from hf_kvcache.eviction import kept_kernel
from hf_kvcache.eviction.compression import evicting_layers

pytestmark = pytest.mark.core

LENGTH = 301
OPTIONS = {"num_sink_tokens": 3, "num_recent_tokens": 21, "budget": 150, "residual_length": 40}
CACHES = {
    "keydiff": {},
    "adakv": {"safeguard": 0.0},
    "keydiff+int4": {"q_group_size": 32},
    "adakv+int8": {"q_group_size": 16, "safeguard": 0.0},
    "snapkv+turboquant": {},
    "h2o+fp8": {},
    "duo_attention+int4": {"q_group_size": 32, "bits": [[[2, 8], 4], [[8, 4], [4, 2]]], "pattern": [[0.9, 0.1]] * 2},
}


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", CACHES)
def test_a_step_equals_one_without_the_kernel(
    name, is_padded, block_size, kernel, tiny_model, make_ids, left_pad, run, monkeypatch
):
    model = tiny_model("llama", head_dim=32, max_position_embeddings=1024)
    ids, mask = left_pad(make_ids(3, LENGTH + 40), [LENGTH + 40, 250, 300] if is_padded else [LENGTH + 40] * 3)
    mask = mask if is_padded else None
    given = {key: value for key, value in OPTIONS.items() if key != "residual_length" or "+" in name}
    cache = make_cache(model, name, block_size=block_size, **given, **CACHES[name])
    run(model, cache, ids[:, :LENGTH], None if mask is None else mask[:, :LENGTH])
    cache.compress(ids[:, :LENGTH])
    beams = torch.tensor([2, 0, 2, 1])
    cache.batch_select_indices(beams)  # rows that share their groups
    ids, mask = ids[beams], None if mask is None else mask[beams]
    calls = []
    attend = kept_kernel.attend
    monkeypatch.setattr(kept_kernel, "MIN_LENGTH", 0)
    monkeypatch.setattr(kept_kernel, "attend", lambda *args: calls.append(1) or attend(*args))
    other = copy.deepcopy(cache)
    logits = run(model, cache, ids[:, LENGTH:], mask, chunks=[1] * 40)
    assert len(calls) == 40 * len(evicting_layers(cache.layers))
    monkeypatch.setattr(kept_kernel, "can_serve", lambda *args: False)
    expected = run(model, other, ids[:, LENGTH:], mask, chunks=[1] * 40)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


def test_short_contexts_odd_blocks_and_missing_compilers_go_without(kernel, tiny_model, make_ids, run, monkeypatch):
    model, ids = tiny_model("llama", head_dim=32), make_ids(1, LENGTH)
    caches = [make_cache(model, "keydiff", budget=150, block_size=size) for size in (16, 24)]
    for cache in caches:
        run(model, cache, ids)
        cache.compress()
    query = torch.zeros(1, 4, 1, 32)
    layers = [cache.layers[0] for cache in caches]
    assert not kept_kernel.can_serve(query, layers[0].kept, layers[0].table)
    monkeypatch.setattr(kept_kernel, "MIN_LENGTH", 0)
    served = [kept_kernel.can_serve(query, layer.kept, layer.table) for layer in layers]
    assert served == [True, False]
    monkeypatch.setattr(kept_kernel.native, "library", lambda: None)
    anew = caches[0].fork().layers[0]
    assert not kept_kernel.can_serve(query, anew.kept, anew.table)
