"""What a retention policy is: scores for the tokens a layer holds, and a choice among them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..layers.layer_state import LayerState
from .selection import best_of_each_head


class Held(NamedTuple):
    """The tokens that a layer holds, in the order of their slots, as a policy sees them.

    Heads and rows that hold fewer tokens than others have columns with `is_held` false, and so have padding tokens.

    Attributes:
        keys: `[B, Hkv, n, D]`, rotated to their positions.
        values: `[B, Hkv, n, Dv]`.
        slots: int64 `[B, Hkv, n]`; the place of each token in everything seen, -1 for no token.
        positions: int64 `[B, Hkv, n]`; as slots, or where the keys were turned to since.
        first_slot: int64 `[B]`, the first real token of each row.
        seen: tokens a row that went in, padding included.
        scaling: of the model's attention scores.
        log_mass: float32 `[B, Hkv, n]`, added to the scores of tokens that stand for several (`merging`); None for
            all zero.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    first_slot: torch.Tensor
    seen: int
    scaling: float
    log_mass: torch.Tensor | None = None

    @property
    def mass(self) -> torch.Tensor:
        """How many tokens each one stands for, float32 `[B, Hkv, n]`."""
        return torch.ones_like(self.slots, dtype=torch.float32) if self.log_mass is None else self.log_mass.exp()

    def columns(self, at: slice | torch.Tensor) -> "Held":
        """Some of the tokens."""
        parts = {name: getattr(self, name)[:, :, at] for name in ("keys", "values", "slots", "positions")}
        return self._replace(**parts, log_mass=None if self.log_mass is None else self.log_mass[..., at])

    @property
    def is_held(self) -> torch.Tensor:
        return self.slots >= self.first_slot[:, None, None]

    def are_sinks(self, num_sink_tokens: int) -> torch.Tensor:
        """Whether each token is among the first `num_sink_tokens` real ones of its row, `[B, Hkv, n]`."""
        return self.is_held & (self.slots < self.first_slot[:, None, None] + num_sink_tokens)


class Queries(NamedTuple):
    """Queries `[B, Hq, T, D]` (rotated) of the consecutive slots from `start` on."""

    states: torch.Tensor
    start: int


class Observer(ABC):
    """What a policy remembers of the queries since the last eviction. Never a matrix of attention weights."""

    @abstractmethod
    def see(self, queries: Queries, first_slot: torch.Tensor, held: Callable[[], Sequence[Held]]) -> None:
        """Take note of `queries`.

        Args:
            queries: of consecutive tokens.
            first_slot: int64 `[B]`, the first real token of each row.
            held: what they attended to, up to their own slot, in parts that follow each other.
        """

    @abstractmethod
    def select_rows(self, index: torch.Tensor) -> None: ...

    @abstractmethod
    def to(self, device: torch.device) -> None: ...

    @abstractmethod
    def move(self, old_slots: torch.Tensor, new_slots: torch.Tensor, seen: int) -> None:
        """The layer held the tokens of `old_slots` `[B, Hkv, n]` in this order, and now those of `new_slots`."""

    def end_round(self) -> None:
        """Tokens were evicted. By default, start anew: the queries to come say what matters from now on."""
        self.clear()

    @abstractmethod
    def forget(self, count: int) -> None:
        """The newest `count` tokens that were seen here were taken back."""

    @abstractmethod
    def clear(self) -> None: ...

    @abstractmethod
    def state(self) -> LayerState:
        """Everything remembered, as plain tensors and integers."""

    @abstractmethod
    def load_state(self, state: LayerState) -> None:
        """Become what gave `state`."""


class Policy(ABC):
    """Scores the tokens of one layer. Parameters are those of the paper that its file names."""

    needs_reconstruction = False  # whether scoring takes a second reading of the prompt, which `new_reading` watches
    is_incremental = True  # whether it can evict between the chunks of a prompt
    has_ratios = False  # whether scores are positive and count by their ratios, as attention does

    def new_observer(self) -> Observer | None:
        """What to remember of the queries, or None for a policy that needs keys and values only."""
        return None

    @abstractmethod
    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        """Importance of each held token, higher = keep; float32 `[B, Hkv, n]`."""

    def layer_budget(self, budget: torch.Tensor, limit: torch.Tensor, minimum: int) -> torch.Tensor:
        """Tokens a head that this layer keeps: `budget` `[B]` is the mean over layers, `limit` `[B]` what it holds.

        No layer may keep fewer than `minimum`, the protected ones.
        """
        return budget

    def select(self, scores: torch.Tensor, budget: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Which tokens stay, bool `[B, Hkv, n]`: at most `budget` `[B]` a head, on average over heads.

        `seen` `[B]` are the real tokens of each row so far.
        """
        return best_of_each_head(scores, budget[:, None])
