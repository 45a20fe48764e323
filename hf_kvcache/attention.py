"""Attention over a cache that lies in several pieces: exact merging of partial softmaxes."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Arguments that change the softmax itself; with any of them set, pieces cannot be merged by their log-sum-exp alone.
_SOFTMAX_ARGUMENTS = ("softcap", "s_aux", "position_bias", "output_attentions")


class Piece(NamedTuple):
    """Keys and values `[R, Hkv, T, D]` of the rows `[row, row + R)`, seen by all queries or as `mask` says.

    `mask` is boolean or additive, `[R or 1, 1, Tq, T]`. `query` replaces the queries for this piece where given.
    """

    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    row: int = 0
    query: torch.Tensor | None = None


def can_merge(base: Callable, arguments: dict) -> bool:
    """Whether `base` is plain scaled-dot-product attention, so that pieces can be attended one by one and merged."""
    if base is not sdpa_attention_forward or arguments.get("dropout"):
        return False
    return all(arguments.get(name) is None or arguments[name] is False for name in _SOFTMAX_ARGUMENTS)


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Attention of one query a head, `[B, Hq, 1, D]`, on the KV heads as they are stored: `[B, 1, Hq, Dv]`.

    The query heads of a KV head are the rows of one query matrix, so that keys and values are read once. A mask is one
    for all heads, one for each KV head, or one for each query head.
    """
    rows, heads, _, dim = query.shape
    packed = query.view(rows, key.shape[1], -1, dim)
    if mask is not None and mask.shape[1] == heads != key.shape[1]:
        mask = mask.view(rows, key.shape[1], -1, mask.shape[3])
    output = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, 1, heads, -1)


def attend_merged(
    query: torch.Tensor,
    groups: Iterable[Sequence[Piece]],
    scaling: float | None,
    attended: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> torch.Tensor:
    """Attention of `query` `[B, Hq, Tq, D]` over several groups of pieces; each group covers every row once.

    Each group is attended alone and the outputs are merged exactly by their log-sum-exp (one softmax over all), with
    those of other tokens that a kernel has `attended` to: output `[B, Hq, Tq, Dv]` and log-sum-exp `[B, Hq, Tq]`.

    Returns:
        `[B, Tq, Hq, Dv]`, as transformers' attention functions do.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs, logsumexps = [output for output, _ in attended], [logsumexp for _, logsumexp in attended]
    for group in groups:
        parts = [_attend_piece(query if p.query is None else p.query, p, scale) for p in group]
        outputs.append(parts[0][0] if len(parts) == 1 else torch.cat([out for out, _ in parts]))
        logsumexps.append(parts[0][1] if len(parts) == 1 else torch.cat([lse for _, lse in parts]))
    return merge(outputs, logsumexps)[0].to(query.dtype).transpose(1, 2).contiguous()


def merge(outputs: Sequence[torch.Tensor], logsumexps: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[..., Dv]` of attention to different tokens, and log-sum-exps `[...]` (float32), as of all of them."""
    if len(outputs) == 1:
        return outputs[0], logsumexps[0]
    stacked = torch.stack(logsumexps)
    weights = stacked.softmax(dim=0).nan_to_num(0.0).unsqueeze(-1)
    merged = outputs[0].float() * weights[0]
    for output, weight in zip(outputs[1:], weights[1:], strict=True):
        merged.addcmul_(output.float(), weight)
    return merged, stacked.logsumexp(dim=0)


def _attend_piece(query: torch.Tensor, piece: Piece, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[R, Hq, Tq, Dv]` and log-sum-exp `[R, Hq, Tq]` (float32) of one piece, on its own KV heads."""
    rows, kv_heads, _, _ = piece.key.shape
    query = query[piece.row : piece.row + rows]
    _, heads, length, dim = query.shape
    groups = heads // kv_heads
    packed = query.reshape(rows, kv_heads, groups * length, dim)
    mask = piece.mask
    if mask is not None and groups > 1 and length > 1:
        mask = mask.expand(-1, 1, length, -1).repeat(1, 1, groups, 1)
    key, value = piece.key, piece.value
    is_shared = rows > 1 and key.stride(0) == 0 and mask is None
    if is_shared:
        # One prefix for all rows: read it once, as one taller query matrix.
        packed = packed.transpose(0, 1).reshape(1, kv_heads, rows * groups * length, dim)
        key, value = key[:1], value[:1]
    output, logsumexp = attend_with_logsumexp(packed, key, value, mask, scale)
    if is_shared:
        output = output.view(kv_heads, rows, groups * length, -1).transpose(0, 1)
        logsumexp = logsumexp.view(kv_heads, rows, groups * length).transpose(0, 1)
    return output.reshape(rows, heads, length, -1), logsumexp.reshape(rows, heads, length)


def attend_with_logsumexp(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query rows `[B, Hkv, M, D]` to the KV heads as they are stored, and its log-sum-exp (float32)."""
    if mask is None and query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, False, scale=scale)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    logsumexp = scores.logsumexp(dim=-1)
    # A row that sees nothing here has an lse of -inf: its weight in the merge is 0, its output must stay finite.
    weights = (scores - logsumexp.unsqueeze(-1)).exp().nan_to_num(0.0)
    return torch.matmul(weights.to(value.dtype), value), logsumexp


def few_products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A few query rows `[B, H, M, D]` times many keys `[B, H, n, D]`: `[B, H, M, n]`, float32.

    With the keys on the left, as matrix libraries do not slice long and thin products well along their columns.
    """
    return torch.matmul(key, query.transpose(2, 3)).transpose(2, 3).float().contiguous()
