"""What `generate()` does differently with our caches: build them by name, and check one that is used again.

Each function takes transformers' original and returns its replacement; `compat` puts them in place and back.
"""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import compat, registry
from .build import make_cache
from .cache import KVCache
from .reuse import check_same_prompt


class CacheNames(tuple):
    """transformers' tuple of valid `cache_implementation` names, which also knows ours and their compositions."""

    def __contains__(self, name: Any) -> bool:
        if super().__contains__(name):
            return True
        if not isinstance(name, str):
            return False
        # Raises our own error, which lists what exists and the nearest spelling.
        registry.resolve(name, {}) if registry.is_ours(name) else _check_name(name, self)
        return True

    def __add__(self, other: tuple) -> "CacheNames":
        return CacheNames((*self, *other))


def _check_name(name: str, own_names: tuple) -> None:
    try:
        registry.resolve(name)
    except ValueError as error:
        names = ", ".join(map(repr, own_names))
        raise ValueError(f"cache_implementation: {error} transformers' own names: {names}.") from None


def prepare_cache(original: Callable) -> Callable:
    """Build our cache when `cache_implementation` names it."""

    @functools.wraps(original)
    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        argument = compat.cache_argument(type(self))
        cache = model_kwargs.get(argument)
        name = generation_config.cache_implementation
        is_assistant = getattr(generation_config, "is_assistant", False)
        if isinstance(cache, KVCache) and is_assistant:
            return None  # the draft model's own cache, round after round (with the name too, before 5.24)
        if not registry.is_ours(name) or generation_config.use_cache is False:
            if isinstance(cache, KVCache):
                # A past that assisted decoding recorded is only rolled back there.
                cache.stop_past_recording()
            return original(self, generation_config, model_kwargs, *args, **kwargs)
        if cache is not None:
            raise ValueError(
                f"both cache_implementation={name!r} and a cache object were given to generate(): give one of them."
            )
        if not self._supports_default_dynamic_cache():
            raise NotImplementedError(
                f"cache {name!r} cannot be used with {type(self).__name__}: the model manages its own state instead of "
                "a transformers Cache. Leave cache_implementation out."
            )
        cache = model_kwargs[argument] = make_cache(self, name, **dict(generation_config.cache_config or {}))
        if is_assistant:
            cache.activate_past_recording()
        return None

    return _prepare_cache_for_generation


def prefill(original: Callable) -> Callable:
    """Make a filled cache fit the prompt before the prompt is run."""

    @functools.wraps(original)
    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        cache = model_kwargs.get(compat.cache_argument(type(self)))
        if not isinstance(cache, KVCache):
            return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
        if cache.num_tokens_seen:
            fit_filled_cache(self, cache, input_ids, generation_config, model_kwargs)
            if generation_config.prefill_chunk_size is not None and compat.CACHE_ARG != "cache":
                raise NotImplementedError(
                    "prefill_chunk_size with a filled cache runs the whole prompt again on this transformers version: "
                    "upgrade to transformers 5.24, or leave prefill_chunk_size out."
                )
        with cache.prompt(input_ids, _prompt_length(cache, input_ids, generation_config, model_kwargs)):
            outputs = original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
        if not cache.holds_anything:
            raise NotImplementedError(
                f"{type(self).__name__} put nothing into cache {cache.recipe.name!r}: it takes none, and runs the "
                "whole text at every step. Leave cache_implementation out."
            )
        return outputs

    return _prefill


