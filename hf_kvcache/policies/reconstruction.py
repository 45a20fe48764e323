"""Reading a prompt once more to see which of its tokens a model needs to repeat it."""

from collections.abc import Sequence

import torch

from ..attention import attend_causal, attend_with_logsumexp
from .base import Held, Queries

# Queries that run at a time: their scores for the tokens they see are in memory once.
_QUERIES_AT_A_TIME = 256
# What a chunk sees beside its own text: the first tokens, which all queries look at, and those right before it.
_NUM_SINKS = 4
_NUM_BEFORE = 32


class ForwardDone(Exception):
    """Not an error: ends a forward once the last layer's scores are known."""


class Reconstruction:
    """The most attention that any query of the second reading gave to each held token, float32 `[B, Hkv, n]`.

    A chunk that is read again attends to its own text in the cache, not to everything: the cost is linear in the length
    of the prompt. Attention weights are never computed: the highest one of a token is that of its highest score after
    the query's log-sum-exp is taken off, which attention gives anyway.

    Args:
        held: what the layer holds.
        is_last: whether no other layer's scores depend on this one's output.
    """

    def __init__(self, held: Held, *, is_last: bool = False):
        self._slots = held.slots
        self._are_sinks = held.are_sinks(_NUM_SINKS)
        self._is_last = is_last
        self._log_most = torch.full(held.slots.shape, -torch.inf, device=held.slots.device)

    @property
    def most(self) -> torch.Tensor:
        return self._log_most.exp()

    def begin_chunk(self, begin: int, stop: int, is_padding: torch.Tensor | None) -> None:
        """The tokens of slots `begin` to `stop` are read next; `is_padding` `[B, T]` of them, None if there is none."""
        is_near = (self._slots >= begin - _NUM_BEFORE) & (self._slots < stop) | self._are_sinks
        self._columns = is_near.flatten(0, 1).any(dim=0).nonzero().squeeze(1)
        self._is_padding = is_padding

    def attend(self, queries: Queries, states: Sequence[torch.Tensor], held: Held) -> torch.Tensor:
        """Attention of `queries` to their text in `held` and to their own tokens' `states`; none is stored.

        Returns:
            `[B, T, Hq, Dv]`.

        Raises:
            ForwardDone: in the last layer.
        """
        held = Held(*(state.index_select(2, self._columns) for state in held[:4]), *held[4:])
        groups = queries.states.shape[1] // held.keys.shape[1]
        own = [state.repeat_interleave(groups, dim=1) for state in states]
        near = attend_causal(queries.states, *own, self._is_padding, held.scaling)
        is_held = None if bool(held.is_held.all()) else held.is_held.unsqueeze(2)
        # One more channel takes the log-sum-exp off: scores come out of the product normalised.
        keys = torch.cat([held.keys.float(), torch.ones_like(held.keys[..., :1], dtype=torch.float32)], dim=-1)
        outputs = []
        for begin in range(0, queries.states.shape[2], _QUERIES_AT_A_TIME):
            part = queries.states[:, :, begin : begin + _QUERIES_AT_A_TIME]
            count = part.shape[2]
            packed = part.reshape(len(part), held.keys.shape[1], groups * count, -1)
            output, logsumexp = attend_with_logsumexp(packed, held.keys, held.values, is_held, held.scaling)
            output, logsumexp = output.reshape(*part.shape[:3], -1), logsumexp.reshape(part.shape[:3])
            near_output, near_logsumexp = (state[:, :, begin : begin + count] for state in near)
            whole = torch.logaddexp(logsumexp, near_logsumexp)
            weights = (logsumexp - whole).exp().unsqueeze(-1).to(output.dtype)
            outputs.append(torch.lerp(near_output, output, weights).nan_to_num_(0.0))
            if self._is_padding is not None:
                whole = whole.masked_fill(self._is_padding[:, None, begin : begin + count], torch.inf)
            extended = torch.cat([packed.float() * held.scaling, -whole.reshape(*packed.shape[:3], 1)], dim=-1)
            scores = torch.matmul(extended, keys.transpose(-1, -2)).unflatten(2, (groups, count))
            self.note(scores, queries.start + begin)
        if self._is_last:
            raise ForwardDone
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def note(self, scores: torch.Tensor, start: int) -> None:
        """Take note of log weights `[B, Hkv, Hq / Hkv, T, n]` of the tokens seen, by queries from slot `start`."""
        before = self._log_most[..., self._columns]
        self._log_most[..., self._columns] = torch.maximum(before, scores.amax(dim=(2, 3)))
