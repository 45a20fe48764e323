"""What a layer stores, as plain tensors and integers: the one form in which layers are saved and restored."""

from dataclasses import dataclass, field

import torch


@dataclass
class LayerState:
    """Tensors in their stored form, and the integers that say what they mean. Parts nest: `tokens.block_ids`.

    A layer that holds nothing has a state without tensors.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def put(self, name: str, part: "LayerState") -> None:
        """Add `part` under `name`."""
        self.tensors |= {f"{name}.{key}": tensor for key, tensor in part.tensors.items()}
        self.numbers |= {f"{name}.{key}": number for key, number in part.numbers.items()}

    def part(self, name: str) -> "LayerState":
        """What was put under `name`."""
        prefix = f"{name}."
        return LayerState(
            {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)},
            {key.removeprefix(prefix): number for key, number in self.numbers.items() if key.startswith(prefix)},
        )
