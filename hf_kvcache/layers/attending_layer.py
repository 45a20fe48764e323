"""Layers that run the attention themselves: they see the query and the mask, and return only the new states."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import compat
from ..attention import attend_packed, can_merge
from .layer import KVLayer, LayerContext
from .layer_state import LayerState

_NOT_CALLED = (
    "{name} runs the attention itself: use it in a transformers model with hf_kvcache.enable() in force, or store "
    "states without attending with layer.fill(keys, values)."
)
_CALLED_TWICE = (
    "{name}: layer {index} was updated twice without an attention call between: this model does not run its attention "
    "through transformers' AttentionInterface. Use cache 'blocks'."
)
_IN_FORWARD = (
    "{name}: layer {index} holds tokens that no attention call has taken yet: save the cache between forward passes, "
    "and not after one that failed."
)
_FOREIGN_MASK = (
    "{name} cannot read the attention mask of attn_implementation={implementation!r}: load the model with "
    "attn_implementation='sdpa' or 'eager'."
)


class AttendingLayer(KVLayer):
    """Stores in `attend`, where it knows what the new tokens may see; `update` only takes them.

    Subclasses say how in `_attend_and_store`, and store without a query in `fill`.
    """

    name = "this cache"  # in messages

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = self._prepare(key_states, value_states)
        if self._pending is not None:
            raise RuntimeError(_CALLED_TWICE.format(name=self.name, index=self.context.layer_idx))
        if not compat.hand_over(self, kwargs, key_states):
            raise RuntimeError(_NOT_CALLED.format(name=self.name))
        self._pending = states
        self.seen += states[0].shape[2]
        return key_states, value_states

    @torch.compiler.disable
    def attend(self, base: Callable, module: nn.Module, query, key, value, mask, *args, **kwargs):
        """Attention of the new tokens over what the layer keeps, in place of `base`, the model's own."""
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 4):
            implementation = module.config._attn_implementation
            raise NotImplementedError(_FOREIGN_MASK.format(name=self.name, implementation=implementation))
        states, self._pending = self._pending, None
        return self._attend_and_store(base, module, query, states, mask, args, kwargs)

    def _attend_gathered(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        """Attention to gathered tokens, under a mask `[B, Hkv, 1, n]` of the model's own form, or None."""
        if can_merge(base, kwargs):
            return attend_packed(query, *states, mask, kwargs.get("scaling")), None
        if mask is not None:
            implementation = module.config._attn_implementation
            if "flash" in implementation:
                raise NotImplementedError(
                    f"{self.name} reads other tokens for each head, which attn_implementation={implementation!r} "
                    "cannot mask: load the model with attn_implementation='sdpa' or 'eager'."
                )
            mask = mask.repeat_interleave(query.shape[1] // mask.shape[1], dim=1)
        return base(module, query, *states, mask, *args, **kwargs)

    @abstractmethod
    def _attend_and_store(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict): ...

    @abstractmethod
    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def state(self) -> LayerState:
        if self._pending is not None:
            raise RuntimeError(_IN_FORWARD.format(name=self.name, index=self.context.layer_idx))
        return super().state()

    def reset(self) -> None:
        super().reset()
        self._pending = None


def check_takes_over(name: str, attention: Any, context: LayerContext) -> None:
    """Refuse, for a technique called `name`, a layer that could not attend itself.

    Raises:
        NotImplementedError: if the attention module does not hand on what its cache returns.
    """
    if not context.takes_over:
        raise NotImplementedError(
            f"{name} cannot serve layer {context.layer_idx}: {type(attention).__name__} changes the keys and values "
            "that its cache returns. Use cache 'blocks', or choose other layers."
        )
