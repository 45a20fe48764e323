"""What users import: `__all__` and nothing else, under names that transformers does not have."""

from types import ModuleType

import transformers

import hf_kvcache
from hf_kvcache.layers import block_layer, sliding_layer, sliding_window, states


def test_all_is_the_surface():
    assert hf_kvcache.__all__ == sorted(name for names in hf_kvcache._HOMES.values() for name in names)
    assert all(getattr(hf_kvcache, name) is not None for name in hf_kvcache.__all__)
    assert set(hf_kvcache.__all__) <= set(dir(hf_kvcache))
    # Submodules appear once they are imported; anything else public is listed.
    public = {name for name, value in vars(hf_kvcache).items() if not isinstance(value, ModuleType)}
    assert {name for name in public if not name.startswith("_")} <= {*hf_kvcache.__all__, "Any", "TYPE_CHECKING"}


def test_public_names_say_where_they_live():
    for name in set(hf_kvcache.__all__) - {"CACHE_ARG"}:
        assert getattr(hf_kvcache, name).__module__.startswith("hf_kvcache.")
        assert getattr(hf_kvcache, name).__doc__, f"{name} has no docstring"


def test_no_name_shadows_transformers():
    ours = set(hf_kvcache.__all__)
    for module in (block_layer, sliding_layer, sliding_window, states):
        ours |= {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    theirs = set(dir(transformers)) | set(dir(transformers.cache_utils))
    assert not ours & theirs


def test_unknown_names_raise_attribute_error():
    assert not hasattr(hf_kvcache, "make_cahce")
