"""Caches whose policy goes with codecs that differ from head to head: `transform`, and a width for each head."""

import pytest

from hf_kvcache import calibrate, make_cache

LENGTH, NEW = 331, 180
_OPTIONS = {"budget": 190, "num_sink_tokens": 3, "num_recent_tokens": 5, "residual_length": 40}
_MORE = {
    # Keys and values of each layer, and of their heads where these differ.
    "int4": {"q_group_size": 32, "bits": [[[2, 8], 4], [8, [4, 2]]]},
    "turboquant": {"bits": [[[4, 2], [2, 3]], 2]},
    "transform": {"key_bits": 1.5},  # some coefficients have no bits
}


@pytest.fixture(params=[False, True], ids=["full", "padded"])
def batch(request, make_ids, left_pad):
    """Ids and mask of two rows: of a prompt of 331 tokens, and 180 more."""
    ids = make_ids(2, LENGTH + NEW)
    return left_pad(ids, [LENGTH + NEW - 44, LENGTH + NEW] if request.param else [LENGTH + NEW] * 2)


@pytest.fixture(scope="module")
def fitted(tiny_model, make_ids):
    """A tiny model and the calibration of its keys."""
    model = tiny_model("llama", head_dim=32, max_position_embeddings=1024)
    return model, calibrate(model, make_ids(1, 600, seed=9))


@pytest.fixture(scope="module")
def new_cache(fitted):
    """`new_cache(name, **options)`: an empty cache of the fitted model, or another one with its shapes."""

    def build(name, *, model=fitted[0], **options):
        policy, encoding = name.split("+")
        chosen = _OPTIONS | _MORE[encoding] | ({"calibration": fitted[1]} if encoding == "transform" else {})
        if policy == "duo_attention":
            chosen["pattern"] = [[0.9, 0.1], [0.2, 0.8]]
        return make_cache(model, name, **chosen | options)

    return build


@pytest.fixture(scope="module")
def compressed(fitted, new_cache, run):
    """`compressed(name, ids, mask, **options)`: such a cache of a prompt, after eviction."""

    def build(name, ids, mask, **options):
        cache = new_cache(name, **options)
        run(fitted[0], cache, ids[:, :LENGTH], mask)
        cache.compress(ids[:, :LENGTH])
        return cache

    return build
