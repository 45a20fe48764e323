"""Reading a prompt once more to see which of its tokens a model needs to repeat it."""

from collections.abc import Sequence

import torch

from .base import Held, Queries
from .observers import attention_weights

# Attention weights exist for so many queries at a time.
_QUERIES_AT_A_TIME = 128


class Reconstruction:
    """The most attention that any query of the second reading gave to each held token, float32 `[B, Hkv, n]`."""

    def __init__(self, held: Held):
        self.most = torch.zeros(held.slots.shape, device=held.slots.device)

    def attend(self, queries: Queries, states: Sequence[torch.Tensor], held: Held) -> torch.Tensor:
        """Attention of `queries` to everything held and to their own tokens' keys and values `states`; none is stored.

        Returns:
            `[B, T, Hq, Dv]`.
        """
        count = queries.states.shape[2]
        slots = torch.arange(queries.start, queries.start + count, device=held.slots.device)
        slots = slots.expand(*held.slots.shape[:2], -1)
        joined = [torch.cat(pair, dim=2) for pair in zip(held[:4], (*states, slots, slots), strict=True)]
        whole = Held(*joined, held.first_slot, queries.start + count, held.scaling)
        outputs = []
        for begin in range(0, count, _QUERIES_AT_A_TIME):
            part = Queries(queries.states[:, :, begin : begin + _QUERIES_AT_A_TIME], queries.start + begin)
            weights = attention_weights(part, whole)  # [B, Hkv, G, T, n]
            self.note(weights, part)
            output = torch.matmul(weights.flatten(2, 3).to(whole.values.dtype), whole.values)
            outputs.append(output.unflatten(2, weights.shape[2:4]).flatten(1, 2))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def note(self, weights: torch.Tensor, queries: Queries) -> None:
        """Take note of attention weights `[B, Hkv, Hq / Hkv, T, n]` of `queries`; their own tokens come last."""
        self.most = torch.maximum(self.most, weights[..., : self.most.shape[-1]].amax(dim=(2, 3)))
