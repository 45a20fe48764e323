"""Attention over kept tokens in place, when heads and rows hold other numbers of them, and some rows share theirs."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ..attention import attend_with_logsumexp
from ..masks import as_additive, as_mask_for, visible
from .kept_tokens import KeptTokens

# Tokens of all heads decoded at a time where the stored form cannot be multiplied as it is: what comes of so many is
# still in a nearby cache when it is used.
SLICE_LENGTH = 2048


def attend_kept(
    kept: KeptTokens, query: torch.Tensor, mask: torch.Tensor | None, scale: float, rows: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `query` `[B, Hq, Tq, D]` to these tokens alone, row `i` to those of `rows[i]`, read in place.

    Args:
        mask: boolean or additive, `[B or 1, 1, Tq, T]`, a column for each slot.

    Returns:
        Output `[B, Hq, Tq, Dv]` and log-sum-exp `[B, Hq, Tq]` (float32).
    """
    batch, heads, length, dim = query.shape
    groups = heads // kept.num_heads
    own, place, most = _places(rows)
    is_plain = most == 1 and np.array_equal(own, np.arange(kept.num_rows))
    seen = None if mask is None else visible(mask)[:, 0].expand(batch, -1, -1)  # [B, Tq, T]
    packed = query.reshape(batch, kept.num_heads, groups * length, dim)
    if not is_plain:
        # Rows that share their tokens are one taller query matrix, so that no token is copied.
        packed = _spread(packed.transpose(1, 2), own, place, (kept.num_rows, most))  # [R, most, M, H, D]
        packed = packed.flatten(1, 2).transpose(1, 2)
        seen = None if seen is None else _spread(seen, own, place, (kept.num_rows, most)).flatten(1, 2)
    allowed = None
    if seen is not None or kept.has_gaps or kept.log_mass is not None:
        allowed = _allowed(kept, seen, groups, most, length)
        if kept.log_mass is not None:
            mass = kept.log_mass.unsqueeze(1).expand(allowed.shape)
            allowed = mass.masked_fill(~allowed, -torch.inf)
    attend = _attend_even if kept.is_even and kept.is_exact else _attend_groups
    output, logsumexp = attend(kept, packed, allowed, scale)  # [R, H, most * M, Dv], [R, H, most * M]
    if not is_plain:
        at = tuple(torch.from_numpy(i).to(query.device) for i in (own, place))
        output = output.unflatten(2, (most, -1)).transpose(1, 2)[at]
        logsumexp = logsumexp.unflatten(2, (most, -1)).transpose(1, 2)[at]
    return output.reshape(batch, heads, length, -1), logsumexp.reshape(batch, heads, length)


def _allowed(kept: KeptTokens, seen: torch.Tensor | None, groups: int, most: int, length: int) -> torch.Tensor:
    """Which query rows see which token of each group, `[N, most * groups * Tq, 16]` (or `[N, 1, 16]` for all)."""
    is_token = (kept.slots >= 0).unsqueeze(1)
    if seen is None:
        return is_token
    row = kept.owner // kept.num_heads
    own = seen[row].gather(2, kept.slots.clamp(min=0).long().unsqueeze(1).expand(-1, seen.shape[1], -1))
    own = own.unflatten(1, (most, length)).unsqueeze(2).expand(-1, -1, groups, -1, -1)
    return own.flatten(1, 3) & is_token


def _attend_even(kept: KeptTokens, packed, allowed, scale):
    keys, values = kept.padded(np.arange(kept.num_rows))
    if allowed is not None:
        allowed = allowed.unflatten(0, (*packed.shape[:2], -1)).transpose(2, 3).flatten(3)  # [R, H, M, n]
    return attend_with_logsumexp(packed, keys, values, allowed, scale)


