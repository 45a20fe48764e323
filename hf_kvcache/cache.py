"""The cache of a whole model: built from its config, used by `generate()` and plain forward calls alike."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from . import compat
from .block_layer import BlockLayer
from .codecs import build_codecs
from .coded_layer import CodedLayer
from .compressed_layer import CompressedLayer
from .compression import evicting_layers, reconstruct_and_evict, retrieval_scores
from .evicting_layer import EvictingLayer
from .eviction_plan import EvictionPlan
from .layer import KVLayer, LayerContext
from .model_layers import attention_modules, passes_straight_through
from .policies import build_policy
from .readers import ReadBudget, build_reader
from .reading_layer import ReadingLayer
from .registry import Recipe, resolve
from .report import MemoryReport, build_report
from .rotary import Rotary, find_rotary
from .sliding_layer import SlidingBlockLayer
from .sliding_window import SinkWindowLayer
from .sparse_layer import SparseReadLayer
from .states import HybridLayer, StateLayer


class KVCache(Cache):
    """A transformers `Cache` whose layers are ours. Build one with `make_cache`.

    Everything that changes all layers is checked on all of them first, so that a refusal leaves the cache as it was.

    Args:
        layers: one layer for each layer of the model.
        recipe: the techniques and options the layers were built from.
        model: what the layers were built for; not kept alive.
    """

    def __init__(self, layers: list, recipe: Recipe, model: weakref.ref):
        compat.enable()
        super().__init__(layers=layers)
        self.recipe = recipe
        self.model = model

    def __repr__(self) -> str:
        return f"KVCache({self.recipe.name!r}, {len(self.layers)} layers, {self.num_tokens_seen} tokens seen)"

    @property
    def num_tokens_seen(self) -> int:
        """Tokens a sequence that went in, those no longer stored included."""
        return max((layer.get_seq_length() for layer in self.layers if hasattr(layer, "seen")), default=0)

    def report(self) -> MemoryReport:
        """What this cache holds now, measured from its live tensors."""
        return build_report(self)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        # Block tables live on the host: one sync a step for all layers.
        self._select_rows(beam_idx.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times; the copies share their blocks until they differ."""
        if (rows := self.batch_size) > 0:
            self._select_rows(np.repeat(np.arange(rows), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if (rows := self.batch_size) > 0:
            self._select_rows(np.arange(rows)[indices.cpu().numpy()])

    def _select_rows(self, rows: np.ndarray) -> None:
        for layer in self._storing_layers:
            layer.select_rows(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens; `crop(0)` commits what was recorded for a rollback."""
        layers = self._storing_layers
        refusing = [layer for layer in layers if tokens_to_remove > 0 or not layer.can_crop(-tokens_to_remove)]
        for layer in refusing[:1] or layers:
            layer.crop(tokens_to_remove)

    @property
    def is_croppable(self) -> bool:
        return all(layer.can_crop(0) for layer in self._storing_layers)

    @property
    def _storing_layers(self) -> list[KVLayer | StateLayer]:
        """All layers but those that share another layer's keys and values."""
        return [layer for layer in self.layers if isinstance(layer, (KVLayer, StateLayer))]

    def compress(self, input_ids: torch.Tensor | None = None) -> None:
        """Evict tokens now, as the technique's options say; `generate()` does it by itself when a prompt is in.

        Args:
            input_ids: `[B, T]`, the tokens in the cache, padding included, or the newest of them. Needed by policies
                that read them a second time (`kvzip`).

        Raises:
            ValueError: if nothing of this cache evicts, or the ids are needed and missing or do not fit.
        """
        layers = evicting_layers(self.layers)
        if not layers:
            raise ValueError(f"cache {self.recipe.name!r} evicts nothing: build one with an eviction technique.")
        if not self.num_tokens_seen:
            return
        if not layers[0].policy.needs_reconstruction:
            for layer in layers:
                layer.evict()
            return
        if input_ids is None:
            raise ValueError(f"{self.recipe.name!r} reads the prompt a second time: call compress(input_ids).")
        reconstruct_and_evict(self.model(), self, input_ids)

    @contextlib.contextmanager
    def prompt(self, input_ids: torch.Tensor, end: int) -> Iterator[None]:
        """The tokens up to slot `end` that run in this context are a prompt; evict when they are in."""
        layers = evicting_layers(self.layers)
        for layer in layers:
            layer.begin_prompt(end)
        try:
            yield
            if layers and layers[0].policy.needs_reconstruction:
                self.compress(input_ids)
        finally:
            for layer in layers:
                layer.end_prompt()

    def check_recordable(self) -> None:
        """Refuse assisted decoding early where a rollback is impossible.

        Raises:
            NotImplementedError: if the model has recurrent states, or tokens are evicted while others are drafted.
        """
        for layer in evicting_layers(self.layers)[:1]:
            if layer.plan.interval is not None or (layer.policy.needs_reconstruction and not self.num_tokens_seen):
                raise NotImplementedError(_CANNOT_DRAFT.format(name=self.recipe.name))
        if any(isinstance(layer, StateLayer) for layer in self.layers):
            raise NotImplementedError(
                "assisted decoding must take back rejected tokens, which recurrent (Mamba) states cannot: generate "
                "without assistant_model and prompt_lookup_num_tokens."
            )

    def stop_past_recording(self) -> None:
        """Undo `activate_past_recording`: windows forget again without waiting for a `crop`."""
        for layer in self._storing_layers:
            layer.stop_past_recording()

    def fork(self) -> "KVCache":
        """A second cache over the same tokens: blocks are shared until one of the two writes them."""
        layers = [layer.fork() if layer in self._storing_layers else layer for layer in self.layers]
        return KVCache(layers, self.recipe, self.model)

    def to(self, device: torch.device | str) -> "KVCache":
        """Move every stored tensor to `device`, in place; returns the cache."""
        pools: dict = {}
        for layer in self._storing_layers:
            layer.to(torch.device(device), pools)
        return self


_CANNOT_DRAFT = (
    "assisted decoding with {name!r} would draft tokens while others are evicted: use when='prefill'; with 'kvzip', "
    "run the prompt and call cache.compress(input_ids) first, then generate(cache=cache)."
)


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
    config = model.config.get_text_config(decoder=True)
    layer_types, layer_kwargs = compat.layer_types_and_kwargs(config)
    modules = attention_modules(model)
    windowed = _windowed_layers(recipe, layer_types)
    full = [i for i, layer_type in enumerate(layer_types) if layer_type in _FULL]
    pools: dict = {}
    layers = []
    for index, (layer_type, kwargs) in enumerate(zip(layer_types, layer_kwargs, strict=True)):
        attention = modules.get(index)
        context = LayerContext(
            layer_idx=index,
            layer_type=layer_type,
            block_size=recipe.options["block_size"],
            max_bytes=recipe.options["max_bytes"],
            pools=pools,
            takes_over=attention is not None and passes_straight_through(type(attention)),
        )
        layers.append(_build_layer(model, attention, context, kwargs, recipe, windowed=windowed, full=full))
    return KVCache(layers, recipe, weakref.ref(model))


_FULL = ("full_attention", "hybrid")
_SLIDING = ("sliding_attention", "chunked_attention", "hybrid_sliding")
_STATES = ("linear_attention", "conv")


def _windowed_layers(recipe: Recipe, layer_types: list[str]) -> set[int]:
    """Indices of the layers that get sinks and a window: full-attention ones, all or as the options choose."""
    if (retention := recipe.fills("retention")) is None or retention.name != "sliding_window":
        return set()
    full = [i for i, layer_type in enumerate(layer_types) if layer_type in _FULL]
    chosen, every = recipe.options["layers"], recipe.options["global_every"]
    if chosen is not None:
        if wrong := sorted(set(chosen) - set(full)):
            raise ValueError(f"layers={wrong} cannot get a window: this model's full-attention layers are {full}.")
        return set(chosen)
    return {i for i in full if every is None or (i + 1) % every}


def _build_layer(
    model: nn.Module,
    attention: Any,
    context: LayerContext,
    kwargs: dict,
    recipe: Recipe,
    *,
    windowed: set[int],
    full: list[int],
) -> Any:
    layer_type = context.layer_type
    if layer_type == "dummy":
        return compat.DummyLayer()
    states = {"number_of_states": kwargs.get("number_of_states", 1)}
    if layer_type in _STATES:
        return StateLayer(**states)
    if layer_type in _SLIDING:
        layer = SlidingBlockLayer(context, sliding_window=kwargs["sliding_window"])
    elif layer_type not in _FULL:
        raise NotImplementedError(
            f"layer {context.layer_idx} is of type {layer_type!r}, which hf_kvcache does not understand: use "
            "transformers' own cache for this model (leave cache_implementation out)."
        )
    elif context.layer_idx in windowed:
        layer = _build_window(model, attention, context, recipe.options)
    elif (retention := recipe.fills("retention")) is not None and retention.number == 9:
        layer = _build_evicting(model, attention, context, recipe, full)
    elif recipe.fills("encoding"):
        layer = _build_coded(attention, context, recipe)
    elif recipe.fills("reading") and full.index(context.layer_idx) >= recipe.options["dense_layers"]:
        layer = _build_reading(attention, context, recipe)
    else:
        layer = BlockLayer(context)
    return HybridLayer(layer, **states) if layer_type.startswith("hybrid") else layer


def _build_window(model: nn.Module, attention: Any, context: LayerContext, options: dict[str, Any]) -> SinkWindowLayer:
    _check_takes_over("sliding_window", attention, context)
    rotary = _rotary_to_turn(model, attention, context, "sliding_window") if options["positions"] == "cache" else None
    return SinkWindowLayer(
        context,
        sliding_window=options["sliding_window"],
        num_sink_tokens=options["num_sink_tokens"],
        rotary=rotary,
    )


def _rotary_to_turn(model: nn.Module, attention: Any, context: LayerContext, name: str) -> Rotary:
    names = {"user": f"{name} with positions='cache'", "remedy": "Use positions='original'"}
    return find_rotary(model, attention, context.layer_type, **names)


def _build_evicting(
    model: nn.Module, attention: Any, context: LayerContext, recipe: Recipe, full: list[int]
) -> EvictingLayer:
    options, name = recipe.options, recipe.fills("retention").name
    _check_takes_over(name, attention, context)
    policy = build_policy(
        name,
        options,
        find_rotary=lambda: find_rotary(
            model, attention, context.layer_type, user=name, remedy="Use another policy, for example 'keydiff'"
        ),
        head_scores=lambda: retrieval_scores(model, lambda: make_cache(model, "streaming_llm")),
        layer_idx=context.layer_idx,
        layer=full.index(context.layer_idx),
        num_layers=len(full),
    )
    rotary = _rotary_to_turn(model, attention, context, name) if options["positions"] == "cache" else None
    encoding = recipe.fills("encoding")
    return EvictingLayer(
        context,
        name=name,
        policy=policy,
        plan=EvictionPlan.of(options, len(full)),
        rotary=rotary,
        codecs=None if encoding is None else build_codecs(encoding.name, options, attention.head_dim),
        residual_length=options.get("residual_length", 0),
    )


def _build_coded(attention: Any, context: LayerContext, recipe: Recipe) -> CodedLayer:
    name = recipe.fills("encoding").name
    _check_takes_over(name, attention, context)
    key_codec, value_codec = build_codecs(name, recipe.options, attention.head_dim)
    return CodedLayer(
        context,
        key_codec=key_codec,
        value_codec=value_codec,
        residual_length=recipe.options["residual_length"],
        num_sink_tokens=recipe.options["num_sink_tokens"],
    )


def _build_reading(attention: Any, context: LayerContext, recipe: Recipe) -> ReadingLayer:
    name, options = recipe.fills("reading").name, recipe.options
    _check_takes_over(name, attention, context)
    budget = ReadBudget.of(options)
    if name == "compressed":
        sizes = {key: options[key] for key in ("cluster_size", "segment_length")}
        return CompressedLayer(context, budget=budget, **sizes)
    return SparseReadLayer(context, name=name, reader=build_reader(name, options), budget=budget)


def _check_takes_over(name: str, attention: Any, context: LayerContext) -> None:
    if not context.takes_over:
        raise NotImplementedError(
            f"{name} cannot serve layer {context.layer_idx}: {type(attention).__name__} changes the keys and values "
            "that its cache returns. Use cache 'blocks', or choose other layers."
        )
