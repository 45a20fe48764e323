"""Layers whose model compresses its past or chooses what it reads by itself: what builds them, and what they refuse."""

from dataclasses import replace
from typing import Any

from ..layers.layer import KVLayer, LayerContext
from ..quantization.encoding import Encoding
from ..registry import Recipe
from .entries_layer import EntriesLayer
from .indexed_layer import IndexedBlockLayer, IndexedDecodedLayer, IndexedLayer
from .reference_window import ReferenceWindowLayer
from .stream import Stream

_INDEXED = {"indexed_attention", "minimax_m3_sparse"}
_COMPRESSED = {"compressed_sparse_attention", "heavily_compressed_attention"}
_REFERENCE = {"reference_sliding_attention"}
NATIVE = _INDEXED | _COMPRESSED | _REFERENCE
ENCODABLE = _INDEXED | _COMPRESSED

_CHOOSES_ITSELF = (
    "{0} cannot serve layer {1}: it is of type {2!r}, where the model itself decides what it keeps or reads, by keys "
    "of all tokens. Use cache 'blocks', or an encoding such as 'int8'."
)


def check_native_allows(recipe: Recipe, layer_types: list[str]) -> None:
    """Refuse a second choice of tokens where the model makes one.

    Raises:
        NotImplementedError: for eviction, windows or sparse reads of a model with such layers.
    """
    names = [technique.name for technique in recipe.techniques if technique.role in ("retention", "reading")]
    native = [index for index, layer_type in enumerate(layer_types) if layer_type in ENCODABLE]
    if names and native:
        raise NotImplementedError(_CHOOSES_ITSELF.format(names[0], native[0], layer_types[native[0]]))


def build_native(context: LayerContext, kwargs: dict, config: Any, encoding: Encoding | None) -> KVLayer:
    """The layer for `context.layer_type`, one of `NATIVE`, exact or encoded.

    Args:
        context: of the layer.
        kwargs: what transformers would build its own layer from.
        config: of the decoder.
        encoding: how tokens are encoded, or None.
    """
    if context.layer_type in _REFERENCE:
        return ReferenceWindowLayer(context, sliding_window=kwargs["sliding_window"])
    if context.layer_type in _INDEXED:
        return _build_indexed(context, config, encoding)
    return _build_compressed(context, kwargs["config"], encoding)


def _build_indexed(context: LayerContext, config: Any, encoding: Encoding | None) -> IndexedLayer:
    # The model masks all tokens by its choice, so it must get all of them.
    context = replace(context, takes_over=False)
    if encoding is None:
        return IndexedBlockLayer(context, index=Stream(context))
    dim = getattr(config, "index_head_dim", None) or config.indexer_head_dim
    index = encoding.stream(context, dim=dim, residual_length=encoding.options["residual_length"])
    return IndexedDecodedLayer(context, index=index, **encoding.decoded(context))


def _build_compressed(context: LayerContext, config: Any, encoding: Encoding | None) -> EntriesLayer:
    dims = {"compressor": config.head_dim, "indexer": config.index_head_dim}

    def make_stream(name: str) -> Stream:
        if encoding is None:
            return Stream(context)
        # An entry is old when it is made: the newest tokens are in the window besides.
        return encoding.stream(context, dim=dims[name], residual_length=0)

    return EntriesLayer(
        context,
        sliding_window=config.sliding_window,
        rate=config.compress_rates[context.layer_type],
        make_stream=make_stream,
    )
