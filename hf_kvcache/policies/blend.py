"""A blend of policies: tokens are ranked by each of them, and their ranks are added (a Borda count).

Policies that look at different things make different mistakes: expected attention at what queries would look for,
KeyDiff at what is unlike the rest. Together they kept more of what is asked later than either on essays, and about as
much as expected attention on technical prose. Needs no second pass. Ours; the parts are of their own papers.
"""

from collections.abc import Callable, Sequence

import torch

from ..layer_state import LayerState
from .base import Held, Observer, Policy, Queries
from .selection import ranks


class Observers(Observer):
    """The observers of several policies, each of which may have none."""

    def __init__(self, members: Sequence[Observer | None]):
        self.members = members

    def see(self, queries: Queries, first_slot: torch.Tensor, held: Callable[[], Sequence[Held]]) -> None:
        for member in self._present:
            member.see(queries, first_slot, held)

    def move(self, old_slots: torch.Tensor, new_slots: torch.Tensor, seen: int) -> None:
        for member in self._present:
            member.move(old_slots, new_slots, seen)

    def end_round(self) -> None:
        for member in self._present:
            member.end_round()

    def forget(self, count: int) -> None:
        for member in self._present:
            member.forget(count)

    def select_rows(self, index: torch.Tensor) -> None:
        for member in self._present:
            member.select_rows(index)

    def to(self, device: torch.device) -> None:
        for member in self._present:
            member.to(device)

    def clear(self) -> None:
        for member in self._present:
            member.clear()

    def state(self) -> LayerState:
        state = LayerState()
        for index, member in enumerate(self._present):
            state.put(str(index), member.state())
        return state

    def load_state(self, state: LayerState) -> None:
        for index, member in enumerate(self._present):
            member.load_state(state.part(str(index)))

    @property
    def _present(self) -> list[Observer]:
        return [member for member in self.members if member is not None]


class Blend(Policy):
    """What several policies agree on stays.

    Args:
        scorers: policies that score tokens, at least one.
    """

    def __init__(self, scorers: Sequence[Policy]):
        self.scorers = scorers

    def new_observer(self) -> Observers:
        return Observers([scorer.new_observer() for scorer in self.scorers])

    def scores(self, held: Held, observer: Observers) -> torch.Tensor:
        total = torch.zeros(held.slots.shape, device=held.slots.device)
        for scorer, own in zip(self.scorers, observer.members, strict=True):
            total -= ranks(scorer.scores(held, own).masked_fill(~held.is_held, -torch.inf))
        return total
