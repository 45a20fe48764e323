"""Attention of one new token over encoded keys and values on CUDA: the Triton kernel's caller.

Reads packed codes where they lie, a group of tokens a time: int8, int4, int2 by the channel or by the token, codebooks
of 2, 3 and 4 bits, float8. The tokens of a row and KV head are split over programs, each with an online softmax of its
own, and the splits are merged by their log-sum-exp. No key or value is written anywhere.
Papers: Dao et al. 2023, Flash-Decoding, https://pytorch.org/blog/flash-decoding; Liu et al. 2024, KIVI,
https://arxiv.org/abs/2402.02750.
Nothing imports this module but who calls it: it needs `triton`, which CUDA builds of torch bring.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from .triton_kernel import decode

# Shared memory for two steps of loads in flight: 80 kB at most, which all GPUs with bfloat16 have.
_STAGES = 2
# Programs a multiprocessor: enough to hide the latency of loads; more splits cost a wider merge.
_PROGRAMS = 4
# Keys or values that a program decodes at once, in the products' dtype: more spill from registers.
_TILE_BYTES = 1 << 14
_MIN_ROWS = 16  # of a matrix product in Triton
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NO_MASK, _BOOLEAN_MASK, _ADDITIVE_MASK = 0, 1, 2

_KEY_PLANES = ("codes", "high", "scale", "zero", "mean")
_VALUE_PLANES = _KEY_PLANES[:4]


def can_serve(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether `attend_coded` takes this query and mask: one token a row, one mask for all heads, no gradients."""
    is_fit = query.is_cuda and query.shape[2] == 1 and query.dtype in _DTYPES and not query.requires_grad
    return is_fit and (mask is None or mask.shape[1:3] == (1, 1))


class Attended(NamedTuple):
    """Attention over some tokens: float32 output `[B, Hq, 1, Dv]`, and the log-sum-exp of the scores `[B, Hq, 1]`."""

    output: torch.Tensor
    logsumexp: torch.Tensor


