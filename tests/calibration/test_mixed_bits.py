"""Bits for each layer: the list, the choice by measured error, its budget, and the refusals."""

import itertools

import pytest
import torch

from hf_kvcache import choose_bits, make_cache
from hf_kvcache.calibration import default, mixed_bits
from hf_kvcache.calibration.mixed_bits import Choice, spend

SMALL = {"q_group_size": 16}


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=3)


def _widths(cache) -> list[tuple[int, int]]:
    return [tuple(codec.nbits for codec in layer.codecs) for layer in cache.layers if hasattr(layer, "codecs")]


@pytest.mark.core
@pytest.mark.parametrize(("name", "options"), [("int4", SMALL), ("turboquant", {})])
def test_each_layer_has_the_bits_that_the_list_says(name, options, model, make_ids, run):
    cache = make_cache(model, name, bits=[4, [2, 4], (4, 2)], residual_length=0, **options)
    assert _widths(cache) == [(4, 4), (2, 4), (4, 2)]
    run(model, cache, make_ids(2, 200), chunks=[199, 1])
    layers = [layer.marginal_bits for layer in cache.layers]
    assert layers[0] > layers[1] == pytest.approx(layers[2])
    assert cache.report().marginal_bits_per_value == pytest.approx(sum(layers) / 3)


@pytest.mark.core
def test_each_head_has_the_bits_that_its_list_says(model, make_ids, run):
    """A head decodes to what it would in a cache that has its width everywhere."""
    ids = make_ids(2, 200)
    mixed = make_cache(model, "int4", bits=[[[2, 8], [8, 4]], [4, 4], [[4, 4], 2]], residual_length=0, **SMALL)
    assert mixed.layers[2].codecs[0].nbits == 4, "equal widths are one codec"
    run(model, mixed, ids, chunks=[199, 1])
    for key_bits, value_bits, head in ((2, 8, 0), (8, 4, 1)):
        same = make_cache(model, "int4", key_bits=key_bits, value_bits=value_bits, residual_length=0, **SMALL)
        run(model, same, ids)
        for got, expected in (
            (mixed.layers[0].keys, same.layers[0].keys),
            (mixed.layers[0].values, same.layers[0].values),
        ):
            torch.testing.assert_close(got[:, head, :192], expected[:, head, :192])
    assert mixed.layers[0].marginal_bits == (2 + 8 + 8 + 4) / 4 + 2
    forked = mixed.fork()
    more = make_ids(2, 20, seed=1)
    torch.testing.assert_close(run(model, forked, more), run(model, mixed, more))
    with pytest.raises(ValueError, match="bits of layer 1 has 3 widths for 2 KV heads: give one for each"):
        make_cache(model, "int4", bits=[4, [[4, 4, 4], 4], 4], **SMALL)


def test_heads_that_predictions_do_not_depend_on_get_the_fewest_bits(model, make_ids):
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, :32] *= 1e-4  # both query heads of the first KV head
    bits = choose_bits(model, make_ids(1, 400), "int4", bits_per_value=6, per_head=True, **SMALL)
    assert [part[0] for part in bits[1]] == [2, 2]
    assert max(part[1] for part in bits[1]) > 2
    report = make_cache(model, "int4", bits=bits, **SMALL)
    assert sum(sum(part) for pair in bits for part in pair) / 12 + 2 <= 6
    assert len(report.layers) == 3


