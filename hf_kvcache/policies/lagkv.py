"""LagKV: keep tokens whose keys and values vary most, measured against the range of the tokens that follow.

After the sinks, tokens are cut into parts of `lag_length`. A part is normalised, channel by channel, by the minimum and
maximum of the next part; score: softmax over the part of the standard deviation over channels, keys and values added.
Every part loses the same share; the last whole part and what follows it stay. Needs no query.
Paper: Liang et al. 2025, https://arxiv.org/abs/2504.04704.
Differs from the paper: scores are pooled over neighbours (`kernel_size=1` for the paper's): it measured better.
"""

import torch

from .base import Held, Observer, Policy
from .selection import ranks

_STAYS = 2.0  # above every share of a part


class LagKV(Policy):
    """Irregular tokens stay, as many of each part of the text.

    Args:
        lag_length: tokens a part.
        num_sink_tokens: first tokens, which belong to no part.
    """

    def __init__(self, *, lag_length: int, num_sink_tokens: int):
        self.lag_length = lag_length
        self.num_sink_tokens = num_sink_tokens

    def scores(self, held: Held, observer: Observer | None) -> torch.Tensor:
        lag = self.lag_length
        is_held = held.is_held
        # Parts begin at a column; with padding or uneven heads, columns of no token count as constant channels.
        begin = min(self.num_sink_tokens, held.keys.shape[2])
        num_parts = (held.keys.shape[2] - begin) // lag
        scores = torch.full(held.slots.shape, _STAYS, device=held.slots.device)
        if num_parts < 2:
            return held.slots.float()
        stop = begin + num_parts * lag
        total = torch.zeros(())
        is_token = is_held[:, :, begin:stop].unflatten(2, (num_parts, lag)).unsqueeze(-1)
        for states in (held.keys, held.values):
            parts = states[:, :, begin:stop].float().unflatten(2, (num_parts, lag))
            high = parts.masked_fill(~is_token, -torch.inf).amax(dim=3, keepdim=True)
            low = parts.masked_fill(~is_token, torch.inf).amin(dim=3, keepdim=True)
            normal = (parts[:, :, :-1] - low[:, :, 1:]) / (high - low)[:, :, 1:].clamp(min=1e-6)
            deviation = normal.std(dim=-1).masked_fill(~is_token[:, :, :-1, :, 0], -torch.inf)
            total = total + deviation.softmax(dim=-1)
        share = 1 - ranks(total.nan_to_num(0.0)).float() / lag
        scores[:, :, begin : stop - lag] = share.flatten(2)
        return scores
