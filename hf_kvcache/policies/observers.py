"""What policies remember of queries: the last ones, their mean and covariance, or the attention each token received."""

from collections.abc import Callable, Sequence

import torch

from ..layers.layer_state import LayerState
from ..rotary import Rotary
from .base import Held, Observer, Queries

_MOMENTS = ("count", "total", "squares")
# Attention weights exist for so many queries at a time.
_QUERIES_AT_A_TIME = 256


def attention_weights(queries: Queries, *parts: Held) -> torch.Tensor:
    """Softmax of `queries` over the held tokens up to their own slot: float32 `[B, Hkv, Hq / Hkv, T, n]`.

    Args:
        queries: of consecutive tokens. One of a padding token, which sees nothing, gives zeros.
        parts: what is held, `n` tokens together; read where they lie.
    """
    rows, heads, count, _ = queries.states.shape
    kv_heads, first_slot = parts[0].keys.shape[1], parts[0].first_slot
    packed = queries.states.reshape(rows, kv_heads, -1, queries.states.shape[-1])
    own_slot = torch.arange(queries.start, queries.start + count, device=first_slot.device)
    scores = []
    for held in parts:
        logits = torch.matmul(packed, held.keys.transpose(-1, -2)).float().mul_(held.scaling)
        if held.log_mass is not None:
            logits += held.log_mass.unsqueeze(2)
        seen = held.is_held.unsqueeze(2) & (held.slots.unsqueeze(2) <= own_slot[:, None])  # [B, Hkv, T, n]
        logits = logits.unflatten(2, (heads // kv_heads, count))
        scores.append(logits.masked_fill_(~seen.unsqueeze(2), -torch.inf))
    weights = torch.cat(scores, dim=-1).softmax(dim=-1)
    is_real = own_slot >= first_slot[:, None]  # [B, T]
    return weights.masked_fill_(~is_real[:, None, None, :, None], 0.0)


class QueryWindow(Observer):
    """The last `length` queries, `[B, Hq, length, D]`."""

    def __init__(self, length: int):
        self.length = length
        self.clear()

    def see(self, queries: Queries, first_slot: torch.Tensor, held: Callable[[], Sequence[Held]]) -> None:
        new, start = queries.states[:, :, -self.length :], queries.start + queries.states.shape[2]
        if self.queries is not None and new.shape[2] < self.length:
            older = self.queries.states[:, :, new.shape[2] - self.length :]
            new = torch.cat([older, new], dim=2)
        # A copy: a view would keep all queries of the prompt alive.
        self.queries = Queries(new.clone(), start - new.shape[2])

    def move(self, old_slots: torch.Tensor, new_slots: torch.Tensor, seen: int) -> None:
        pass  # queries know no columns

    def select_rows(self, index: torch.Tensor) -> None:
        if self.queries is not None:
            self.queries = self.queries._replace(states=self.queries.states.index_select(0, index))

    def to(self, device: torch.device) -> None:
        if self.queries is not None:
            self.queries = self.queries._replace(states=self.queries.states.to(device))

    def forget(self, count: int) -> None:
        if self.queries is not None:
            states, start = self.queries
            self.queries = Queries(states[:, :, : max(0, states.shape[2] - count)].clone(), start)

    def clear(self) -> None:
        self.queries: Queries | None = None

    def state(self) -> LayerState:
        if self.queries is None:
            return LayerState()
        return LayerState({"queries": self.queries.states}, {"start": self.queries.start})

    def load_state(self, state: LayerState) -> None:
        if state.tensors:
            self.queries = Queries(state.tensors["queries"], state.numbers["start"])


class QueryMoments(Observer):
    """Mean and covariance of the queries before rotary embedding, without those of the sinks.

    Where the first queries are no more than channels, as after an eviction while decoding, only the variance of each
    channel is remembered: a covariance would take `D / 2` tokens' keys and values for every query head.

    Args:
        rotary: of the layer.
        num_sink_tokens: first tokens of each row whose queries, which are unlike all others, do not count.
    """

    def __init__(self, rotary: Rotary, num_sink_tokens: int):
        self.rotary = rotary
        self.num_sink_tokens = num_sink_tokens
        self.clear()

    def see(self, queries: Queries, first_slot: torch.Tensor, held: Callable[[], Sequence[Held]]) -> None:
        states, start = queries
        slots = torch.arange(start, start + states.shape[2], device=states.device)
        positions = slots - first_slot[:, None]  # [B, T]
        flat = self.rotary.turn(states.float(), -positions.clamp(min=0))
        weight = (positions >= self.num_sink_tokens).float()[:, None, :, None]
        flat = flat * weight
        count, total = weight.sum(dim=2, keepdim=True), flat.sum(dim=2, keepdim=True)
        if self._is_diagonal or (self._sums is None and states.shape[2] <= states.shape[3]):
            squares = flat.square().sum(dim=2, keepdim=True)
        else:
            squares = flat.transpose(-1, -2) @ flat
        added = (count, total, squares)
        self._sums = added if self._sums is None else tuple(a + b for a, b in zip(self._sums, added, strict=True))

    @property
    def _is_diagonal(self) -> bool:
        return self._sums is not None and self._sums[2].shape[2] == 1

    def moments(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Mean `[B, Hq, 1, D]`, and covariance `[B, Hq, D, D]` or variance `[B, Hq, 1, D]`; None before any query."""
        if self._sums is None:
            return None
        count, total, squares = self._sums
        mean = total / count.clamp(min=1.0)
        outer = mean.square() if self._is_diagonal else mean.transpose(-1, -2) @ mean
        return mean, squares / count.clamp(min=1.0) - outer

    def forget(self, count: int) -> None:
        pass  # what a few queries added to the mean stays

    def move(self, old_slots: torch.Tensor, new_slots: torch.Tensor, seen: int) -> None:
        pass  # neither do their moments

    def select_rows(self, index: torch.Tensor) -> None:
        if self._sums is not None:
            self._sums = tuple(part.index_select(0, index) for part in self._sums)

    def to(self, device: torch.device) -> None:
        if self._sums is not None:
            self._sums = tuple(part.to(device) for part in self._sums)

    def clear(self) -> None:
        self._sums: tuple[torch.Tensor, ...] | None = None

    def state(self) -> LayerState:
        return LayerState({} if self._sums is None else dict(zip(_MOMENTS, self._sums, strict=True)))

    def load_state(self, state: LayerState) -> None:
        if state.tensors:
            self._sums = tuple(state.tensors[name] for name in _MOMENTS)


class AttentionSums(Observer):
    """The attention that each held token has received from all queries so far, float32 `[B, Hkv, n]`."""

    def __init__(self):
        self.clear()

    def see(self, queries: Queries, first_slot: torch.Tensor, held: Callable[[], Sequence[Held]]) -> None:
        parts = held()
        sums = self._sums_of(sum(part.slots.shape[-1] for part in parts), like=parts[0].slots)
        for begin in range(0, queries.states.shape[2], _QUERIES_AT_A_TIME):
            part = queries.states[:, :, begin : begin + _QUERIES_AT_A_TIME]
            sums += attention_weights(Queries(part, queries.start + begin), *parts).sum(dim=(2, 3))
        self._sums = sums

    def aligned(self, held: Held) -> torch.Tensor:
        """The sums, with zeros for the tokens that came after the last queries seen."""
        return self._sums_of(held.slots.shape[-1], like=held.slots)

    def _sums_of(self, count: int, like: torch.Tensor) -> torch.Tensor:
        sums = like.new_zeros((*like.shape[:2], count), dtype=torch.float32)
        if self._sums is not None:
            sums[..., : self._sums.shape[-1]] = self._sums
        return sums

    def move(self, old_slots: torch.Tensor, new_slots: torch.Tensor, seen: int) -> None:
        if self._sums is None:
            return
        # By slot, for a moment; a column without a token is the slot after the last.
        by_slot = self._sums.new_zeros(*old_slots.shape[:2], seen + 1)
        known = old_slots[..., : self._sums.shape[-1]]
        by_slot.scatter_(2, known.where(known >= 0, seen), self._sums)
        self._sums = by_slot.gather(2, new_slots.where(new_slots >= 0, seen)).masked_fill(new_slots < 0, 0.0)

    def end_round(self) -> None:
        pass  # heavy hitters of all time

    def forget(self, count: int) -> None:
        # What their queries gave to other tokens stays.
        if self._sums is not None:
            self._sums = self._sums[..., : max(0, self._sums.shape[-1] - count)].clone()

    def select_rows(self, index: torch.Tensor) -> None:
        if self._sums is not None:
            self._sums = self._sums.index_select(0, index)

    def to(self, device: torch.device) -> None:
        if self._sums is not None:
            self._sums = self._sums.to(device)

    def clear(self) -> None:
        self._sums: torch.Tensor | None = None

    def state(self) -> LayerState:
        return LayerState({} if self._sums is None else {"sums": self._sums})

    def load_state(self, state: LayerState) -> None:
        self._sums = state.tensors.get("sums")
