"""Merging: an evicted token that is nearly a kept one counts there, instead of not at all.

The kept token whose key points the same way takes it in: its value becomes the mean of both, and the logarithm of how
many tokens it stands for is added to its scores, as if all of them were still there with its key. Exact where keys and
values are equal. Sinks take nothing in, and neither do tokens that are still in blocks. Costs a product of the evicted
and the kept keys at each eviction, and four bytes a kept token of each head.
After D2O (Wan et al. 2024, https://arxiv.org/abs/2406.13035), which merges keys and values by weights and leaves the
scores alone; that measured worse than to evict.
"""

import torch
from torch import nn

from .base import Held

_TOKENS_AT_A_TIME = 1024


def merge_evicted(held: Held, keep: torch.Tensor, targets: torch.Tensor, similarity: float) -> Held:
    """`held`, where what is not in `keep` `[B, H, n]` counts in the nearest token of `targets`, a part of `keep`.

    Args:
        similarity: least cosine of the two keys. Tokens that are like no target are evicted as they are.
    """
    directions = nn.functional.normalize(held.keys.float(), dim=-1)
    nearest = torch.zeros_like(held.slots)
    cosine = torch.full(held.slots.shape, -torch.inf, device=held.slots.device)
    for begin in range(0, held.slots.shape[-1], _TOKENS_AT_A_TIME):
        part = slice(begin, begin + _TOKENS_AT_A_TIME)
        likeness = directions[:, :, part] @ directions.transpose(-1, -2)
        cosine[..., part], nearest[..., part] = likeness.masked_fill_(~targets.unsqueeze(2), -torch.inf).max(dim=-1)
    goes = held.is_held & ~keep & (cosine >= similarity)
    nearest = torch.where(goes, nearest, torch.arange(held.slots.shape[-1], device=held.slots.device))
    own = held.mass
    mass = torch.zeros_like(own).scatter_add_(2, nearest, own)
    index = nearest.unsqueeze(-1).expand(held.values.shape)
    weighed = held.values.float() * own.unsqueeze(-1)
    values = torch.zeros_like(weighed).scatter_add_(2, index, weighed) / mass.clamp(min=1e-30).unsqueeze(-1)
    values = torch.where((mass > own).unsqueeze(-1), values.to(held.values.dtype), held.values)
    return held._replace(values=values, log_mass=mass.log())