def assisted_decoding(original: Callable) -> Callable:
    """Run only the new tokens in the first round of assisted decoding (transformers runs the whole prompt again)."""

    @functools.wraps(original)
    def _assisted_decoding(self, input_ids, *args, **kwargs):
        cache = kwargs.get(compat.CACHE_ARG)
        if not isinstance(cache, KVCache):
            return original(self, input_ids, *args, **kwargs)
        cache.check_recordable()
        config = kwargs["generation_config"]
        prompt = cache.prompt(input_ids, _prompt_length(cache, input_ids, config, kwargs))
        if not cache.num_tokens_seen:
            with prompt:
                return original(self, input_ids, *args, **kwargs)
        if _mask_length(config, kwargs) != input_ids.shape[1]:
            raise ValueError(
                "assisted decoding with a filled cache needs the whole prompt in input_ids, not only the new tokens."
            )
        fit_filled_cache(self, cache, input_ids, config, kwargs)
        prepare = self.prepare_inputs_for_generation

        def prepare_new_tokens(ids, next_sequence_length=None, **inputs):
            if next_sequence_length is None:
                next_sequence_length = ids.shape[1] - cache.num_tokens_seen
            return prepare(ids, next_sequence_length=next_sequence_length, **inputs)

        self.prepare_inputs_for_generation = prepare_new_tokens
        try:
            with prompt:
                return original(self, input_ids, *args, **kwargs)
        finally:
            del self.prepare_inputs_for_generation

    return _assisted_decoding


def fit_filled_cache(model: Any, cache: KVCache, input_ids: torch.Tensor, config: Any, model_kwargs: dict) -> None:
    """Check that a filled cache belongs to this prompt, and leave at least one token to run.

    Raises:
        ValueError: if the prompt, mask and cache do not fit together.
    """
    past, rows = cache.num_tokens_seen, input_ids.shape[0]
    if rows != cache.batch_size:
        if rows % cache.batch_size:
            raise ValueError(
                f"the cache holds {cache.batch_size} sequences and generate() needs {rows}: give a cache of the same "
                "batch, or of one that num_beams or num_return_sequences multiplies."
            )
        cache.batch_repeat_interleave(rows // cache.batch_size)
    if model_kwargs.get("inputs_embeds") is not None:
        length = model_kwargs["inputs_embeds"].shape[1]
        if length <= past:
            raise ValueError(_NOTHING_NEW.format(length=length, past=past))
        return
    length, mask_length = input_ids.shape[1], _mask_length(config, model_kwargs)
    if mask_length == past + length:
        return  # only the new tokens were given, with the whole mask
    if mask_length != length:
        raise ValueError(
            f"attention_mask covers {mask_length} tokens: expected {length} (the whole prompt is given) or "
            f"{past + length} (only the tokens after the {past} cached ones are given)."
        )
    if length < past:
        raise ValueError(_NOTHING_NEW.format(length=length, past=past))
    check_same_prompt(model, cache, input_ids, model_kwargs)
    if length == past:
        # Nothing would be left to run: run the last token again.
        cache.crop(-1)


_NOTHING_NEW = (
    "the prompt has {length} tokens and the cache already holds {past}: give the whole conversation, longer than what "
    "is cached; or only the new tokens with an attention_mask that covers the cached ones too; or crop the cache first."
)


def _prompt_length(cache: KVCache, input_ids: torch.Tensor, config: Any, model_kwargs: dict) -> int:
    """Tokens a row, cached ones included, once the prompt has run."""
    if (embeds := model_kwargs.get("inputs_embeds")) is not None:
        return embeds.shape[1]
    # Only the new tokens may have been given, with a mask that covers the cached ones too.
    return max(input_ids.shape[1], _mask_length(config, model_kwargs))


def _mask_length(config: Any, model_kwargs: dict) -> int:
    mask = model_kwargs.get("attention_mask")
    return mask.shape[1] if mask is not None else getattr(config, "_mask_length", -1)


def save_generation_config(original: Callable) -> Callable:
    """Leave our names out of saved configs: `from_pretrained` would fail for everyone without this library."""

    @functools.wraps(original)
    def save_pretrained(self, *args, **kwargs):
        if not registry.is_ours(self.cache_implementation):
            return original(self, *args, **kwargs)
        warnings.warn(
            f"cache_implementation={self.cache_implementation!r} belongs to hf_kvcache and is not saved in the "
            "generation config: pass it to generate() instead.",
            stacklevel=2,
        )
        stripped = copy.deepcopy(self)
        stripped.cache_implementation = stripped.cache_config = None
        return original(stripped, *args, **kwargs)

    return save_pretrained
