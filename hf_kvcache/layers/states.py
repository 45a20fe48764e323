"""Layers with recurrent states: Mamba and other linear attention (technique 5), alone or beside attention.

The states have a fixed size whatever the sequence length. They are transformers' own, with the batch operations that
it lacks (a prefilled cache can be repeated for beams). Recurrent states cannot be rolled back.
"""

import copy

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from .layer import KVLayer
from .layer_state import LayerState


class StateLayer(LinearAttentionLayer):
    """States of a linear-attention or convolution layer: `[B, ...]` tensors in `conv_states` and `recurrent_states`."""

    read_bytes = 0

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        _make_writable(self.conv_states, state_idx)
        return super().update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        _make_writable(self.recurrent_states, state_idx)
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def select_rows(self, rows: np.ndarray) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = state.index_select(0, torch.from_numpy(rows).to(state.device))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.select_rows(beam_idx.cpu().numpy())

    def reset(self) -> None:
        """Forget the states and give the memory back."""
        record_past = self.record_past
        StateLayer.__init__(self, number_of_states=self.number_of_states)
        self.record_past = record_past

    def stop_past_recording(self) -> None:
        self.record_past = False

    def fork(self) -> "StateLayer":
        """A second layer with the same states (states are small and are copied)."""
        return copy.deepcopy(self)

    def to(self, device: torch.device, pools: dict) -> None:
        """Move the states to `device`."""
        self.device = device
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                states[index] = None if state is None else state.to(device)

    def state(self) -> LayerState:
        """Everything this layer holds, as it is: what a file gets."""
        state = LayerState(numbers={"record_past": int(self.record_past)})
        for index in range(self.number_of_states):
            if (conv := self.conv_states[index]) is not None:
                state.tensors[f"conv_{index}"] = conv
                state.numbers[f"conv_kernel_size_{index}"] = self.conv_kernel_size[index]
                state.numbers[f"has_previous_state_{index}"] = int(self.has_previous_state[index])
            if (recurrent := self.recurrent_states[index]) is not None:
                state.tensors[f"recurrent_{index}"] = recurrent
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        """Become, from new, the layer that gave `state`, on `device`; the tensors of `state` are on the CPU."""
        self.record_past = bool(state.numbers["record_past"])
        for index in range(self.number_of_states):
            if (conv := state.tensors.get(f"conv_{index}")) is not None:
                self.conv_states[index], self.is_conv_states_initialized[index] = conv.to(device), True
                self.conv_kernel_size[index] = state.numbers[f"conv_kernel_size_{index}"]
                self.has_previous_state[index] = bool(state.numbers[f"has_previous_state_{index}"])
                self.dtype, self.device = conv.dtype, device
            if (recurrent := state.tensors.get(f"recurrent_{index}")) is not None:
                self.recurrent_states[index] = recurrent.to(device)
                self.is_recurrent_states_initialized[index] = True

    def can_crop(self, count: int) -> bool:
        """Convolution states alone can be taken back, while the past is recorded; recurrent states never."""
        is_recurrent = any(state is not None for state in self.recurrent_states.values())
        return not is_recurrent and self.record_past

    def crop(self, tokens_to_remove: int) -> None:
        if not self.can_crop(-tokens_to_remove):
            raise RuntimeError(
                f"layer of type {type(self).__name__} cannot take back tokens: a recurrent state keeps no history. "
                "Start from a new cache, or fork() the cache before the tokens are added."
            )
        super().crop(tokens_to_remove)

    @property
    def batch_size(self) -> int:
        states = [s for group in (self.conv_states, self.recurrent_states) for s in group.values() if s is not None]
        if not states:
            raise AttributeError("batch_size is not known before the first update")
        return states[0].shape[0]


class HybridLayer(StateLayer, CacheLayerMixin):
    """A layer that has both states and attention (Falcon-H1): the attention part is any of our layers."""

    is_compileable = False

    def __init__(self, attention: KVLayer, *, number_of_states: int = 1):
        self.attention = attention
        StateLayer.__init__(self, number_of_states=number_of_states)

    @property
    def is_sliding(self) -> bool:
        return self.attention.is_sliding

    @property
    def is_initialized(self) -> bool:
        return self.attention.is_initialized

    @property
    def seen(self) -> int:
        return self.attention.seen

    @property
    def stored_length(self) -> int:
        return self.attention.stored_length

    @property
    def keys(self) -> torch.Tensor | None:
        return self.attention.keys

    @property
    def values(self) -> torch.Tensor | None:
        return self.attention.values

    @property
    def read_bytes(self) -> int:
        return self.attention.read_bytes

    def lazy_initialization(self, *args, **kwargs) -> None:
        # Called with keys and values by position for attention, by keyword for states.
        if args:
            self.attention.lazy_initialization(*args)
        else:
            super().lazy_initialization(**kwargs)

    def update(self, key_states, value_states, *args, **kwargs):
        return self.attention.update(key_states, value_states, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.attention.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.attention.get_seq_length()

    def get_max_length(self) -> int:
        return self.attention.get_max_length()

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.attention.activate_past_recording()

    def select_rows(self, rows: np.ndarray) -> None:
        super().select_rows(rows)
        self.attention.select_rows(rows)

    def stop_past_recording(self) -> None:
        super().stop_past_recording()
        self.attention.stop_past_recording()

    def fork(self) -> "HybridLayer":
        return copy.deepcopy(self, {id(self.attention): self.attention.fork()})

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        self.attention.to(device, pools)

    def state(self) -> LayerState:
        state = super().state()
        state.put("attention", self.attention.state())
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        self.attention.load_state(state.part("attention"), device)

    def can_crop(self, count: int) -> bool:
        return super().can_crop(count) and self.attention.can_crop(count)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.attention.crop(tokens_to_remove)

    def reset(self) -> None:
        record_past = self.record_past
        StateLayer.__init__(self, number_of_states=self.number_of_states)
        self.record_past = record_past
        self.attention.reset()


def _make_writable(states: dict[int, torch.Tensor | None], index: int) -> None:
    """A state born in inference mode cannot be written outside it, in a later turn: copy it once."""
    state = states[index]
    if state is not None and state.is_inference() and not torch.is_inference_mode_enabled():
        states[index] = state.clone()
