"""transformers' own caches beside ours: the backend that is installed, named in the row, or a clear refusal."""

import importlib.util

import pytest
from transformers import QuantizedCache

from hf_kvcache.bench import peers
from hf_kvcache.bench.decode import bench_decode

HAS_BACKEND = any(importlib.util.find_spec(name) for name in ("optimum", "hqq"))


@pytest.fixture
def installed(monkeypatch):
    """`installed(quanto, hqq)`: which backends transformers finds."""

    def choose(quanto: bool, hqq: bool) -> None:
        monkeypatch.setattr(peers, "is_optimum_quanto_available", lambda: quanto)
        monkeypatch.setattr(peers, "is_hqq_available", lambda: hqq)

    return choose


@pytest.mark.parametrize(("quanto", "hqq", "backend"), [(1, 0, "quanto"), (0, 1, "hqq"), (1, 1, "quanto")])
def test_the_backend_that_is_there_is_taken_and_named(quanto, hqq, backend, installed, tiny_model, monkeypatch):
    asked = []
    installed(quanto, hqq)
    monkeypatch.setattr(peers, "QuantizedCache", lambda backend, config: asked.append((backend, config)))
    model = tiny_model("llama")
    peers.build_peer(model, "quantized", 10)
    assert asked == [(backend, model.config)]
    assert peers.peer_label("quantized") == f"quantized ({backend})"
    assert peers.peer_label("static") == "static"


def test_without_a_backend_nothing_is_measured(installed, tiny_model):
    installed(False, False)
    with pytest.raises(ImportError, match="pip install optimum-quanto, or pip install hqq"):
        bench_decode(tiny_model("llama"), contexts=(16,), steps=1, caches=(("quantized", {}),), progress=pytest.fail)


@pytest.mark.skipif(not HAS_BACKEND, reason="neither optimum-quanto nor hqq is installed")
@pytest.mark.filterwarnings("ignore")  # of the backend and of torch's deprecations it meets, not ours
def test_a_real_backend_is_measured(tiny_model):
    model = tiny_model("llama", hidden_size=256)  # a head dimension of 64, its group size
    assert isinstance(peers.build_peer(model, "quantized", 10), QuantizedCache)
    dynamic, quantized = bench_decode(model, contexts=(300,), steps=2, caches=(("quantized", {}),)).rows
    assert quantized.cache.startswith("quantized (")
    assert 0 < quantized.held_bytes < dynamic.held_bytes / 2
