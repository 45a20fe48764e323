"""The one place that changes transformers: nothing at import, everything back on `disable()`."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAttention

import hf_kvcache
from hf_kvcache import CACHE_ARG, KVCache, make_cache
from hf_kvcache.model_layers import attention_modules, passes_straight_through

pytestmark = pytest.mark.core

PATCHED = (
    (configuration_utils, "ALL_CACHE_IMPLEMENTATIONS"),
    (GenerationMixin, "_prepare_cache_for_generation"),
    (GenerationMixin, "_prefill"),
    (GenerationMixin, "_assisted_decoding"),
    (GenerationConfig, "save_pretrained"),
    (AttentionInterface, "get_interface"),
)


def attributes() -> list:
    return [vars(owner)[name] for owner, name in PATCHED]


def all_attributes() -> dict:
    """Everything that could be replaced in the modules and classes that the hooks live in."""
    owners = (configuration_utils, GenerationMixin, GenerationConfig, AttentionInterface, torch.nn.Module, DynamicCache)
    return {(owner.__name__, name): id(value) for owner in owners for name, value in list(vars(owner).items())}


def in_new_process(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_changes_nothing():
    output = in_new_process("""
        import sys, torch, transformers
        from transformers import AttentionInterface, GenerationConfig, cache_utils, masking_utils, modeling_utils
        from transformers.generation import configuration_utils, utils
        owners = [configuration_utils, utils, utils.GenerationMixin, GenerationConfig, AttentionInterface, cache_utils]
        owners += [cache_utils.Cache, masking_utils, modeling_utils, torch.nn.Module, torch.Tensor]
        def snapshot():
            return {(i, name): id(value) for i, owner in enumerate(owners) for name, value in vars(owner).items()}
        before = snapshot()
        import hf_kvcache
        from hf_kvcache import KVCache, disable, enable, is_enabled, make_cache
        import hf_kvcache.generation
        assert not is_enabled()
        after = snapshot()
        names = {name for (i, name) in before.items() ^ after.items() for i, name in [i]}
        print(sorted(names - {"__warningregistry__", "__annotations__", "__abstractmethods__"}))
    """)
    assert output == "[]"


def test_disable_restores_the_very_same_objects():
    before, everything = attributes(), all_attributes()
    hf_kvcache.enable()
    assert all(now is not then for now, then in zip(attributes(), before, strict=True))
    changed = {name for (_, name) in (k for k, v in all_attributes().items() if everything.get(k) != v)}
    assert changed == {name for _, name in PATCHED}
    hf_kvcache.disable()
    assert all(now is then for now, then in zip(attributes(), before, strict=True))
    assert all_attributes() == everything
    hf_kvcache.disable()
    assert all_attributes() == everything


def test_enable_is_idempotent_and_nests():
    hf_kvcache.enable()
    enabled = attributes()
    with hf_kvcache.enable():
        assert attributes() == enabled
    assert hf_kvcache.is_enabled(), "leaving an inner block disabled what an outer call enabled"
    hf_kvcache.disable()

    def fail() -> None:
        with hf_kvcache.enable():
            assert hf_kvcache.is_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not hf_kvcache.is_enabled()


def test_building_a_cache_enables(tiny_model):
    make_cache(tiny_model("llama"))
    assert hf_kvcache.is_enabled()


@pytest.mark.parametrize("name", ["dynamic", "static", None])
def test_names_of_transformers_keep_working(name, tiny_model, make_ids):
    model, ids = tiny_model("llama"), make_ids(2, 17)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": name}
    expected = model.generate(ids, **options)
    with hf_kvcache.enable():
        output = model.generate(ids, **options, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert not isinstance(getattr(output, CACHE_ARG, None) or output.past_key_values, KVCache)


def test_unknown_names_say_what_exists(tiny_model, make_ids):
    hf_kvcache.enable()
    for name, message in (
        ("blcks", r"did you mean 'blocks'.* transformers' own names: 'static', .*'dynamic'"),
        ("blocks+nothing", r"unknown cache technique 'nothing'"),
        ("blocks+dynamic", r"does not compose"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_model("llama").generate(make_ids(1, 5), max_new_tokens=1, cache_implementation=name)
    with pytest.raises(ValueError, match=r"did you mean 'block_size'"):
        tiny_model("llama").generate(
            make_ids(1, 5), max_new_tokens=1, cache_implementation="blocks", cache_config={"blocksize": 3}
        )


def test_our_name_is_unknown_without_us():
    with pytest.raises(ValueError, match="blocks"):
        GenerationConfig(cache_implementation="blocks").validate()
    hf_kvcache.enable()
    GenerationConfig(cache_implementation="blocks+sliding_window").validate()


def test_a_name_and_a_cache_object_are_refused(tiny_model, make_ids):
    model = tiny_model("llama")
    for cache in (make_cache(model), DynamicCache()):
        with pytest.raises(ValueError, match="both cache_implementation='blocks' and a cache object"):
            model.generate(make_ids(1, 5), max_new_tokens=1, cache_implementation="blocks", **{CACHE_ARG: cache})


def test_the_config_and_options_of_the_caller_are_left_alone(tiny_model, make_ids):
    model, options = tiny_model("llama"), {"block_size": 3}
    hf_kvcache.enable()
    config = GenerationConfig(max_new_tokens=2, cache_implementation="blocks", cache_config=options, pad_token_id=0)
    output = model.generate(make_ids(1, 5), generation_config=config, return_dict_in_generate=True)
    cache = getattr(output, CACHE_ARG, None) or output.past_key_values
    assert isinstance(cache, KVCache)
    assert cache.recipe.options["block_size"] == 3
    assert (config.cache_implementation, config.cache_config, options) == ("blocks", options, {"block_size": 3})
    output = model.generate(make_ids(1, 5), generation_config=config, use_cache=False)
    assert output.shape == (1, 7)


def test_our_name_is_never_saved(tiny_model, make_ids, tmp_path):
    model = tiny_model("llama")
    hf_kvcache.enable()
    model.generation_config.cache_implementation = "blocks"
    model.generation_config.cache_config = {"block_size": 3}
    with pytest.warns(UserWarning, match="cache_implementation='blocks' belongs to hf_kvcache and is not saved"):
        model.save_pretrained(tmp_path)
    assert model.generation_config.cache_implementation == "blocks"
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert not saved.get("cache_implementation")
    assert not saved.get("cache_config")
    output = in_new_process(f"""
        import sys, torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
        assert not [name for name in sys.modules if name.startswith("hf_kvcache")]
        print(model.generate(torch.arange(5, 10)[None], max_new_tokens=4, do_sample=False)[0].tolist())
    """)
    expected = model.generate(torch.arange(5, 10)[None], max_new_tokens=4, do_sample=False)
    assert json.loads(output) == expected[0].tolist()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.cache_implementation is None


def test_generation_configs_with_other_names_are_saved_as_they_are(tmp_path):
    hf_kvcache.enable()
    GenerationConfig(cache_implementation="static").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["cache_implementation"] == "static"


STRAIGHT_THROUGH = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "gpt_oss"]


@pytest.mark.parametrize("name", [*STRAIGHT_THROUGH, "jamba", "bamba", "falcon_h1"])
def test_attention_of_these_models_is_taken_over(name, tiny_model):
    modules = attention_modules(tiny_model(name))
    assert sorted(modules) == ([0, 1] if name in (*STRAIGHT_THROUGH, "falcon_h1") else [1])
    assert all(passes_straight_through(type(module)) for module in modules.values())


@pytest.mark.parametrize("cls", [DeepseekV3Attention, Gemma3nTextAttention], ids=lambda cls: cls.__name__)
def test_attention_that_changes_what_update_returns_is_not(cls):
    assert not passes_straight_through(cls)


def test_attention_whose_source_is_unknown_is_not_taken_over():
    namespace: dict = {}
    exec("class Hidden:\n    def forward(self): pass", namespace)
    assert not passes_straight_through(namespace["Hidden"])


def test_a_used_result_is_not_straight_through():
    class Scaled:
        def forward(self, query, key, value, cache, kwargs):
            attention_interface = None
            key, value = cache.update(key, value, 0)
            key = key * 2
            return attention_interface(self, query, key, value, None)

    class Plain:
        def forward(self, query, key, value, cache, kwargs):
            attention_interface = None
            key, value = cache.update(key, value, 0)
            return attention_interface(self, query, key, value, None)

    class Swapped:
        def forward(self, query, key, value, cache, kwargs):
            attention_interface = None
            key, value = cache.update(key, value, 0)
            return attention_interface(self, query, value, key, None)

    assert passes_straight_through(Plain)
    assert not passes_straight_through(Scaled)
    assert not passes_straight_through(Swapped)
