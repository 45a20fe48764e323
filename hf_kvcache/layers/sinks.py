"""The first real tokens of each sequence, kept exactly: attention sinks.

Trained models put much attention on the first tokens whatever they say; losing or rounding them costs more than any
others. Rows of a left-padded batch have their first real token at different slots, so sinks are kept a row.
Paper: Xiao et al. 2024, https://arxiv.org/abs/2309.17453 (section 3.1).
"""

from collections.abc import Sequence

import numpy as np
import torch

from .first_slots import FirstSlots
from .layer_state import LayerState


class Sinks:
    """The first `num_tokens` real tokens of each row, one `[B, H, S, D]` tensor for each of keys and values.

    Args:
        states: the first new keys and values, for their shapes.
        num_tokens: sink tokens a row, at least 0.
    """

    def __init__(self, states: Sequence[torch.Tensor], num_tokens: int):
        self.num_tokens = num_tokens
        self.device = states[0].device
        rows = states[0].shape[0]
        with torch.inference_mode(False):
            self.states = [
                torch.zeros(rows, s.shape[1], num_tokens, s.shape[-1], dtype=s.dtype, device=s.device) for s in states
            ]
        self._first_slots = FirstSlots(rows, self.device)

    @property
    def first_slot(self) -> torch.Tensor:
        """First real token of each row, int64 `[B]`."""
        return self._first_slots.slots

    @property
    def end(self) -> int:
        """One past the last sink slot of any row, once every row has had a real token; very large before."""
        return self._first_slots.last + self.num_tokens

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    @property
    def slots(self) -> torch.Tensor:
        """Slot of each sink, `[B, S]`."""
        return self.first_slot[:, None] + torch.arange(self.num_tokens, device=self.device)

    def capture(self, states: Sequence[torch.Tensor], before: int, mask: torch.Tensor | None) -> None:
        """Copy those of the new tokens, slots `before` and up, that are sinks. Free once every row has its sinks."""
        if before >= self.end:
            return
        count = states[0].shape[2]
        self._first_slots.note(mask, before + count)
        local = self.slots - before
        is_new = ((local >= 0) & (local < count))[:, None, :, None]
        for sink, state in zip(self.states, states, strict=True):
            index = local.clamp(0, count - 1)[:, None, :, None].expand_as(sink)
            sink.copy_(torch.where(is_new, state.gather(2, index), sink))

    def covered(self, states: list[torch.Tensor], start: int) -> list[torch.Tensor]:
        """`states` of the slots from `start`, with each row's padding and sinks made like the token that follows them.

        For an encoder: nobody reads its copies of them, and sinks have the largest keys of a text, which would widen
        the range of the group that they share with others.
        """
        if start >= self.end:
            return states
        length = states[0].shape[2]
        after = self.first_slot + self.num_tokens - start  # [B]
        is_unread = (torch.arange(length, device=self.device) < after[:, None])[:, None, :, None]
        index = after.clamp(0, length - 1)[:, None, None, None]
        likes = [state.gather(2, index.expand(-1, state.shape[1], 1, state.shape[3])) for state in states]
        return [torch.where(is_unread, like, state) for like, state in zip(likes, states, strict=True)]

    def own_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """The columns of a mask `[B or 1, 1, Tq, T]` that belong to the sinks, `[B, 1, Tq, S]`."""
        index = self.slots.clamp(max=mask.shape[-1] - 1)[:, None, None, :].expand(-1, 1, mask.shape[2], -1)
        return mask.expand(len(index), -1, -1, -1).gather(-1, index)

    def take_back(self, seen: int) -> None:
        """Only the first `seen` slots are left: look again, among the tokens to come, for sinks that went."""
        self._first_slots.take_back(seen)

    def select_rows(self, rows: np.ndarray) -> None:
        # Outside inference mode, or a later turn could not write the result.
        with torch.inference_mode(False):
            index = torch.from_numpy(rows).to(self.device)
            self.states = [state.index_select(0, index) for state in self.states]
        self._first_slots.select_rows(rows)

    def fork(self) -> "Sinks":
        forked = object.__new__(Sinks)
        forked.__dict__.update(self.__dict__)
        forked.states = [state.clone() for state in self.states]
        forked._first_slots = self._first_slots.fork()
        return forked

    def state(self) -> LayerState:
        """The sinks of each row, and where they are."""
        state = LayerState({"keys": self.states[0], "values": self.states[1]})
        state.put("first_slots", self._first_slots.state())
        return state

    def load_state(self, state: LayerState) -> None:
        """Take over what `state` gave, to the device of these sinks."""
        self.states = [state.tensors[name].to(self.device) for name in ("keys", "values")]
        self._first_slots.load_state(state.part("first_slots"), self.device)

    def to(self, device: torch.device) -> None:
        self.device = device
        self.states = [state.to(device) for state in self.states]
        self._first_slots.to(device)
