"""Transform coding and mixed bits on the two pretrained models, on other text than they were calibrated on."""

import pydoc_data.topics

import pytest
import torch

from hf_kvcache import CACHE_ARG, calibrate, choose_bits, make_cache
from hf_kvcache.bench.fidelity import bench_fidelity
from hf_kvcache.bench.forced import forced_logits

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXT = "\n".join(pydoc_data.topics.topics[name] for name in ("assignment", "class", "import", "for"))


def _kl(model, tokenizer, caches) -> list[tuple[float, float]]:
    """KL divergence and marginal bits of each cache, over 128 tokens after 1,000."""
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    rows = bench_fidelity(model, ids, caches=caches, prefix=1000, scored=128).rows
    return [(row.kl, row.marginal_bits_per_value) for row in rows]


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_transform_is_the_closest_at_its_bytes(name, real_model):
    model, tokenizer = real_model(name)
    fitted = {"calibration": calibrate(model, tokenizer)}
    rotated = {"key_bits": 2, "value_bits": 2}
    caches = [("transform", fitted | {"key_bits": 2}), ("turboquant", rotated), ("transform", fitted | {"key_bits": 1})]
    (transform, bits), (turboquant, more_bits), (coarse, _) = _kl(model, tokenizer, caches)
    assert bits < more_bits
    assert transform < turboquant / 2
    assert transform < coarse


def test_what_a_policy_keeps_is_closest_by_transform(real_model):
    """To the same tokens as they were, over 100 tokens that follow; at fewer bits than the rotated codebook's 2."""
    model, tokenizer = real_model("smollm2")
    ids, logits = tokenizer(TEXT, return_tensors="pt").input_ids[:, :1100], {}
    rotated = {"key_bits": 2, "value_bits": 2}
    options = {"keydiff": {}, "keydiff+transform": {"key_bits": 2, "calibration": calibrate(model, tokenizer)}}
    for name, own in (options | {"keydiff+turboquant": rotated}).items():
        cache = make_cache(model, name, budget=600, **own)
        with torch.no_grad():
            with cache.prompt(ids[:, :1000], 1000):
                model(ids[:, :1000], use_cache=True, **{CACHE_ARG: cache})
            assert cache.layers[0].stored_length == 600
            logits[name] = forced_logits(model, cache, ids[:, 1000:])[0].log_softmax(-1)
    exact = logits.pop("keydiff")
    kl = {name: (exact.exp() * (exact - other)).sum(-1).mean().item() for name, other in logits.items()}
    assert kl["keydiff+transform"] < kl["keydiff+turboquant"] / 2


def test_chosen_bits_are_closer_than_the_same_bits_everywhere(real_model):
    model, tokenizer = real_model("smollm2")
    uniform = {"key_bits": 4, "value_bits": 2}
    bits = choose_bits(model, tokenizer, "int4", bits_per_value=3.5)
    (chosen, spent), (everywhere, same) = _kl(model, tokenizer, [("int4", {"bits": bits}), ("int4", uniform)])
    assert spent <= same == 3.5
    assert chosen < everywhere
