"""From an encoding technique and its options to the coded layer of each full-attention layer of a model."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from .attending_layer import check_takes_over
from .codecs import Codec, build_codecs
from .codecs.headwise import HeadwiseCodec
from .codecs.rotated import RotatedValueCodec
from .codecs.transform import TransformKeyCodec
from .coded_layer import CodedLayer
from .layer import LayerContext
from .registry import Recipe
from .rotary import find_rotary

_CANNOT_TURN = (
    "transform cannot turn this model's keys: {reason}. Use cache 'turboquant', which codes them as they are."
)


class Encoding:
    """How the full-attention layers of one model are encoded.

    Args:
        model: whose cache is built.
        recipe: with a technique that fills the role "encoding".
        layers: indices of the full-attention layers.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, layers: list[int]):
        self.model = model
        self.name = recipe.fills("encoding").name
        self.options = recipe.options
        self.layers = layers
        self.bits = recipe.options.get("bits")
        if isinstance(self.bits, (list, tuple)) and len(self.bits) != len(layers):
            raise ValueError(
                f"bits has {len(self.bits)} entries and this model has {len(layers)} full-attention layers ({layers}): "
                "give one for each of them."
            )

    def build(self, attention: Any, context: LayerContext) -> CodedLayer:
        """The coded layer of one attention module.

        Raises:
            ValueError: if the options or the calibration do not fit the model.
            NotImplementedError: if this attention cannot be served.
        """
        check_takes_over(self.name, attention, context)
        exact = {name: self.options[name] for name in ("residual_length", "num_sink_tokens")}
        if self.name == "transform":
            return self._build_transform(attention, context, exact)
        key_codec, value_codec = self._codecs(context.layer_idx, attention.head_dim)
        return CodedLayer(context, key_codec=key_codec, value_codec=value_codec, **exact)

    def _build_transform(self, attention: Any, context: LayerContext, exact: dict[str, int]) -> CodedLayer:
        rotary = find_rotary(self.model, attention, context.layer_type, refusal=_CANNOT_TURN)
        key_codec = self._key_codecs(attention.head_dim)[context.layer_idx]
        value_codec = RotatedValueCodec(self.options["value_bits"])
        return CodedLayer(context, key_codec=key_codec, value_codec=value_codec, rotary=rotary, **exact)

    def _codecs(self, layer: int, head_dim: int) -> Sequence[Codec]:
        if self.bits is None:
            return build_codecs(self.name, self.options, head_dim)
        if self.bits == "auto":
            from .calibration import default_bits  # which builds a cache itself

            self.bits = default_bits(self.model, self.name, self.options)
        entry = self.bits[self.layers.index(layer)]
        widths = (entry, entry) if isinstance(entry, int) else entry
        return [self._codec(kind, width, layer, head_dim) for kind, width in enumerate(widths)]

    def _codec(self, kind: int, width: int | Sequence[int], layer: int, head_dim: int) -> Codec:
        """The codec of the keys (`kind` 0) or values (1) of a layer, whose heads may have widths of their own."""
        heads = [width] if isinstance(width, int) else width
        if not isinstance(width, int) and len(width) != self._num_heads:
            raise ValueError(
                f"bits of layer {layer} has {len(width)} widths for {self._num_heads} KV heads: give one for each."
            )
        known = {}
        for nbits in set(heads):
            options = self.options | {"key_bits": nbits, "value_bits": nbits}
            known[nbits] = build_codecs(self.name, options, head_dim)[kind]
        return known[heads[0]] if len(known) == 1 else HeadwiseCodec([known[nbits] for nbits in heads])

    @property
    def _num_heads(self) -> int:
        config = self.model.config.get_text_config(decoder=True)
        return getattr(config, "num_key_value_heads", None) or config.num_attention_heads

    def _key_codecs(self, head_dim: int) -> dict[int, TransformKeyCodec]:
        self._calibration.check_fits(self.layers, self._num_heads, head_dim)
        return self._calibration.key_codecs(self.options["key_bits"])

    @functools.cached_property
    def _calibration(self) -> Any:
        from .calibration import Calibration, default_calibration  # which builds a cache itself

        given = self.options["calibration"]
        if given is None:
            return default_calibration(self.model)
        return given if isinstance(given, Calibration) else Calibration.load(given)
