"""Reading a prompt once more to see which of its tokens a model needs to repeat it."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from ..attention import attend_causal, attend_with_logsumexp, merge
from .base import Held, Queries

# Queries that run at a time. They look at sinks, at their own text in the cache and a little around it, at tokens read
# again right before, and at a sample of the others: what repeating takes, at a cost that is linear in the length.
_QUERIES_AT_A_TIME = 128
_NUM_SINKS = 4
_NUM_BEFORE, _NUM_AFTER = 32, 8  # of the text
_NUM_OWN = 64
_NUM_SAMPLED = 128


class ForwardDone(Exception):
    """Not an error: ends a forward once the last layer's scores are known."""


class Reconstruction:
    """The most attention that any query of the second reading gave to each held token, float32 `[B, Hkv, n]`.

    Attention weights are never computed: the highest one of a token is that of its highest score after the query's
    log-sum-exp is taken off, which attention gives anyway.

    Args:
        held: what the layer holds.
        looks_at_all: whether each query attends to everything, and scores it.
        is_last: whether no other layer's scores depend on this one's output.
    """

    def __init__(self, held: Held, *, looks_at_all: bool, is_last: bool):
        self._slots = held.slots
        self._looks_at_all = looks_at_all
        self._are_sinks = held.are_sinks(_NUM_SINKS)
        self._is_last = is_last
        self._scaling = held.scaling
        self._log_most = torch.full(held.slots.shape, -torch.inf, device=held.slots.device)

    @property
    def most(self) -> torch.Tensor:
        return self._log_most.exp()

    def begin_chunk(self, begin: int, is_padding: torch.Tensor | None) -> None:
        """The tokens from slot `begin` on are read next; `is_padding` `[B, T]` of them, None if there is none."""
        self._begin, self._is_padding = begin, is_padding

    def attend(self, queries: Queries, states: Sequence[torch.Tensor], held: Held) -> torch.Tensor:
        """Attention of `queries` to `held` and to their own tokens' keys and values `states`; none is stored.

        Returns:
            `[B, T, Hq, Dv]`.

        Raises:
            ForwardDone: in the last layer.
        """
        outputs = []
        for begin in range(0, queries.states.shape[2], _QUERIES_AT_A_TIME):
            part = queries.states[:, :, begin : begin + _QUERIES_AT_A_TIME]
            count, groups = part.shape[2], part.shape[1] // held.keys.shape[1]
            is_near = self._is_near(self._begin + begin, count)
            near, far = is_near.nonzero().squeeze(1), (~is_near).nonzero().squeeze(1)
            # Another sample for each part, so that every token is looked at from afar too.
            stride = max(1, -(-len(far) // _NUM_SAMPLED))
            sample = far[begin // _QUERIES_AT_A_TIME % stride :: stride]
            text, rest = held.columns(near), held.columns(sample)
            parts = [self._attend_near(part, states, begin), self._attend_earlier(part, states, text, begin)]
            if len(far):
                # It stands for all that is far: without it, what is near would seem to matter more.
                output, logsumexp = _attend_packed(part, rest.keys, rest.values, rest.is_held, rest)
                parts.append((output, logsumexp + math.log(len(far) / len(sample))))
            output, logsumexp = merge(*zip(*parts, strict=True))
            outputs.append(output.to(part.dtype))
            if self._is_padding is not None:
                logsumexp = logsumexp.masked_fill(self._is_padding[:, None, begin : begin + count], torch.inf)
            # One more channel takes the log-sum-exp off: scores come out of the product normalised.
            packed = part.float() * held.scaling
            extended = torch.cat([packed, -logsumexp.unsqueeze(-1)], dim=-1).unflatten(1, (-1, groups)).flatten(2, 3)
            keys = nn.functional.pad(torch.cat([text.keys, rest.keys], dim=2).float(), (0, 1), value=1.0)
            scores = torch.matmul(extended, keys.transpose(-1, -2))
            if held.log_mass is not None:
                scores += torch.cat([text.log_mass, rest.log_mass], dim=2).unsqueeze(2)
            self._columns = torch.cat([near, sample])
            self.note(scores.unflatten(2, (groups, count)), queries.start + begin)
        if self._is_last:
            raise ForwardDone
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _is_near(self, begin: int, count: int) -> torch.Tensor:
        """Columns, bool `[n]`, that queries look at which repeat `count` tokens from slot `begin` on."""
        if self._looks_at_all:
            return torch.ones(self._slots.shape[-1], dtype=torch.bool, device=self._slots.device)
        is_near = (self._slots >= begin - _NUM_BEFORE) & (self._slots < begin + count + _NUM_AFTER)
        return (is_near | self._are_sinks).flatten(0, 1).any(dim=0)

    def _attend_near(
        self, queries: torch.Tensor, states: Sequence[torch.Tensor], begin: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries from place `begin` of the chunk on, to their own tokens."""
        at = slice(begin, begin + queries.shape[2])
        own = [state[:, :, at].repeat_interleave(queries.shape[1] // state.shape[1], dim=1) for state in states]
        padding = None if self._is_padding is None else self._is_padding[:, at]
        return attend_causal(queries, *own, padding, self._scaling)

    def _attend_earlier(
        self, queries: torch.Tensor, states: Sequence[torch.Tensor], text: Held, begin: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries from place `begin` on, to `text` and to own tokens before them."""
        at = slice(0 if self._looks_at_all else max(0, begin - _NUM_OWN), begin)
        is_there = nn.functional.pad(text.is_held, (0, at.stop - at.start), value=True)
        if self._is_padding is not None:
            is_there[..., text.is_held.shape[-1] :] &= ~self._is_padding[:, None, at]
        earlier = [torch.cat([t, s[:, :, at]], dim=2) for t, s in zip(text[:2], states, strict=True)]
        return _attend_packed(queries, *earlier, is_there, text)

    def note(self, scores: torch.Tensor, start: int) -> None:
        """Take note of log weights `[B, Hkv, Hq / Hkv, T, n]` of the tokens seen, by queries from slot `start`."""
        before = self._log_most[..., self._columns]
        self._log_most[..., self._columns] = torch.maximum(before, scores.amax(dim=(2, 3)))


def _attend_packed(queries, keys, values, is_there: torch.Tensor, held: Held) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `[B, Hq, T, D]` to KV heads as they are stored, `held` first, and those that are there, bool `[B, Hkv, n]`."""
    packed = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[-1])
    mask = None if bool(is_there.all()) else is_there.unsqueeze(2)
    if held.log_mass is not None:
        log_mass = nn.functional.pad(held.log_mass, (0, is_there.shape[-1] - held.log_mass.shape[-1]))
        mask = log_mass.masked_fill(~is_there, -torch.inf).unsqueeze(2)
    attended = attend_with_logsumexp(packed, keys, values, mask, held.scaling)
    return tuple(state.reshape(*queries.shape[:3], *state.shape[3:]) for state in attended)
