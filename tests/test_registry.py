"""Names, options and compositions: checked before any model runs, with errors that list what exists."""

import pytest

from hf_kvcache import registry
from hf_kvcache.registry import CATALOG, TECHNIQUES, resolve

pytestmark = pytest.mark.core


def test_defaults_are_filled_in():
    recipe = resolve("sliding_window", {"sliding_window": 8})
    assert recipe.options["sliding_window"] == 8
    assert recipe.options["num_sink_tokens"] == 4
    assert recipe.options["block_size"] == 16, "every cache stores its tokens in blocks"


def test_techniques_compose_when_they_decide_different_things():
    recipe = resolve("blocks + sliding_window", {"block_size": 3})
    assert [technique.name for technique in recipe.techniques] == ["blocks", "sliding_window"]
    assert recipe.fills("retention") is TECHNIQUES["sliding_window"]
    assert recipe.fills("no such role") is None
    assert resolve("blocks").fills("retention") is None


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_resolves_with_its_defaults(name):
    recipe = resolve(name)
    for option in TECHNIQUES[name].options:
        assert recipe.options[option.name] == option.default
        assert option.check(option.default) is None, f"the default of {option.name} is not allowed"
        assert option.check(object()) is not None, f"{option.name} takes anything"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("block", r"unknown cache technique 'block' \(did you mean 'blocks'\?\): choose from 'adakv', .*'blocks'"),
        ("slidingwindow", r"did you mean 'sliding_window'\?"),
        ("zzz", r"unknown cache technique 'zzz': choose from .*'blocks'.*'sliding_window'"),
        ("blocks+", r"unknown cache technique ''"),
        ("blocks+dynamic", r"'dynamic' is transformers' own cache and does not compose with ours"),
        ("blocks+blocks", r"'blocks' and 'blocks' do not compose: both decide the storage\. Keep one"),
    ],
)
def test_names_that_do_not_exist_or_compose(name, message):
    with pytest.raises(ValueError, match=message):
        resolve(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocksize": 16}, r"no option 'blocksize' \(did you mean 'block_size'\?\): choose from .*'global_every'"),
        ({"block_size": 0}, r"block_size=0 is not allowed for cache 'sliding_window': give an integer of at least 1"),
        ({"block_size": True}, r"block_size=True is not allowed"),
        ({"block_size": 16.0}, r"block_size=16\.0 is not allowed"),
        ({"max_bytes": 0}, r"give an integer of at least 1, or None"),
        ({"sliding_window": None}, r"sliding_window=None is not allowed"),
        ({"num_sink_tokens": -1}, r"give an integer of at least 0\."),
        ({"layers": 3}, r"layers=3 is not allowed .* a list of layer indices"),
        ({"layers": [-1]}, r"layers=\[-1\] is not allowed"),
        ({"global_every": 0}, r"give an integer of at least 1, or None"),
        ({"positions": "cached"}, r"positions='cached' is not allowed .* one of 'original', 'cache'"),
        ({"layers": [0], "global_every": 2}, r"give one of them"),
    ],
    ids=str,
)
def test_options_that_do_not_exist_or_are_not_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        resolve("sliding_window", options)


@pytest.mark.parametrize("name", ["dynamic", "static", "paged", "offloaded", None, 3])
def test_names_of_transformers_are_not_ours(name):
    assert not registry.is_ours(name)


def test_the_given_options_are_not_changed():
    options = {"block_size": 3}
    resolve("blocks", options).options["block_size"] = 9
    assert options == {"block_size": 3}


def test_the_catalogue_lists_the_twelve_families_and_every_technique():
    assert [family.number for family in CATALOG] == list(range(1, 13))
    listed = {name: family.number for family in CATALOG for name in family.names}
    assert listed == {name: technique.number for name, technique in TECHNIQUES.items()}
    assert all(family.paper.startswith("https://arxiv.org/abs/") for family in CATALOG)


def test_the_one_name_that_transformers_also_knows():
    """Its "sliding_window" is a deprecated alias of "static" there; while ours are enabled it means ours."""
    from transformers.generation import configuration_utils

    assert set(TECHNIQUES) & set(configuration_utils.ALL_CACHE_IMPLEMENTATIONS) == {"sliding_window"}
    assert "sliding_window" in configuration_utils.DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("adakv", {"scorer": "keydiff", "epsilon": 0.1}, "epsilon would do nothing: .* 'expected_attention'"),
        ("pyramidkv", {"weights": [1, 1, 1]}, "weights would do nothing: it is an option of 'blend'"),
        ("blend", {"lag_length": 64}, "lag_length would do nothing: .* score by 'lagkv'"),
        ("compressed", {"fit": "none"}, "fit would do nothing: keep='all' lets nothing go"),
        ("compressed", {"keep": "selected", "keep_ratio": 0.2, "cluster_size": 4}, "cluster_size would do nothing"),
        ("compressed", {"keep": "selected", "keep_ratio": 0.2, "fit": "none", "spread": 0.1}, "spread would"),
    ],
)
def test_options_that_would_do_nothing_are_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        resolve(name, options)
    options = dict(options)
    options.popitem()
    resolve(name, options)
