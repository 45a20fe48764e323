"""From an encoding technique and its options to the coded layer of each full-attention layer of a model."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..codecs import Codec, build_codecs
from ..codecs.by_head import HeadCodecs
from ..codecs.headwise import HeadwiseCodec
from ..codecs.rotated import RotatedValueCodec
from ..codecs.transform import TransformKeyCodec
from ..layers.attending_layer import check_takes_over
from ..layers.layer import LayerContext
from ..registry import Recipe
from ..rotary import find_rotary
from .coded_layer import CodedLayer
from .coded_stream import CodedStream
from .coded_window import CodedWindowLayer
from .decoded_layer import DecodedLayer
from .late_codecs import LateCodecs

_CANNOT_TURN = (
    "transform cannot turn this model's keys: {reason}. Use cache 'turboquant', which codes them as they are."
)
_CANNOT_MEASURE = (
    "{given} looks at keys and queries, which layer {layer} of type {layer_type!r} does not show to its cache: use "
    "'int8', 'fp8' or 'turboquant' with fixed bits."
)


class Encoding:
    """How the full-attention layers of one model are encoded.

    Args:
        model: whose cache is built.
        recipe: with a technique that fills the role "encoding".
        layers: indices of the layers with tokens to encode.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, layers: list[int]):
        self.model = model
        self.name = recipe.fills("encoding").name
        self.options = recipe.options
        self.layers = layers
        self.bits = recipe.options.get("bits")
        if isinstance(self.bits, (list, tuple)) and len(self.bits) != len(layers):
            raise ValueError(
                f"bits has {len(self.bits)} entries and this model has {len(layers)} layers to encode ({layers}): "
                "give one for each of them."
            )

    @property
    def found(self) -> dict[str, Any]:
        """Options that were left to be found out for the model, as they were found."""
        if self.name == "transform":
            return {"calibration": self._calibration}
        return {"bits": self.bits, "bits_per_value": None} if self.options.get("bits") == "auto" else {}

    def codecs_of_heads(self, attention: Any, context: LayerContext, *, is_packed: bool) -> HeadCodecs:
        """Codecs that encode each head apart, for tokens of which each head keeps its own.

        Args:
            is_packed: whether kept keys are turned to positions that follow each other.

        Raises:
            ValueError: if the options or the calibration do not fit the model.
            NotImplementedError: if this model's keys cannot be turned.
        """
        return HeadCodecs(**self.codecs(attention, context), is_packed=is_packed)

    def codecs(self, attention: Any, context: LayerContext) -> dict[str, Any]:
        """Codecs of keys and values, and what turns keys that are encoded without their rotary embedding.

        Raises:
            ValueError: if the options or the calibration do not fit the model.
            NotImplementedError: if this model's keys cannot be turned.
        """
        if self.name == "transform":
            rotary = find_rotary(self.model, attention, context.layer_type, refusal=_CANNOT_TURN)
            key_codec = self._key_codecs(attention.head_dim)[context.layer_idx]
            value_codec = RotatedValueCodec(self.options["value_bits"])
        else:
            rotary = None
            key_codec, value_codec = self._codecs(context.layer_idx, attention.head_dim)
        return {"key_codec": key_codec, "value_codec": value_codec, "rotary": rotary}

    def build(self, attention: Any, context: LayerContext, *, is_windowed: bool) -> CodedLayer:
        """The coded layer of one attention module.

        Raises:
            ValueError: if the options or the calibration do not fit the model.
            NotImplementedError: if this attention cannot be served.
        """
        if not context.takes_over and not is_windowed and self.name != "transform":
            return DecodedLayer(context, **self.decoded(context))
        check_takes_over(self.name, attention, context)
        arguments = {name: self.options[name] for name in ("residual_length", "num_sink_tokens")}
        arguments |= self.codecs(attention, context)
        if is_windowed:
            return CodedWindowLayer(context, sliding_window=self.options["sliding_window"], **arguments)
        return CodedLayer(context, **arguments)

    def decoded(self, context: LayerContext) -> dict[str, Any]:
        """The arguments of a `DecodedLayer`.

        Raises:
            ValueError: if the options have a width for each head.
            NotImplementedError: if something has to be measured first.
        """
        self._check_measurable(context)
        sizes = {name: self.options[name] for name in ("residual_length", "num_sink_tokens")}
        return sizes | {"make_codecs": self._late(context)}

    def stream(self, context: LayerContext, *, dim: int, residual_length: int) -> CodedStream:
        """What encodes vectors of `dim` elements as values are encoded: indexer keys, entries. Raises as `decoded`."""
        self._check_measurable(context)
        return CodedStream(context, make_codecs=self._late(context, only_dim=dim), residual_length=residual_length)

    def _late(self, context: LayerContext, only_dim: int | None = None) -> LateCodecs:
        widths = None if self.bits is None else self._widths(context.layer_idx)
        return LateCodecs(self.name, self.options, layer=context.layer_idx, widths=widths, only_dim=only_dim)

    def _check_measurable(self, context: LayerContext) -> None:
        """Refuse what has to be measured on a layer that returns all keys, and lets its model attend.

        Raises:
            NotImplementedError: for calibrated codecs and measured bits.
        """
        if self.name == "transform" or self.bits == "auto":
            given = "transform" if self.name == "transform" else "bits='auto'"
            raise NotImplementedError(
                _CANNOT_MEASURE.format(given=given, layer=context.layer_idx, layer_type=context.layer_type)
            )

    def _codecs(self, layer: int, head_dim: int) -> Sequence[Codec]:
        if self.bits is None:
            return build_codecs(self.name, self.options, head_dim)
        if self.bits == "auto":
            from ..calibration import default_bits  # which builds a cache itself

            self.bits = default_bits(self.model, self.name, self.options)
        widths = self._widths(layer)
        if all(isinstance(width, int) for width in widths):
            return self._codecs_of(widths, head_dim)
        pairs = self._pairs(layer, widths)
        known = {pair: self._codecs_of(pair, head_dim) for pair in dict.fromkeys(pairs)}
        if len(known) == 1:
            return known[pairs[0]]
        starts = [head for head, pair in enumerate(pairs) if not head or pair != pairs[head - 1]]
        return [HeadwiseCodec([known[pair][kind] for pair in pairs], starts) for kind in (0, 1)]

    def _codecs_of(self, widths: Sequence[int], head_dim: int) -> Sequence[Codec]:
        """Codecs of keys and values of these widths."""
        bits = dict(zip(("key_bits", "value_bits"), widths, strict=True))
        return build_codecs(self.name, self.options | bits, head_dim)

    def _pairs(self, layer: int, widths: Sequence[int | Sequence[int]]) -> list[tuple[int, int]]:
        """Bits of the keys and of the values of each head."""
        for width in widths:
            if not isinstance(width, int) and len(width) != self._num_heads:
                raise ValueError(
                    f"bits of layer {layer} has {len(width)} widths for {self._num_heads} KV heads: give one for each."
                )
        of_heads = ([width] * self._num_heads if isinstance(width, int) else width for width in widths)
        return list(zip(*of_heads, strict=True))

    def _widths(self, layer: int) -> Sequence[int | Sequence[int]]:
        """Bits of the keys and of the values of a layer."""
        entry = self.bits[self.layers.index(layer)]
        return (entry, entry) if isinstance(entry, int) else entry

    @property
    def _num_heads(self) -> int:
        config = self.model.config.get_text_config(decoder=True)
        return getattr(config, "num_key_value_heads", None) or config.num_attention_heads

    def _key_codecs(self, head_dim: int) -> dict[int, TransformKeyCodec]:
        self._calibration.check_fits(self.layers, self._num_heads, head_dim)
        return self._calibration.key_codecs(self.options["key_bits"])

    @functools.cached_property
    def _calibration(self) -> Any:
        from ..calibration import Calibration, default_calibration  # which builds a cache itself

        given = self.options["calibration"]
        if given is None:
            return default_calibration(self.model)
        return given if isinstance(given, Calibration) else Calibration.load(given)
