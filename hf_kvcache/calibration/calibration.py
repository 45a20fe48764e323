"""The statistics of a model's keys, layer by layer, and the safetensors file that they are kept in."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..codecs.statistics import LayerStatistics
from ..codecs.transform import TransformKeyCodec
from ..codecs.water_filling import allocate

# Goes up when the meaning of a file changes.
_FORMAT = "hf_kvcache.calibration.1"


@dataclass(frozen=True)
class Calibration:
    """Key statistics of each full-attention layer, by layer index, as `calibrate` measures them.

    It fits every model with the same shapes; measured on a base model, it also serves its fine-tunes.

    Attributes:
        layers: statistics by layer index.
        num_tokens: tokens that they were measured on.
    """

    layers: dict[int, LayerStatistics]
    num_tokens: int
    _codecs: dict[float, dict[int, TransformKeyCodec]] = field(default_factory=dict, repr=False, compare=False)

    def __deepcopy__(self, memo: dict) -> "Calibration":
        return self  # never changes; `generate()` copies its config, and what is in it

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: `D + 2` float32 numbers for each dimension of each head."""
        save_file(self.tensors(), path, {"format": _FORMAT, "num_tokens": json.dumps(self.num_tokens)})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything but `num_tokens`, as plain tensors: `<layer>.<name>`."""
        return {
            f"{index}.{name}": tensor.contiguous()
            for index, statistics in self.layers.items()
            for name, tensor in statistics._asdict().items()
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], num_tokens: int) -> "Calibration":
        """What gave `tensors()`."""
        indices = sorted({int(name.partition(".")[0]) for name in tensors})
        names = LayerStatistics._fields
        layers = {i: LayerStatistics(**{name: tensors[f"{i}.{name}"] for name in names}) for i in indices}
        return cls(layers, num_tokens=num_tokens)

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read a file that `save` wrote.

        Raises:
            ValueError: if there is no such file, or it is not one of ours.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"calibration={str(path)!r} cannot be read ({error}). {_REMEDY}") from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"calibration={str(path)!r} is not a calibration of this version. {_REMEDY}")
        return cls.from_tensors(tensors, json.loads(metadata["num_tokens"]))

    def check_fits(self, layers: list[int], num_heads: int, dim: int) -> None:
        """Refuse a model that is not of the shape of the one that was calibrated.

        Raises:
            ValueError: if its full-attention `layers`, KV heads or head dimension are others.
        """
        if layers != sorted(self.layers):
            raise ValueError(
                f"the calibration is of another model: it has the full-attention layers {sorted(self.layers)}, and "
                f"this model {layers}. {_REMEDY}"
            )
        for index, statistics in self.layers.items():
            if (shape := tuple(statistics.variance.shape)) != (num_heads, dim):
                raise ValueError(
                    f"the calibration is of another model: layer {index} has {shape[0]} KV heads of {shape[1]} "
                    f"dimensions there and {num_heads} of {dim} here. {_REMEDY}"
                )

    def key_codecs(self, key_bits: float) -> dict[int, TransformKeyCodec]:
        """The codec of each layer's keys, with `key_bits` bits a value on average over all layers.

        Made once for each `key_bits`: codecs never change, and are the same for every cache.
        """
        if key_bits not in self._codecs:
            weighted = torch.stack([s.variance * s.importance[:, None] for s in self.layers.values()])
            bits = allocate(weighted, round(key_bits * weighted.numel()))
            self._codecs[key_bits] = {
                index: TransformKeyCodec(statistics, layer_bits)
                for (index, statistics), layer_bits in zip(self.layers.items(), bits, strict=True)
            }
        return self._codecs[key_bits]


_REMEDY = "Make one with hf_kvcache.calibrate(model, tokenizer).save(path)."
