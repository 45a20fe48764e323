"""From a model and a technique's name to a cache: which layer class each layer of the model gets."""

import functools
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from . import compat
from .cache import KVCache
from .compressed.compressed_layer import CompressedLayer
from .compressed.fitted_layer import FittedLayer
from .compressed.summary_layer import SummaryLayer
from .eviction.compression import retrieval_scores
from .eviction.evicting_layer import EvictingLayer
from .eviction.eviction_plan import EvictionPlan
from .layers.attending_layer import check_takes_over
from .layers.block_layer import BlockLayer
from .layers.layer import LayerContext
from .layers.sliding_layer import SlidingBlockLayer
from .layers.sliding_window import SinkWindowLayer
from .layers.states import HybridLayer, StateLayer
from .model_layers import attention_modules, passes_straight_through, reshapes_keys
from .native.native_layers import ENCODABLE, NATIVE, build_native, check_native_allows
from .policies import build_policy
from .policies.attention_matching import AttentionMatching
from .quantization.encoding import Encoding
from .readers import ReadBudget, build_reader, build_reader_of_encoded
from .registry import Recipe, resolve
from .rotary import Rotary, find_rotary
from .sparse.reading_layer import ReadingLayer
from .sparse.sparse_coded_layer import SparseCodedLayer
from .sparse.sparse_layer import SparseReadLayer

_FULL = ("full_attention", "hybrid")
_SLIDING = ("sliding_attention", "chunked_attention", "hybrid_sliding")
# Before 5.23 transformers gives layers without attention a state that stays empty.
_STATES = ("linear_attention", "conv", "moe", "mlp")
_CANNOT_MOVE = "{name} with positions='cache' cannot turn this model's keys: {{reason}}. Use positions='original'."
_CANNOT_FIT = "compressed with keep='selected' cannot turn this model's queries: {reason}. Give fit='none'."
_CANNOT_EXPECT = "{name} cannot turn this model's keys: {{reason}}. Use another policy, for example 'keydiff'."


def make_cache(model: PreTrainedModel, name: str = "blocks", **options: Any) -> KVCache:
    """Build the cache that `generate(cache_implementation=name, cache_config=options)` would build.

    Pass it to `generate(cache=...)` (`past_key_values=` before transformers 5.24) or to plain `model(...)` calls.

    Args:
        model: a decoder-only transformers model; its layer types decide which layer gets which storage.
        name: a technique or a composition `"a+b"`, see `hf-kvcache techniques`.
        options: the techniques' options.

    Raises:
        ValueError: for an unknown technique or option, or a value that is not allowed.
        NotImplementedError: if the model has a layer type or an attention that the technique cannot serve.
    """
    recipe = resolve(name, options)
    if model.config.is_encoder_decoder:
        raise NotImplementedError(
            f"{type(model).__name__} is an encoder-decoder: hf_kvcache serves decoder-only models."
        )
    builder = _Builder(model, recipe)
    layers = builder.build_all()
    # What was found out for this model (a calibration, bits) is what a saved cache must be read with.
    return KVCache(layers, replace(recipe, options=recipe.options | builder.found), model)