def attend_coded(
    query: torch.Tensor,
    forms: Sequence[Any],
    planes: Sequence[torch.Tensor],
    block_ids: np.ndarray,
    group_length: int,
    *,
    slot: int = 0,
    scaling: float | None = None,
    mask: torch.Tensor | None = None,
    sinks: tuple[torch.Tensor, int] | None = None,
) -> Attended:
    """Attention of `query` `[B, Hq, 1, D]` over encoded tokens, without the sinks among them.

    Merge it with the attention over sinks and tail by the log-sum-exps.

    Args:
        query: float32, bfloat16 or float16; products are taken in its dtype, sums in float32.
        forms: how the keys and the values are stored (`StoredForm`).
        planes: the codecs' `[Hkv, blocks, *]`, contiguous, those of the keys first; a block is a group of tokens.
        block_ids: int64 `[B, N]`: where each group of each row lies.
        group_length: tokens a group.
        slot: of the first encoded token.
        scaling: of the scores; None: `D ** -0.5`.
        mask: boolean or additive, `[B or 1, 1, 1, slots]`.
        sinks: first slot of each row (int64 `[B]`) and the number of tokens from there that are not seen.
    """
    rows, heads, _, dim = query.shape
    value_dim = forms[1].dim
    kv_heads, num_blocks = planes[0].shape[:2]
    num_groups, num_queries = block_ids.shape[1], heads // kv_heads
    scaled = query.reshape(rows, kv_heads, num_queries, dim).float() * (dim**-0.5 if scaling is None else scaling)
    count = len(forms[0].planes)
    key, value = _store(forms[0], planes[:count], query.device), _store(forms[1], planes[count:], query.device)
    rotated = scaled if key.rotation is None else scaled @ key.rotation.T
    splits, groups_per_split = _split(rows * kv_heads, num_groups, query.device)
    output = scaled.new_empty(rows * kv_heads, splits, num_queries, value_dim)
    logsumexp = scaled.new_empty(rows * kv_heads, splits, num_queries)
    mask_kind, mask, mask_stride = _mask(mask)
    first_slot, num_sinks = (None, 0) if sinks is None else sinks
    decode[(rows * kv_heads, splits)](
        rotated.contiguous(),
        scaled.contiguous(),
        output,
        logsumexp,
        torch.from_numpy(block_ids).to(query.device).contiguous(),
        *(key.planes.get(name) for name in _KEY_PLANES),
        key.table,
        *(value.planes.get(name) for name in _VALUE_PLANES),
        value.table,
        mask,
        mask_stride,
        slot,
        first_slot,
        num_sinks,
        kv_heads,
        num_blocks,
        num_groups,
        groups_per_split,
        QUERIES=num_queries,
        GROUP=group_length,
        DIM=dim,
        VALUE_DIM=value_dim,
        KEY_ELEMENT=forms[0].element,
        KEY_BITS=forms[0].bits,
        KEY_BLOCK=forms[0].block,
        BY_CHANNEL=forms[0].by_channel,
        VALUE_ELEMENT=forms[1].element,
        VALUE_BITS=forms[1].bits,
        VALUE_BLOCK=forms[1].block,
        MASK=mask_kind,
        PADDED_QUERIES=max(_MIN_ROWS, triton.next_power_of_2(num_queries)),
        TOKENS=_tokens_at_once(group_length, max(dim, value_dim), query.dtype),
        num_stages=_STAGES,
        PADDED_DIM=triton.next_power_of_2(dim),
        PADDED_VALUE_DIM=triton.next_power_of_2(value_dim),
        DTYPE=_DTYPES[query.dtype],
    )
    # A row that sees nothing at all has an lse of -inf and an output of 0.
    weights = logsumexp.softmax(dim=1).nan_to_num(0.0)
    merged = (output * weights.unsqueeze(-1)).sum(dim=1)
    if value.rotation is not None:
        merged = merged @ value.rotation
    return Attended(merged.view(rows, heads, 1, value_dim), logsumexp.logsumexp(dim=1).view(rows, heads, 1))


class _Store(NamedTuple):
    planes: dict[str, torch.Tensor]
    table: torch.Tensor | None
    rotation: torch.Tensor | None


def _store(form: Any, planes: Sequence[torch.Tensor], device: torch.device) -> _Store:
    named = dict(zip(form.planes, planes, strict=True))
    if form.element == "float8":
        named["codes"] = named["codes"].view(torch.uint8)
    table, rotation = (None if part is None else _moved(part, device) for part in (form.table, form.rotation))
    return _Store(named, table, rotation)


# Tables and rotations, a few for each codec, go to the device once.
@functools.lru_cache(maxsize=256)
def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device).contiguous()


def _split(programs: int, num_groups: int, device: torch.device) -> tuple[int, int]:
    """Splits of the groups that fill the device, and the groups of each."""
    wanted = max(1, _PROGRAMS * _num_multiprocessors(device) // programs)
    groups = max(1, -(-num_groups // wanted))
    return max(1, -(-num_groups // groups)), groups


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _tokens_at_once(group_length: int, dim: int, dtype: torch.dtype) -> int:
    """Tokens of a group that a program decodes at once."""
    fitting = _TILE_BYTES // (dtype.itemsize * triton.next_power_of_2(dim))
    return max(_MIN_ROWS, min(triton.next_power_of_2(group_length), fitting))


def _mask(mask: torch.Tensor | None) -> tuple[int, torch.Tensor | None, int]:
    if mask is None:
        return _NO_MASK, None, 0
    flat = mask.expand(-1, 1, 1, -1)[:, 0, 0]
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    stride = flat.stride(0) if flat.shape[0] > 1 else 0
    if flat.dtype == torch.bool:
        return _BOOLEAN_MASK, flat.view(torch.uint8), stride
    return _ADDITIVE_MASK, flat, stride
