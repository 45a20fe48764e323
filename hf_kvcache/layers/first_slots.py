"""Where the real tokens of each row begin: left padding, found once and kept."""

import itertools

import numpy as np
import torch

from ..masks import first_visible
from .layer_state import LayerState

_versions = itertools.count()
_UNKNOWN = 1 << 40  # first slot of a row that has had only padding so far


class FirstSlots:
    """First real token of each row, `slots` int64 `[B]`; `version` changes whenever they do.

    Args:
        num_rows: sequences.
        device: of the layer.
    """

    def __init__(self, num_rows: int, device: torch.device):
        with torch.inference_mode(False):
            self.slots = torch.full((num_rows,), _UNKNOWN, device=device)
        self.last = _UNKNOWN  # the largest of them
        self.version = next(_versions)

    @property
    def is_padded(self) -> bool:
        return self.last > 0

    def note(self, mask: torch.Tensor | None, seen: int) -> None:
        """Look in the mask of a forward that ends at slot `seen`. Free once every row has a real token."""
        if self.last == _UNKNOWN:
            self.slots.copy_(self.slots.clamp(max=first_visible(mask, seen, _UNKNOWN)))
            # A sync, in the first forwards only: later steps compare Python integers.
            self.last = int(self.slots.max())
            self.version = next(_versions)

    def take_back(self, seen: int) -> None:
        """Only the first `seen` slots are left: look again for tokens that went."""
        if seen <= self.last:
            self.slots[self.slots >= seen] = _UNKNOWN
            self.last = _UNKNOWN
            self.version = next(_versions)

    def select_rows(self, rows: np.ndarray) -> None:
        # Outside inference mode, or a later turn could not write the result.
        with torch.inference_mode(False):
            self.slots = self.slots.index_select(0, torch.from_numpy(rows).to(self.slots.device))
        self.version = next(_versions)

    def state(self) -> LayerState:
        """The first slot of each row."""
        return LayerState({"slots": self.slots}, {"last": self.last})

    def load_state(self, state: LayerState, device: torch.device) -> None:
        """Become what gave `state`, on `device`."""
        self.slots, self.last = state.tensors["slots"].to(device), state.numbers["last"]
        self.version = next(_versions)

    def fork(self) -> "FirstSlots":
        forked = object.__new__(FirstSlots)
        forked.__dict__.update(self.__dict__)
        forked.slots = self.slots.clone()
        return forked

    def to(self, device: torch.device) -> None:
        self.slots = self.slots.to(device)