def test_only_layers_that_are_encoded_are_counted(tiny_model):
    assert _widths(make_cache(tiny_model("gemma3"), "int4", bits=[8], **SMALL)) == [(8, 8)]
    with pytest.raises(ValueError, match=r"bits has 2 entries and this model has 1 layers to encode \(\[1\]\)"):
        make_cache(tiny_model("gemma3"), "int4", bits=[8, 8], **SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": [3, 4, 4]}, r"bits=\[3, 4, 4\] is not allowed .* with a width \(2, 4, 8\) or a pair"),
        ({"bits": [[4, 4, 4]]}, "a pair"),
        ({"bits": [[[4, 3], 4]]}, "a width for each KV head"),
        ({"bits": []}, "a pair"),
        ({"bits": 4}, "a pair"),
        ({"bits": "best"}, "a pair"),
        ({"bits": [4, 4, 4], "key_bits": 2}, "bits and key_bits both say how many bits"),
        ({"bits": "auto"}, "belong together"),
        ({"bits_per_value": 3.0}, "belong together"),
        ({"bits": [4, 4, 4], "bits_per_value": 3.0}, "belong together"),
        ({"bits": "auto", "bits_per_value": "much"}, "a number from 0.25 to 8"),
    ],
    ids=str,
)
def test_wrong_bits_are_refused(options, message, model):
    with pytest.raises(ValueError, match=message):
        make_cache(model, "int4", **SMALL, **options)


def test_the_budget_is_kept_and_goes_where_the_error_is(model, make_ids):
    """A layer whose values are as good as zero needs no bits; what attention never sees costs least to round."""
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight *= 1e-4
    for budget in (4, 5, 6.5):
        bits = choose_bits(model, make_ids(1, 400), "int4", bits_per_value=budget, **SMALL)
        cache = make_cache(model, "int4", bits=bits, **SMALL)
        assert _widths(cache) == bits
        assert bits[1] == (2, 2)
        assert sum(k + v for k, v in bits) / 6 + 2 <= budget  # 2 bits of scales and zero points
    assert max(max(pair) for pair in bits) == 8


@pytest.mark.parametrize("seed", range(5))
def test_spending_is_near_the_best_possible(seed):
    """Against all choices, for errors that fall by about the same factor a bit, as those of quantizers do."""
    generator = torch.Generator().manual_seed(seed)
    scales = (torch.randn(5, generator=generator) * 2).exp().tolist()
    choices = [[Choice(b, b + 0.5, scale * 4.0**-b) for b in (2, 3, 4)] for scale in scales]
    chosen = spend(choices, 3.5)
    errors = [{option.nbits: option.error for option in options} for options in choices]
    allowed = [c for c in itertools.product((2, 3, 4), repeat=5) if sum(c) <= 15]
    best = min(sum(e[b] for e, b in zip(errors, c, strict=True)) for c in allowed)
    assert tuple(chosen) in allowed
    assert sum(e[b] for e, b in zip(errors, chosen, strict=True)) <= 1.25 * best


def test_a_width_that_errs_more_is_never_bought():
    assert spend([[Choice(2, 2, 1.0), Choice(4, 4, 2.0)]], 8) == [2]


def test_too_small_a_budget_names_the_least(model, make_ids):
    with pytest.raises(ValueError, match=r"bits_per_value=3 is too little: the smallest widths take 4\.00"):
        choose_bits(model, make_ids(1, 100), "int4", bits_per_value=3, **SMALL)
    with pytest.raises(ValueError, match="cache 'fp8' has no option 'bits"):
        choose_bits(model, make_ids(1, 100), "fp8", bits_per_value=3)


def test_auto_chooses_once_and_keeps_it(model, make_ids, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default, "_find_tokenizer", lambda *_: make_ids(1, 300))
    monkeypatch.setattr(mixed_bits, "token_ids", lambda ids, text: ids)
    options = {"bits": "auto", "bits_per_value": 5, **SMALL}
    cache = make_cache(model, "int4", **options)
    assert _widths(cache) == choose_bits(model, make_ids(1, 300), "int4", bits_per_value=5, **SMALL)
    monkeypatch.setattr(default, "choose_bits", lambda *_, **__: pytest.fail("chosen again"))
    assert _widths(make_cache(model, "int4", **options)) == _widths(cache)


def test_auto_without_a_tokenizer_names_the_remedy(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"no tokenizer was found .* bits=hf_kvcache\.choose_bits\("):
        make_cache(model, "turboquant", bits="auto", bits_per_value=3.3)