def _attend_groups(kept: KeptTokens, packed, allowed, scale):
    """Batched products over the groups of all heads, and a softmax over those that belong together."""
    owner, queries = kept.owner, packed.flatten(0, 1)
    shape = (*queries.shape[:2], kept.shapes[1].dim)
    output = torch.zeros(shape, device=packed.device)
    total = torch.zeros(shape[:2], device=packed.device)
    highest = torch.full(shape[:2], -torch.inf, device=packed.device)
    step = len(owner) if kept.is_exact else max(1, SLICE_LENGTH // kept.group_length)
    for start in range(0, len(owner), step):
        part = slice(start, start + step)
        own = owner[part]
        keys, values = kept.decoded(start, min(start + step, len(owner)))
        scores = torch.bmm(queries[own], keys.transpose(1, 2)).float().mul_(scale)  # [n, M, G]
        if allowed is not None:
            own_mask = allowed[part]
            scores = scores.masked_fill_(~own_mask, -torch.inf) if own_mask.dtype == torch.bool else scores + own_mask
        index = own[:, None].expand(-1, scores.shape[1])
        raised = highest.scatter_reduce(0, index, scores.amax(dim=-1), "amax")
        base = raised.masked_fill(raised == -torch.inf, 0.0)
        shrink = (highest - base).exp_()
        weights = scores.sub_(base[own].unsqueeze(-1)).exp_()
        total = (total * shrink).index_add_(0, own, weights.sum(dim=-1))
        summed = torch.bmm(weights.to(values.dtype), values).float()  # [n, M, Dv]
        output = (output * shrink.unsqueeze(-1)).index_add_(0, own, summed)
        highest = raised
    output = (output / total.unsqueeze(-1)).nan_to_num(0.0).to(packed.dtype)
    logsumexp = highest + total.log()
    return output.unflatten(0, packed.shape[:2]), logsumexp.unflatten(0, packed.shape[:2])


def _places(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """For each row that reads `rows[i]`: `rows[i]`, its place among those that read the same, and the most that do."""
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], rows[order])
    place = np.empty_like(rows)
    place[order] = np.arange(len(rows)) - starts
    return rows, place, int(place.max()) + 1


def _spread(states: torch.Tensor, own: np.ndarray, place: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """`[B, ...]` to `[R, most, ...]`: row `i` at `(own[i], place[i])`, zeros elsewhere."""
    spread = states.new_zeros(*size, *states.shape[1:])
    spread[torch.from_numpy(own).to(states.device), torch.from_numpy(place).to(states.device)] = states
    return spread


def join_kept(
    name: str,
    module: nn.Module,
    query: torch.Tensor,
    kept: Sequence[torch.Tensor],
    log_mass: torch.Tensor | None,
    tail: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Kept tokens (keys, values, slots) and newer ones as plain keys and values, and a mask a head, for any attention.

    Raises:
        NotImplementedError: if heads keep other numbers of tokens and the model's attention takes no mask.
    """
    *states, slots = kept
    joined = [torch.cat(pair, dim=2) for pair in zip(states, tail, strict=True)]
    if mask is None and log_mass is None and not bool((slots < 0).any()):
        return joined, None
    implementation = module.config._attn_implementation
    if "flash" in implementation:
        raise NotImplementedError(
            f"{name} keeps other tokens for each head, which attn_implementation={implementation!r} cannot mask: load "
            "the model with attn_implementation='sdpa' or 'eager'."
        )
    rows, kv_heads = slots.shape[:2]
    heads, length, tail_length = query.shape[1], query.shape[2], tail[0].shape[2]
    allowed = (slots >= 0).unsqueeze(2)  # [B, Hkv, 1, w]
    if mask is None:
        own = torch.ones((1, 1, 1, tail_length), dtype=torch.bool, device=query.device)
        own = as_mask_for(module, own, query.dtype)
    else:
        index = slots.clamp(min=0).unsqueeze(2).expand(-1, -1, length, -1)
        allowed = visible(mask).expand(rows, kv_heads, -1, -1).gather(-1, index) & allowed
        own = mask[..., mask.shape[-1] - tail_length :]
    own_kept = as_mask_for(module, allowed.repeat_interleave(heads // kv_heads, dim=1), query.dtype)
    shape = (rows, heads, length, -1)
    if log_mass is not None:
        own_kept, own = (as_additive(part, query.dtype) for part in (own_kept, own))
        own_kept = own_kept + log_mass.repeat_interleave(heads // kv_heads, dim=1).unsqueeze(2).to(query.dtype)
    return joined, torch.cat([own_kept.expand(shape), own.expand(shape)], dim=-1)
