"""Expected attention: keep the tokens that queries to come are expected to attend to.

Queries before rotary embedding are taken as normal with the mean and covariance of those so far, and turned to the
next `num_future_tokens` positions. Score: `E[exp(q k / sqrt(D))] = exp(mu k s + k' Sigma k s^2 / 2)`, normalised over
the tokens; plus `epsilon`, times `|v|`, averaged over the query heads of the group.
Knows nothing of a question that comes later, and needs no second pass: among the best of that kind here.
Paper: Devoto et al. 2025, https://arxiv.org/abs/2510.00636.
Differs from the paper: `epsilon`, and scores are pooled over neighbours (0 and `kernel_size=1` for the paper's): both
measured far better. While decoding, channels are taken as independent: a covariance takes much memory.
"""

import torch

from ..rotary import Rotary
from .base import Held, Policy
from .observers import QueryMoments


class ExpectedAttention(Policy):
    """What queries like those so far would look at stays.

    Args:
        rotary: of the layer.
        num_future_tokens: positions that queries are expected at.
        num_sink_tokens: first tokens, whose queries do not count.
        epsilon: added to each score before it is weighted by the value's norm.
    """

    has_ratios = True

    def __init__(self, *, rotary: Rotary, num_future_tokens: int, num_sink_tokens: int, epsilon: float):
        self.rotary = rotary
        self.num_future_tokens = num_future_tokens
        self.num_sink_tokens = num_sink_tokens
        self.epsilon = epsilon

    def new_observer(self) -> QueryMoments:
        return QueryMoments(self.rotary, self.num_sink_tokens)

    def scores(self, held: Held, observer: QueryMoments) -> torch.Tensor:
        moments = observer.moments()
        if moments is None:
            return held.slots.float()
        mean, covariance = moments
        kv_heads = held.keys.shape[1]
        groups = mean.shape[1] // kv_heads
        # Keys are turned back instead of queries forward: once for all query heads.
        keys = held.keys.float() @ self._mean_turn(held).unsqueeze(1).transpose(-1, -2)
        is_diagonal = covariance.shape[2] == 1
        squares = keys.square() if is_diagonal else None
        logits = keys.new_zeros(len(keys), kv_heads, groups, keys.shape[2])
        for head in range(groups):  # query heads of a group, a few: the products of all at once would be as many keys
            own, spread = mean[:, head::groups], covariance[:, head::groups]
            along = keys @ own.transpose(-1, -2)  # [B, Hkv, n, 1]
            if is_diagonal:
                around = squares @ spread.transpose(-1, -2)
            else:
                around = ((keys @ spread) * keys).sum(dim=-1, keepdim=True)
            logits[:, :, head] = (along * held.scaling + around * (held.scaling**2 / 2)).squeeze(-1)
        if held.log_mass is not None:
            logits += held.log_mass.unsqueeze(2)
        logits.masked_fill_(~held.is_held.unsqueeze(2), -torch.inf)
        expected = logits.softmax(dim=-1).mean(dim=2)
        return (expected + self.epsilon) * held.values.float().norm(dim=-1)

    def _mean_turn(self, held: Held) -> torch.Tensor:
        """The mean rotation to the positions to come, as a matrix for row vectors, `[B, D, D]`."""
        dim = held.keys.shape[-1]
        ahead = torch.arange(self.num_future_tokens, device=held.keys.device)
        positions = (held.seen - held.first_slot)[:, None] + ahead  # [B, F]
        basis = torch.eye(dim, device=held.keys.device)[None, :, None].expand(len(positions), -1, len(ahead), -1)
        return self.rotary.turn(basis, positions).mean(dim=2)