class _Builder:
    """Chooses and builds the layers of one cache.

    Args:
        model: the model it is for.
        recipe: the checked techniques and options.
    """

    def __init__(self, model: PreTrainedModel, recipe: Recipe):
        self.model = model
        self.recipe = recipe
        self.options = recipe.options
        self.retention = recipe.fills("retention")
        self.config = model.config.get_text_config(decoder=True)
        self.layer_types, self.layer_kwargs = compat.layer_types_and_kwargs(self.config)
        self.full = [i for i, layer_type in enumerate(self.layer_types) if layer_type in _FULL]
        self._check_changes_something()
        self.windowed = self._windowed_layers()
        encoded = [i for i, layer_type in enumerate(self.layer_types) if layer_type in _FULL or layer_type in ENCODABLE]
        self.encoding = Encoding(model, recipe, encoded) if recipe.fills("encoding") else None

    def _check_changes_something(self) -> None:
        check_native_allows(self.recipe, self.layer_types)
        names = [t.name for t in self.recipe.techniques if t.role != "storage"]
        if names and not self.full and not ENCODABLE.intersection(self.layer_types):
            raise NotImplementedError(
                f"{names[0]} works on full-attention layers, and {type(self.model).__name__} has none here (its layers "
                f"are of type {', '.join(sorted(set(self.layer_types)))}): use cache 'blocks'."
            )

    @property
    def found(self) -> dict[str, Any]:
        """Options that were left to be found out for the model, as they were found."""
        return {} if self.encoding is None else self.encoding.found

    def build_all(self) -> list:
        """A layer for each layer of the model."""
        modules, pools, layers = attention_modules(self.model), {}, []
        for index, (layer_type, kwargs) in enumerate(zip(self.layer_types, self.layer_kwargs, strict=True)):
            attention = modules.get(index)
            context = LayerContext(
                layer_idx=index,
                layer_type=layer_type,
                block_size=self.options["block_size"],
                max_bytes=self.options["max_bytes"],
                pools=pools,
                takes_over=attention is not None and passes_straight_through(type(attention)),
                needs_packed=attention is not None and reshapes_keys(type(attention)),
            )
            layers.append(self._build(attention, context, kwargs))
        return layers

    def _build(self, attention: Any, context: LayerContext, kwargs: dict) -> Any:
        layer_type = context.layer_type
        if layer_type == "dummy":
            return compat.DummyLayer()
        states = {"number_of_states": kwargs.get("number_of_states", 1)}
        if layer_type in _STATES:
            return StateLayer(**states)
        if layer_type in _SLIDING:
            layer = SlidingBlockLayer(context, sliding_window=kwargs["sliding_window"])
        elif layer_type in _FULL:
            layer = self._build_full(attention, context)
        elif layer_type in NATIVE:
            layer = build_native(context, kwargs, self.config, self.encoding)
        else:
            raise NotImplementedError(
                f"layer {context.layer_idx} is of type {layer_type!r}, which hf_kvcache does not understand: use "
                "transformers' own cache for this model (leave cache_implementation out)."
            )
        return HybridLayer(layer, **states) if layer_type.startswith("hybrid") else layer

    def _build_full(self, attention: nn.Module, context: LayerContext) -> Any:
        """The layer of full attention that the techniques stand for."""
        if self.retention is not None and self.retention.number == 9:
            return self._build_evicting(attention, context)
        if self.recipe.fills("reading") and self.full.index(context.layer_idx) >= self.options["dense_layers"]:
            return self._build_reading(attention, context)
        is_windowed = context.layer_idx in self.windowed
        if self.encoding is not None:
            return self.encoding.build(attention, context, is_windowed=is_windowed)
        return self._build_window(attention, context) if is_windowed else BlockLayer(context)

    def _windowed_layers(self) -> set[int]:
        """Indices of the layers that get sinks and a window: full-attention ones, all or as the options choose."""
        if self.retention is None or self.retention.name != "sliding_window":
            return set()
        chosen, every = self.options["layers"], self.options["global_every"]
        if chosen is None:
            return {i for i in self.full if every is None or (i + 1) % every}
        if wrong := sorted(set(chosen) - set(self.full)):
            raise ValueError(f"layers={wrong} cannot get a window: this model's full-attention layers are {self.full}.")
        return set(chosen)

    def _build_window(self, attention: nn.Module, context: LayerContext) -> SinkWindowLayer:
        check_takes_over("sliding_window", attention, context)
        return SinkWindowLayer(
            context,
            sliding_window=self.options["sliding_window"],
            num_sink_tokens=self.options["num_sink_tokens"],
            rotary=self._rotary_to_move(attention, context),
        )

    def _build_evicting(self, attention: nn.Module, context: LayerContext) -> EvictingLayer:
        name = self.retention.name
        check_takes_over(name, attention, context)
        refusal = _CANNOT_EXPECT.format(name=name)
        policy = build_policy(
            name,
            self.options,
            find_rotary=functools.partial(find_rotary, self.model, attention, context.layer_type, refusal=refusal),
            head_scores=lambda: retrieval_scores(self.model, lambda: make_cache(self.model, "streaming_llm")),
            layer_idx=context.layer_idx,
            layer=self.full.index(context.layer_idx),
            num_layers=len(self.full),
        )
        rotary = self._rotary_to_move(attention, context)
        codecs = None
        if self.encoding is not None:
            codecs = self.encoding.codecs_of_heads(attention, context, is_packed=rotary is not None)
        return EvictingLayer(
            context,
            name=name,
            policy=policy,
            plan=EvictionPlan.of(self.options, len(self.full)),
            rotary=rotary,
            codecs=codecs,
            residual_length=self.options.get("residual_length", 0),
        )

    def _build_reading(self, attention: nn.Module, context: LayerContext) -> ReadingLayer | FittedLayer:
        name, options = self.recipe.fills("reading").name, self.options
        check_takes_over(name, attention, context)
        budget = ReadBudget.of(options)
        if name == "compressed":
            if options["keep"] == "selected" and options["fit"] != "none":
                return self._build_fitted(attention, context, budget)
            sizes = {key: options[key] for key in ("cluster_size", "segment_length")}
            if options["keep"] == "selected":
                return SummaryLayer(context, budget=budget, **sizes)
            more = {"spread": options["spread"], "is_rounded": options["summaries"] == "int8"}
            return CompressedLayer(context, budget=budget, **sizes, **more)
        if self.encoding is None:
            return SparseReadLayer(context, name=name, reader=build_reader(name, options), budget=budget)
        codecs = self.encoding.codecs(attention, context)
        return SparseCodedLayer(
            context,
            name=name,
            reader=build_reader_of_encoded(name, options, codecs["key_codec"], attention.head_dim),
            budget=budget,
            **codecs,
            residual_length=options["residual_length"],
            num_sink_tokens=options["num_sink_tokens"],
        )

    def _build_fitted(self, attention: nn.Module, context: LayerContext, budget: ReadBudget) -> FittedLayer:
        policy = AttentionMatching(
            rotary=find_rotary(self.model, attention, context.layer_type, refusal=_CANNOT_FIT),
            num_sink_tokens=budget.num_sink_tokens,
            needs_reconstruction=self.options["fit"] == "reading",
        )
        return FittedLayer(context, policy=policy, budget=budget)

    def _rotary_to_move(self, attention: nn.Module, context: LayerContext) -> Rotary | None:
        """What turns keys to other positions, if the options ask for it."""
        if self.options["positions"] != "cache":
            return None
        refusal = _CANNOT_MOVE.format(name=self.retention.name)
        return find_rotary(self.model, attention, context.layer_type, refusal=refusal)
