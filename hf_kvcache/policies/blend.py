"""A blend of policies: their scores, each in standard deviations from its mean, are weighed and added.

Policies that look at different things make different mistakes: expected attention at what queries would look for,
KeyDiff and leverage at what is unlike the rest. Where something is asked later, attention's output is off by half as
much as with the best of them, and where text just goes on by no more than with expected attention (SmolLM2, half of the
tokens kept). Scores of attention count by their logarithm. Needs no second pass.
Expected attention weighs 1.5 times as much as each of the two: more loses details, less loses text that goes on.
Ours, after Compactor (https://arxiv.org/abs/2507.08143), which adds leverage to attention; the parts are of their own
papers.
"""

from collections.abc import Callable, Sequence

import torch

from ..layers.layer_state import LayerState
from .base import Held, Observer, Policy, Queries
from .selection import standardize

_LEAST = 1e-12  # attention, of which the logarithm is taken


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
        weights: how much each of them counts.
        num_sink_tokens: first tokens of each row, whose scores are unlike all others and set no standard.
    """

    def __init__(self, scorers: Sequence[Policy], weights: Sequence[float], *, num_sink_tokens: int):
        self.scorers = scorers
        self.weights = weights
        self.num_sink_tokens = num_sink_tokens

    def new_observer(self) -> Observers:
        return Observers([scorer.new_observer() for scorer in self.scorers])

    def scores(self, held: Held, observer: Observers) -> torch.Tensor:
        counts = held.is_held & ~held.are_sinks(self.num_sink_tokens)
        total = torch.zeros(held.slots.shape, device=held.slots.device)
        for scorer, weight, own in zip(self.scorers, self.weights, observer.members, strict=True):
            scores = scorer.scores(held, own)
            if scorer.has_ratios:
                scores = scores.clamp(min=_LEAST).log()
            total += weight * standardize(scores, counts)
        return total
