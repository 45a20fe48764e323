"""Transform coding and mixed bits on the two pretrained models, on other text than they were calibrated on."""

import pydoc_data.topics

import pytest

from hf_kvcache import calibrate, choose_bits
from hf_kvcache.bench.fidelity import bench_fidelity

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


def test_chosen_bits_are_closer_than_the_same_bits_everywhere(real_model):
    model, tokenizer = real_model("smollm2")
    uniform = {"key_bits": 4, "value_bits": 2}
    bits = choose_bits(model, tokenizer, "int4", bits_per_value=3.5)
    (chosen, spent), (everywhere, same) = _kl(model, tokenizer, [("int4", {"bits": bits}), ("int4", uniform)])
    assert spent <= same == 3.5
    assert chosen < everywhere
