"""The one place that changes transformers, and the one place that knows its versions.

`enable()` makes our names valid in `generate(cache_implementation=...)`, builds the cache there, checks a cache that is
used again, and lets a layer take over the attention call that follows its `update`. `disable()` puts every attribute
back as it was. Nothing here runs at import.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import cache_utils
from transformers.generation import configuration_utils
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaForCausalLM

# transformers 5.24 renamed the argument, and began to pass the attention's own kwargs to `update`.
CACHE_ARG = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

# Layers without a cache of their own; before 5.23 transformers leaves them out of the layer types.
DummyLayer = getattr(cache_utils, "DummyLayer", None)

_HANDLE = "kv_handle"
_pending: contextvars.ContextVar = contextvars.ContextVar("hf_kvcache_pending", default=None)
_originals: list[tuple[Any, str, Any]] = []


def layer_types_and_kwargs(config: Any) -> tuple[list[str], list[dict]]:
    """Type and constructor arguments of each cache layer of a decoder config (5.18 shares one dict over all layers)."""
    layer_types, kwargs = cache_utils.get_layer_types_and_kwargs(config)
    return layer_types, kwargs if isinstance(kwargs, list) else [dict(kwargs) for _ in layer_types]


@functools.cache
def cache_argument(model_class: type) -> str:
    """The name under which the forward of a model takes its cache: before 5.24 pure Mamba models have another one."""
    parameters = inspect.signature(model_class.forward).parameters
    return "cache_params" if "cache_params" in parameters and CACHE_ARG not in parameters else CACHE_ARG


def enable() -> contextlib.AbstractContextManager:
    """Make our cache names and cache objects work in `generate()`. Idempotent.

    Returns:
        A context manager; leaving it restores the state before this call. Ignore it to stay enabled.
    """
    was_enabled = is_enabled()
    if not was_enabled:
        # The patches use the caches, which themselves call `enable`.
        from . import generation

        _replace(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", generation.CacheNames)
        _replace(GenerationMixin, "_prepare_cache_for_generation", generation.prepare_cache)
        _replace(GenerationMixin, "_prefill", generation.prefill)
        _replace(GenerationMixin, "_assisted_decoding", generation.assisted_decoding)
        _replace(GenerationConfig, "save_pretrained", generation.save_generation_config)
        _replace(AttentionInterface, "get_interface", _wrap_get_interface)
    return _restore(was_enabled)


@contextlib.contextmanager
def _restore(was_enabled: bool) -> Iterator[None]:
    try:
        yield
    finally:
        if not was_enabled:
            disable()


def disable() -> None:
    """Restore every attribute of transformers that `enable` replaced."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


def is_enabled() -> bool:
    """Whether our names and hooks are in force."""
    return bool(_originals)


def _replace(owner: Any, name: str, wrap: Callable) -> None:
    original = vars(owner)[name]
    _originals.append((owner, name, original))
    setattr(owner, name, wrap(original))


class _HandOver:
    """A layer that wants the attention call over the keys it has just returned."""

    def __init__(self, layer: Any, key: torch.Tensor):
        self.layer = layer
        self.key = key


def hand_over(layer: Any, update_kwargs: dict, key: torch.Tensor) -> bool:
    """Let `layer.attend` run the attention that follows this `update`, which must return `key` as its keys.

    Returns:
        False if no attention call of ours will follow; then the layer must return all keys and values.
    """
    if not is_enabled():
        return False
    attention_kwargs = update_kwargs.get("kwargs")
    if isinstance(attention_kwargs, dict):
        attention_kwargs[_HANDLE] = _HandOver(layer, key)
    elif CACHE_ARG == "cache":
        return False  # not called by an attention module
    else:
        _pending.set(_HandOver(layer, key))
    return True


def _wrap_get_interface(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_interface(self, *args, **kwargs):
        return functools.partial(_dispatch, original(self, *args, **kwargs))

    return get_interface


def _dispatch(base: Callable, module, query, key, value, attention_mask, *args, **kwargs):
    handed = kwargs.pop(_HANDLE, None)
    if handed is None and (handed := _pending.get()) is not None:
        _pending.set(None)
    if handed is None or handed.key is not key:
        return base(module, query, key, value, attention_mask, *args, **kwargs)
    return handed.layer.attend(base, module, query, key, value, attention_mask, *args, **kwargs)
