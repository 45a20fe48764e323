"""The fidelity benchmark: zero for an exact cache, ordered by bits for the others, and the same figures by hand."""

import json

import pytest
import torch
from transformers import DynamicCache

from hf_kvcache import CACHE_ARG, make_cache
from hf_kvcache.bench.fidelity import bench_fidelity

OPTIONS = {"q_group_size": 16, "residual_length": 0, "num_sink_tokens": 0}


@pytest.fixture
def model(tiny_model):
    # Larger keys make a sharper softmax, in which rounding shows.
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 40
            layer.self_attn.q_proj.weight *= 4
    return model


def test_exact_caches_diverge_by_nothing_and_fewer_bits_by_more(model, make_ids):
    caches = [("blocks", {}), ("int8", OPTIONS), ("int4", OPTIONS), ("int2", OPTIONS)]
    bench = bench_fidelity(model, make_ids(1, 200), caches=caches, prefix=100, scored=90)
    exact, *coded = bench.rows
    assert abs(exact.kl) < 1e-6
    assert exact.top1_agreement == 1.0
    assert [row.marginal_bits_per_value for row in bench.rows] == [32, 10, 6, 4]
    assert abs(exact.kl) < coded[0].kl < coded[1].kl < coded[2].kl
    json.dumps(bench.to_dict())
    assert bench.table().row_count == 4


def test_figures_by_hand(model, make_ids):
    ids = make_ids(1, 80)
    row = bench_fidelity(model, ids, caches=[("int2", OPTIONS)], prefix=60, scored=20).rows[0]
    logits = []
    with torch.no_grad():
        for cache in (DynamicCache(config=model.config), make_cache(model, "int2", **OPTIONS)):
            parts = [
                model(ids[:, :60], **{CACHE_ARG: cache}).logits[0, -1:],
                model(ids[:, 60:79], **{CACHE_ARG: cache}).logits[0],
            ]
            logits.append(torch.cat(parts).log_softmax(-1))
    full, got = logits
    kl = torch.nn.functional.kl_div(got, full, log_target=True, reduction="batchmean").item()
    assert row.kl == pytest.approx(kl, rel=1e-3)


def test_sparse_reads_are_measured_token_by_token(tiny_model, make_ids):
    """In longer forwards they read everything, and would diverge by nothing."""
    # Attention that is not sharpened: a few tokens are not nearly all of it.
    caches = [("topk", {"keep_ratio": ratio, "num_recent_tokens": 8}) for ratio in (0.1, 0.3, 1.0)]
    rows = bench_fidelity(tiny_model("llama"), make_ids(1, 200), caches=caches, prefix=100, scored=90).rows
    assert rows[0].kl > rows[1].kl > 1e-4 > abs(rows[2].kl)
    assert rows[0].read_ratio < rows[1].read_ratio < 1


def test_a_short_text_is_refused(model, make_ids):
    with pytest.raises(ValueError, match="the text has 50 tokens and prefix=60 with scored=20 needs 80"):
        bench_fidelity(model, make_ids(1, 50), caches=[], prefix=60, scored=20)
