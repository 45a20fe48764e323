"""Attention masks in the forms that transformers' attention functions take: boolean, additive (eager), or none."""

from collections.abc import Sequence

import torch
from torch import nn


def visible(mask: torch.Tensor) -> torch.Tensor:
    """The boolean form of an attention mask that is boolean or additive."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def as_float32(mask: torch.Tensor) -> torch.Tensor:
    """The same mask, boolean or additive in float32: what the smallest number of a narrower type hides stays hidden."""
    if mask.dtype in (torch.bool, torch.float32):
        return mask
    return mask.float().masked_fill_(~visible(mask), torch.finfo(torch.float32).min)


def first_visible(mask: torch.Tensor | None, length: int, otherwise: int) -> torch.Tensor | int:
    """First of the `length` columns that any query of each row may see, int64 `[B]`: where its padding ends.

    Any query, not the last: a mask may be a window, which the first tokens have left by then.
    """
    if mask is None:
        return 0
    seen = visible(mask)[:, 0, :, :length].any(dim=1)
    return torch.where(seen.any(-1), seen.int().argmax(-1), otherwise)


def as_mask_for(module: nn.Module, allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask in the form that the model's attention function takes: additive for eager, boolean else."""
    if module.config._attn_implementation != "eager":
        return allowed
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def as_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive form of a mask that is boolean or additive."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def restrict_mask(
    module: nn.Module, mask: torch.Tensor | None, allowed: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`mask`, of the model's own form or None, further restricted to the boolean `allowed`."""
    if mask is None:
        return as_mask_for(module, allowed, dtype)
    if mask.dtype == torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)


def join_masks(
    module: nn.Module, query: torch.Tensor, masks: Sequence[torch.Tensor | None], lengths: Sequence[int]
) -> torch.Tensor | None:
    """The masks of consecutive pieces of `lengths` tokens as one; None stands for all visible."""
    if all(mask is None for mask in masks):
        return None
    shape = (query.shape[0], 1, query.shape[2])
    whole = [torch.ones((*shape, length), dtype=torch.bool, device=query.device) for length in lengths]
    joined = [
        as_mask_for(module, everything, query.dtype) if mask is None else mask.expand(*shape, -1)
        for mask, everything in zip(masks, whole, strict=True)
    ]
    return torch.cat(joined, dim=-1)
