"""The cache of a whole model: built from its config, used by `generate()` and plain forward calls alike."""

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from . import compat
from .attending_layer import check_takes_over
from .block_layer import BlockLayer
from .encoding import Encoding
from .layer import KVLayer, LayerContext
from .model_layers import attention_modules, passes_straight_through
from .registry import Recipe, resolve
from .report import MemoryReport, build_report
from .rotary import find_rotary
from .sliding_layer import SlidingBlockLayer
from .sliding_window import SinkWindowLayer
from .states import HybridLayer, StateLayer


class KVCache(Cache):
    """A transformers `Cache` whose layers are ours. Build one with `make_cache`.

    Everything that changes all layers is checked on all of them first, so that a refusal leaves the cache as it was.

    Args:
        layers: one layer for each layer of the model.
        recipe: the techniques and options the layers were built from.
    """

    def __init__(self, layers: list, recipe: Recipe):
        compat.enable()
        super().__init__(layers=layers)
        self.recipe = recipe

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

    def check_recordable(self) -> None:
        """Refuse assisted decoding early where a rollback is impossible.

        Raises:
            NotImplementedError: if the model has recurrent states.
        """
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
        return KVCache([layer.fork() if layer in self._storing_layers else layer for layer in self.layers], self.recipe)

    def to(self, device: torch.device | str) -> "KVCache":
        """Move every stored tensor to `device`, in place; returns the cache."""
        pools: dict = {}
        for layer in self._storing_layers:
            layer.to(torch.device(device), pools)
        return self


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
    encoding = Encoding(model, recipe, full) if recipe.fills("encoding") else None
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
        chosen = {"is_windowed": index in windowed, "encoding": encoding}
        layers.append(_build_layer(model, attention, context, kwargs, recipe, **chosen))
    return KVCache(layers, recipe)


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
    is_windowed: bool,
    encoding: Encoding | None,
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
    elif is_windowed:
        layer = _build_window(model, attention, context, recipe.options)
    elif encoding is not None:
        layer = encoding.build(attention, context)
    else:
        layer = BlockLayer(context)
    return HybridLayer(layer, **states) if layer_type.startswith("hybrid") else layer


_CANNOT_TURN = (
    "sliding_window with positions='cache' cannot turn this model's keys: {reason}. Use positions='original'."
)


def _build_window(model: nn.Module, attention: Any, context: LayerContext, options: dict[str, Any]) -> SinkWindowLayer:
    check_takes_over("sliding_window", attention, context)
    rotary = (
        find_rotary(model, attention, context.layer_type, refusal=_CANNOT_TURN)
        if options["positions"] == "cache"
        else None
    )
    return SinkWindowLayer(
        context,
        sliding_window=options["sliding_window"],
        num_sink_tokens=options["num_sink_tokens"],
        rotary=rotary,
    )
