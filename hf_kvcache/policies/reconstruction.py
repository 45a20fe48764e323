"""Reading a prompt once more to see which of its tokens a model needs to repeat it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .base import Held, Queries

# Queries that run at a time. They look at sinks, at their own text in the cache and a little around it, at tokens read
# again right before, and at a sample of the others: what repeating takes, at a cost that is linear in the length.
_QUERIES_AT_A_TIME = 64
_NUM_SINKS = 4
_NUM_BEFORE, _NUM_AFTER = 64, 64  # of the text
_NUM_OWN = 64
_NUM_SAMPLED = 128


class ForwardDone(Exception):
    """Not an error: ends a forward once the last layer's scores are known."""


class Text(NamedTuple):
    """Columns of what is held that queries look at: `num_near` near ones, then others that stand for `each` tokens."""

    columns: torch.Tensor | None  # None for all
    num_near: int
    each: float

    def of(self, state: torch.Tensor) -> torch.Tensor:
        """The part of `[B, Hkv, N, ...]` that is looked at, `[B, Hkv, n, ...]`."""
        return state if self.columns is None else state.index_select(2, self.columns)


class Reconstruction:
    """The most attention that any query of the second reading gave to each held token, float32 `[B, Hkv, n]`.

    Attention weights are in memory for a few queries at a time. Outputs and scores both come from them.

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
        self._later = torch.full((_QUERIES_AT_A_TIME, _QUERIES_AT_A_TIME), -torch.inf, device=held.keys.device).triu_(1)
        self._has_gaps = not bool(held.is_held.all())
        self.most = torch.zeros(held.slots.shape, device=held.slots.device)

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
        rows, heads, length, _ = queries.states.shape
        groups = heads // held.keys.shape[1]
        outputs = queries.states.new_empty(rows, length, heads, held.values.shape[-1])
        for begin in range(0, length, _QUERIES_AT_A_TIME):
            part = queries.states[:, :, begin : begin + _QUERIES_AT_A_TIME]
            count = part.shape[2]
            own = slice(0 if self._looks_at_all else max(0, begin - _NUM_OWN), begin + count)
            text = self._choose(begin, count)
            keys, values = (torch.cat([text.of(t), s[:, :, own]], dim=2) for t, s in zip(held[:2], states, strict=True))
            packed = part.float().mul(held.scaling).unflatten(1, (-1, groups)).flatten(2, 3)
            scores = torch.matmul(packed, keys.float().transpose(-1, -2))
            self._mask(scores.unflatten(2, (groups, count)), held, text, own)
            weights = scores.softmax(dim=-1)
            by_query = weights.unflatten(2, (groups, count))
            if self._is_padding is not None:
                # Queries that are padding may have seen nothing.
                by_query.masked_fill_(self._is_padding[:, None, None, begin : own.stop, None], 0.0)
            output = torch.matmul(weights.to(values.dtype), values).unflatten(2, (groups, count))
            outputs[:, begin : own.stop] = output.flatten(1, 2).transpose(1, 2)
            self.note(by_query[..., : keys.shape[2] - (own.stop - own.start)], text, self._begin + begin)
        if self._is_last:
            raise ForwardDone
        return outputs

    def _choose(self, begin: int, count: int) -> Text:
        """What `count` queries from place `begin` of the chunk on look at."""
        slots, first = self._slots, self._begin + begin
        if self._looks_at_all:
            return Text(None, slots.shape[-1], 1.0)
        is_near = (slots >= first - _NUM_BEFORE) & (slots < first + count + _NUM_AFTER)
        is_near = (is_near | self._are_sinks).flatten(0, 1).any(dim=0)
        near, far = is_near.nonzero().squeeze(1), (~is_near).nonzero().squeeze(1)
        # Another sample for each part, so that every token is looked at from afar too.
        stride = max(1, -(-len(far) // _NUM_SAMPLED))
        sample = far[begin // _QUERIES_AT_A_TIME % stride :: stride]
        return Text(torch.cat([near, sample]), len(near), len(far) / len(sample) if len(sample) else 1.0)

    def _mask(self, scores: torch.Tensor, held: Held, text: Text, own: slice) -> None:
        """Add to scores `[B, Hkv, G, T, n + own]` in place: minus infinity for what is not seen, and log masses.

        They are those of `text`, then of the places `own` of the chunk, the newest `T` of which ask.
        """
        num_own, count = own.stop - own.start, scores.shape[3]
        of_text, of_own = scores[..., :-num_own], scores[..., -num_own:]
        of_own[..., -count:] += self._later[:count, :count]
        # A sample stands for all that is far: without it, what is near would seem to matter more.
        of_text[..., text.num_near :] += math.log(text.each)
        if held.log_mass is not None:
            of_text += text.of(held.log_mass)[:, :, None, None]
        if self._has_gaps:
            of_text.masked_fill_(~text.of(held.is_held)[:, :, None, None], -torch.inf)
        if self._is_padding is not None:
            of_own.masked_fill_(self._is_padding[:, None, None, None, own], -torch.inf)

    def note(self, weights: torch.Tensor, text: Text, begin: int) -> None:
        """Take note of weights `[B, Hkv, Hq / Hkv, T, n]` of `text`, by queries that repeat slots from `begin` on."""
        most = weights.amax(dim=(2, 3))
        most[..., text.num_near :] /= text.each
        if text.columns is not None:
            most = torch.maximum(most, text.of(self.most))
            self.most.index_copy_(2, text.columns, most)
        else:
            self.most = torch.maximum(most, self.most)
