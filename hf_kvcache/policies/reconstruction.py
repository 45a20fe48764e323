"""Reading a prompt once more to see which of its tokens a model needs to repeat it."""

from collections.abc import Sequence

import torch

from ..attention import attend_causal, attend_with_logsumexp
from .base import Held, Queries

# Queries that run at a time: their scores for all held tokens are in memory once.
_QUERIES_AT_A_TIME = 256


class Reconstruction:
    """The most attention that any query of the second reading gave to each held token, float32 `[B, Hkv, n]`.

    Attention weights are never computed: the highest one of a token is that of its highest score after the query's
    log-sum-exp is taken off, which attention gives anyway.
    """

    def __init__(self, held: Held):
        self._log_most = torch.full(held.slots.shape, -torch.inf, device=held.slots.device)
        self.is_padding: torch.Tensor | None = None  # of the tokens that are read next, `[B, T]`; None if there is none

    @property
    def most(self) -> torch.Tensor:
        return self._log_most.exp()

    def attend(self, queries: Queries, states: Sequence[torch.Tensor], held: Held) -> torch.Tensor:
        """Attention of `queries` to everything held and to their own tokens' keys and values `states`; none is stored.

        Returns:
            `[B, T, Hq, Dv]`.
        """
        groups = queries.states.shape[1] // held.keys.shape[1]
        own = [state.repeat_interleave(groups, dim=1) for state in states]
        near = attend_causal(queries.states, *own, self.is_padding, held.scaling)
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
            outputs.append((output * weights + near_output * (1 - weights)).nan_to_num(0.0))
            if self.is_padding is not None:
                whole = whole.masked_fill(self.is_padding[:, None, begin : begin + count], torch.inf)
            extended = torch.cat([packed.float() * held.scaling, -whole.reshape(*packed.shape[:3], 1)], dim=-1)
            scores = torch.matmul(extended, keys.transpose(-1, -2)).unflatten(2, (groups, count))
            self.note(scores, queries.start + begin)
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def note(self, scores: torch.Tensor, start: int) -> None:
        """Take note of log weights `[B, Hkv, Hq / Hkv, T, n]` of the held tokens, by queries from slot `start`."""
        self._log_most = torch.maximum(self._log_most, scores.amax(dim=(2, 3)))
