"""Hands the queries of a layer to its policy's observer: a prompt's at once, those of single steps many at a time."""

from collections.abc import Callable, Sequence

import torch

from ..layers.layer_state import LayerState
from .base import Held, Observer, Queries

# Single steps whose queries wait: each takes the memory of one or two tokens, and each look takes a step's time.
_MOST_WAITING = 16


class QueryLog:
    """Queries that the observer has not seen yet. While the past is recorded they wait, because they may be taken back.

    Args:
        observer: of the layer's policy.
    """

    def __init__(self, observer: Observer):
        self.observer = observer
        self._waiting: list[Queries] = []
        self._observed = 0  # slots that the observer knows of

    def add(
        self, queries: Queries, first_slot: torch.Tensor, held: Callable[[], Sequence[Held]], *, may_be_taken_back: bool
    ) -> None:
        """Take note of `queries`; `held()` are the parts of what the layer holds, those tokens included."""
        self._waiting.append(queries)
        is_many = queries.states.shape[2] > 1 or len(self._waiting) >= _MOST_WAITING
        if is_many and not may_be_taken_back:
            self.flush(first_slot, held)

    def flush(self, first_slot: torch.Tensor, held: Callable[[], Sequence[Held]]) -> None:
        """Hand all queries to the observer."""
        if self._waiting:
            states = [queries.states for queries in self._waiting]
            whole = states[0] if len(states) == 1 else torch.cat(states, dim=2)
            self.observer.see(Queries(whole, self._waiting[0].start), first_slot, held)
            self._observed = self._waiting[0].start + whole.shape[2]
            self._waiting = []

    def forget(self, seen: int) -> None:
        """The tokens from slot `seen` on were taken back."""
        left = [queries for queries in self._waiting if queries.start < seen]
        if left and (count := seen - left[-1].start) < left[-1].states.shape[2]:
            # A copy: a view would keep what was taken back alive.
            left[-1] = left[-1]._replace(states=left[-1].states[:, :, :count].clone())
        self._waiting = left
        if seen < self._observed:
            self.observer.forget(self._observed - seen)
            self._observed = seen

    def select_rows(self, index: torch.Tensor) -> None:
        self._waiting = [q._replace(states=q.states.index_select(0, index)) for q in self._waiting]
        self.observer.select_rows(index)

    def to(self, device: torch.device) -> None:
        self._waiting = [q._replace(states=q.states.to(device)) for q in self._waiting]
        self.observer.to(device)

    def state(self) -> LayerState:
        """The waiting queries, and what the observer knows."""
        state = LayerState(numbers={"observed": self._observed, "num_waiting": len(self._waiting)})
        for index, queries in enumerate(self._waiting):
            state.tensors[f"waiting_{index}"] = queries.states
            state.numbers[f"start_{index}"] = queries.start
        state.put("observer", self.observer.state())
        return state

    def load_state(self, state: LayerState) -> None:
        """Become what gave `state`."""
        self._observed = state.numbers["observed"]
        places = range(state.numbers["num_waiting"])
        self._waiting = [Queries(state.tensors[f"waiting_{i}"], state.numbers[f"start_{i}"]) for i in places]
        self.observer.load_state(state.part("observer"))
