"""Turn queries or keys to other positions with the model's own rotary embedding.

Rotary embeddings compose: turning a vector rotated for position `p` by `d` gives the vector for position `p + d`.
Paper: Su et al. 2021, RoFormer, https://arxiv.org/abs/2104.09864.
"""

import inspect
import sys
from collections.abc import Callable

import torch
from torch import nn


class Rotary:
    """Rotation of one attention layer, in the layout (halves or pairs, whole or partial) that its model uses.

    Args:
        embedding: the model's rotary embedding module, `(x, position_ids) -> cos, sin`.
        apply: the `apply_rotary_pos_emb` of the model's own file.
        layer_type: passed to embeddings that keep one frequency table for each layer type.

    Raises:
        NotComposableError: if turning does not compose (frequencies that change with the sequence length).
    """

    def __init__(self, embedding: nn.Module, apply: Callable, *, head_dim: int, layer_type: str | None = None):
        self.embedding = embedding
        self.apply = apply
        self.layer_type = layer_type
        rope_type = _rope_type(embedding, layer_type)
        if "dynamic" in rope_type or rope_type == "longrope":
            raise NotComposableError(f"rope_type={rope_type!r} changes with length")
        self._scale = 1.0
        # Some embeddings scale queries and keys: what they give for position 0 is that scale.
        device = next(self.embedding.buffers()).device
        self._scale = (
            self._tables(torch.empty(0, device=device), torch.zeros(1, 1, dtype=torch.long, device=device))[0]
            .max()
            .item()
        )
        self._check_composes(head_dim)

    def __deepcopy__(self, memo: dict) -> "Rotary":
        return self  # part of the model, not of the cache

    def turn(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn `states` `[B, H, T, D]` by `positions` `[B, T]` tokens (negative: back)."""
        cos, sin = self._tables(states, positions.abs())
        sin = sin * positions.sign().unsqueeze(-1).to(sin.dtype)
        return self.apply(states, states, cos, sin)[0]

    def _tables(self, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        extra = {} if self.layer_type is None else {"layer_type": self.layer_type}
        # float32 tables: a bfloat16 cosine of a large distance would be off by whole tokens.
        probe = torch.empty(0, dtype=torch.float32, device=states.device)
        cos, sin = self.embedding(probe, positions, **extra)
        return (cos, sin) if self._scale == 1.0 else (cos / self._scale, sin / self._scale)

    @torch.no_grad()
    def _check_composes(self, head_dim: int) -> None:
        device = next(self.embedding.buffers()).device
        states = torch.linspace(-1, 1, head_dim, device=device).view(1, 1, 1, head_dim)
        position = torch.tensor([[11]], device=device)
        twice = self.turn(self.turn(states, position), position + 20)
        if not torch.allclose(twice, self.turn(states, 2 * position + 20), atol=1e-4):
            raise NotComposableError("its rotations do not compose")


class NotComposableError(Exception):
    """Why keys of a model cannot be turned to other positions."""


def _rope_type(embedding: nn.Module, layer_type: str | None) -> str:
    rope_type = getattr(embedding, "rope_type", "")
    return rope_type.get(layer_type, "") if isinstance(rope_type, dict) else rope_type


def find_rotary(model: nn.Module, attention: nn.Module, layer_type: str, *, refusal: str) -> Rotary:
    """The rotation that `attention`, an attention layer of `model`, applies to its keys.

    Args:
        refusal: the error's text, with `{reason}` in it.

    Raises:
        NotImplementedError: if the model has no rotary embedding of the usual shape, or one that does not compose.
    """
    try:
        return _find(model, attention, layer_type)
    except NotComposableError as error:
        raise NotImplementedError(refusal.format(reason=error)) from None


def _find(model: nn.Module, attention: nn.Module, layer_type: str) -> Rotary:
    embedding = next((m for name, m in model.named_modules() if name.rsplit(".", 1)[-1] == "rotary_emb"), None)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if embedding is None or apply is None:
        raise NotComposableError("it has no rotary embedding of the usual shape")
    takes_type = "layer_type" in inspect.signature(embedding.forward).parameters
    return Rotary(embedding, apply, head_dim=attention.head_dim, layer_type=layer_type if takes_type else None)
