"""Codecs of a layer that shows the dimensions of what it stores at its first update: latents, indexer keys, entries."""

from collections.abc import Sequence
from typing import Any

from ..codecs import Codec, build_codecs

_EACH_HEAD = (
    "bits of layer {0} has a width for each head, and it stores no heads: give one for keys and one for values."
)
_MORE_THAN_KEYS = (
    "{0} cannot serve layer {1}: its indexer stores {2} numbers a token, which are more than its keys of {3} and would "
    "not come back right. Use cache 'blocks'."
)


class LateCodecs:
    """Makes codecs from dimensions; knows nothing of the model, so that a cache can be copied without it.

    Args:
        name: of the encoding technique.
        options: checked options.
        layer: its index, for messages.
        widths: bits of keys and of values, or None for those of the name.
        only_dim: the one dimension that may come, where another one is something else.

    Raises:
        ValueError: if there is a width for each head.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        *,
        layer: int,
        widths: Sequence[int | Sequence[int]] | None,
        only_dim: int | None = None,
    ):
        if widths is not None and not all(isinstance(width, int) for width in widths):
            raise ValueError(_EACH_HEAD.format(layer))
        self.name = name
        self.options = options
        self.layer = layer
        self.widths = widths
        self.only_dim = only_dim

    def __call__(self, *dims: int) -> tuple[Codec, ...]:
        """Codecs of keys and of values of these dimensions; a tensor that comes alone is encoded as values are.

        Raises:
            ValueError: if the options do not fit a dimension.
            NotImplementedError: if it is not `only_dim`.
        """
        if self.only_dim is not None and dims != (self.only_dim,):
            raise NotImplementedError(_MORE_THAN_KEYS.format(self.name, self.layer, dims[0], self.only_dim))
        kinds = (0, 1)[-len(dims) :]
        return tuple(self._codec(kind, dim) for kind, dim in zip(kinds, dims, strict=True))

    def _codec(self, kind: int, dim: int) -> Codec:
        options = self.options
        if self.widths is not None:
            options = options | {"key_bits": self.widths[kind], "value_bits": self.widths[kind]}
        return build_codecs(self.name, options, dim)[kind]
