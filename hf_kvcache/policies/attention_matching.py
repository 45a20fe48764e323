"""Which tokens are worth fitting: those that queries like the ones so far attend to, from where they will stand.

Reference queries are a sample of all queries, without their rotary embedding, turned to the positions to come. Score:
the root of the mean squared attention weight over the query heads of the group. Scores of all heads and layers are
shares of a softmax, so that they share one budget (`KVCache.compress`).
Paper: Zweiger et al. 2026, Attention Matching, https://arxiv.org/abs/2602.16284.
Differs from the paper: the queries are turned; as they stood, most of them saw only what came before a token, and fits
to them were worse than none.
"""

from collections.abc import Callable, Sequence

import torch

from ..layers.layer_state import LayerState
from ..rotary import Rotary
from .base import Held, Observer, Policy, Queries
from .reconstruction import Reconstruction

# Queries a head of a prompt that are remembered, at most.
MOST_QUERIES = 1024
_QUERIES_READ = 512  # of the second reading
# Positions to come at which queries are expected, and a stride that visits each of them once.
_FUTURE_LENGTH, _STRIDE = 512, 197
_QUERIES_AT_A_TIME = 64  # whose weights for all tokens are in memory at once


class ReadAgain(Reconstruction):
    """A second reading that remembers a sample of its queries, which stand at positions to come already."""

    def __init__(self, held: Held, *, is_last: bool):
        super().__init__(held, looks_at_all=True, is_last=is_last)
        self._stride = -(-held.seen // _QUERIES_READ)
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(self, queries: Queries, states: Sequence[torch.Tensor], held: Held) -> torch.Tensor:
        sample = queries.states[:, :, :: self._stride].clone()
        is_real = torch.ones(len(sample), sample.shape[2], dtype=torch.bool, device=sample.device)
        if self._is_padding is not None:
            is_real = ~self._is_padding[:, :: self._stride]
        self._seen.append((sample, is_real))
        return super().attend(queries, states, held)

    @property
    def queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[B, Hq, n, D]`, and which of them are real, bool `[B, n]`."""
        states, is_real = zip(*self._seen, strict=True)
        return torch.cat(states, dim=2), torch.cat(is_real, dim=1)


class References(Observer):
    """Every `stride`-th query so far, `[B, Hq, n, D]`, as it would stand at position 0.

    The stride doubles when more than `MOST_QUERIES` queries were remembered.

    Args:
        rotary: of the layer.
        num_sink_tokens: first tokens of each row, whose queries, which are unlike all others, do not count.
    """

    def __init__(self, rotary: Rotary, num_sink_tokens: int):
        self.rotary = rotary
        self.num_sink_tokens = num_sink_tokens
        self.clear()

    def see(self, queries: Queries, first_slot: torch.Tensor, held: Callable) -> None:
        stop = queries.start + queries.states.shape[2]
        new = torch.arange(queries.start, stop)
        self._thin(MOST_QUERIES, new)
        new = new[new % self.stride == 0]
        states = queries.states[:, :, (new - queries.start).to(queries.states.device)]
        positions = new.to(first_slot.device) - first_slot[:, None]
        states = self.rotary.turn(states.float(), -positions.clamp(min=0)).to(states.dtype)
        self.states = states if self.states is None else torch.cat([self.states, states], dim=2)
        self.slots = torch.cat([self.slots, new])
        self.stop = stop

    def _thin(self, most: int, new: torch.Tensor) -> None:
        """Double the stride until no more than `most` queries are left, with those of the slots `new`."""
        while (torch.cat([self.slots, new]) % self.stride == 0).sum() > most:
            self.stride *= 2
        self._keep(self.slots % self.stride == 0)

    def _keep(self, kept: torch.Tensor) -> None:
        if self.states is not None and not bool(kept.all()):
            self.states = self.states[:, :, kept.to(self.states.device)]
        self.slots = self.slots[kept]

    def expected(self, held: Held) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[B, Hkv, G, n, D]` (float32) at positions to come, and which of them are real, bool `[B, n]`."""
        places = self.slots.to(held.keys.device) - held.first_slot[:, None]  # [B, n]
        positions = (held.seen - held.first_slot)[:, None] + places * _STRIDE % _FUTURE_LENGTH
        states = self.rotary.turn(self.states.float(), positions)
        is_real = places >= self.num_sink_tokens
        if self.read is not None:
            states = torch.cat([states, self.read[0].float()], dim=2)
            is_real = torch.cat([is_real, self.read[1]], dim=1)
        return states.unflatten(1, (held.keys.shape[1], -1)), is_real

    def forget(self, count: int) -> None:
        self.stop -= count
        self._keep(self.slots < self.stop)

    def move(self, old_slots: torch.Tensor, new_slots: torch.Tensor, seen: int) -> None:
        pass  # queries know no columns

    def select_rows(self, index: torch.Tensor) -> None:
        if self.states is not None:
            self.states = self.states.index_select(0, index)

    def to(self, device: torch.device) -> None:
        if self.states is not None:
            self.states = self.states.to(device)

    def clear(self) -> None:
        self.states: torch.Tensor | None = None
        self.read: tuple[torch.Tensor, torch.Tensor] | None = None  # queries of a second reading, until the eviction
        self.slots = torch.zeros(0, dtype=torch.int64)  # on the CPU: how many there are is asked at every step
        self.stride, self.stop = 1, 0

    def state(self) -> LayerState:
        tensors = {} if self.states is None else {"queries": self.states, "slots": self.slots}
        return LayerState(tensors, {"stride": self.stride, "stop": self.stop})

    def load_state(self, state: LayerState) -> None:
        self.stride, self.stop = state.numbers["stride"], state.numbers["stop"]
        if state.tensors:
            self.states, self.slots = state.tensors["queries"], state.tensors["slots"]


class AttentionMatching(Policy):
    """What reference queries attend to stays.

    Args:
        rotary: of the layer.
        num_sink_tokens: first tokens, whose queries do not count.
        needs_reconstruction: whether a second reading of a prompt says what stays of it, as `kvzip`.
    """

    is_incremental = False

    def __init__(self, *, rotary: Rotary, num_sink_tokens: int, needs_reconstruction: bool, chunk_length: int = 2048):
        self.rotary = rotary
        self.num_sink_tokens = num_sink_tokens
        self.needs_reconstruction = needs_reconstruction
        self.chunk_length = chunk_length

    def new_reading(self, held: Held, *, is_last: bool) -> ReadAgain:
        """What the second reading shows in one layer."""
        return ReadAgain(held, is_last=is_last)

    def new_observer(self) -> References:
        return References(self.rotary, self.num_sink_tokens)

    def scores(self, held: Held, observer: References) -> torch.Tensor:
        if observer.states is None:
            return held.slots.float()
        queries, is_real = observer.expected(held)
        keys, is_held = held.keys.float(), held.is_held.unsqueeze(2)
        total = torch.zeros(held.slots.shape, device=keys.device)
        for part, real in zip(
            queries.split(_QUERIES_AT_A_TIME, dim=3), is_real.split(_QUERIES_AT_A_TIME, dim=1), strict=True
        ):
            scores = torch.matmul(part.flatten(2, 3), keys.transpose(-1, -2)).mul_(held.scaling)
            weights = scores.masked_fill_(~is_held, -torch.inf).softmax(dim=-1).nan_to_num_(0.0).square_()
            total += (weights.unflatten(2, (-1, real.shape[1])) * real[:, None, None, :, None]).sum(dim=(2, 3))
        count = is_real.sum(dim=1).clamp(min=1) * queries.shape[2]
        return (total / count[:, None, None]).sqrt_()
