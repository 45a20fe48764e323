"""Attention of one new token over encoded keys and values on CUDA, decoded in registers: flash-decoding in Triton.

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
    _decode[(rows * kv_heads, splits)](
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
    table = None if form.table is None else _table(form.table, 2**form.bits, device)
    return _Store(named, table, None if form.rotation is None else _moved(form.rotation, device))


# Tables and rotations, a few for each codec, go to the device once.
@functools.lru_cache(maxsize=256)
def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device).contiguous()


@functools.lru_cache(maxsize=256)
def _table(table: torch.Tensor, size: int, device: torch.device) -> torch.Tensor | None:
    """The table on the device, or None if codes stand for themselves."""
    is_identity = table[:size].tolist() == list(range(size))
    return None if is_identity else _moved(table, device)


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


@triton.jit
def _levels(codes, high, table, row, element, keep, ELEMENT: tl.constexpr, BITS: tl.constexpr, LENGTH: tl.constexpr):
    """What the stored elements `element` of rows of `LENGTH` elements stand for, float32, before scale and zero point.

    Byte `j` of a packed row holds the codes `j + s * segment`, the first in its lowest bits (codecs.packing).
    """
    if BITS == 8:
        byte = tl.load(codes + row * LENGTH + element, mask=keep, other=0).to(tl.int32)
        if ELEMENT == "float8":
            # e4m3 moved to the exponent and mantissa of a float32, whose bias is larger by 120; exact.
            magnitude = ((byte & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            levels = tl.where(byte >= 128, -magnitude, magnitude)
        else:
            levels = byte.to(tl.float32)
    else:
        LOW: tl.constexpr = 2 if BITS == 3 else BITS
        SEGMENT: tl.constexpr = LENGTH * LOW // 8
        byte = tl.load(codes + row * SEGMENT + element % SEGMENT, mask=keep, other=0).to(tl.int32)
        code = (byte >> (element // SEGMENT * LOW)) & (2**LOW - 1)
        if BITS == 3:
            HIGH_SEGMENT: tl.constexpr = LENGTH // 8
            third = tl.load(high + row * HIGH_SEGMENT + element % HIGH_SEGMENT, mask=keep, other=0).to(tl.int32)
            code |= ((third >> (element // HIGH_SEGMENT)) & 1) << 2
        levels = code.to(tl.float32) if table is None else tl.load(table + code)
    return levels


@triton.jit
def _by_token(
    codes, high, scale, zero, table, place, token, channel,
    ELEMENT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """`[tokens, channels]` of the group at `place`, stored token by token: decoded, but neither rotated nor moved."""
    keep = (token[:, None] < GROUP) & (channel[None, :] < DIM)
    levels = _levels(
        codes + place * (GROUP * DIM * (2 if BITS == 3 else BITS) // 8),
        None if high is None else high + place * (GROUP * DIM // 8),
        table, token[:, None], channel[None, :], keep, ELEMENT, BITS, DIM
    )  # fmt: skip
    levels *= _ranges(scale + place * (GROUP * (DIM // BLOCK)), token, channel, keep, BLOCK, GROUP, DIM)
    if zero is not None:
        levels += _ranges(zero + place * (GROUP * (DIM // BLOCK)), token, channel, keep, BLOCK, GROUP, DIM)
    return levels


@triton.jit
def _ranges(ranges, token, channel, keep, BLOCK: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Scales or zero points `[tokens, channels / BLOCK]`, float32, in a shape that fits `[tokens, channels]`."""
    BLOCKS: tl.constexpr = DIM // BLOCK
    if BLOCKS == 1:
        found = tl.load(ranges + token, mask=token < GROUP, other=0)[:, None]
    elif BLOCKS & (BLOCKS - 1) == 0 and channel.shape[0] == DIM:
        # Each is loaded once, and handed to the channels of its block.
        index = token[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        once = tl.load(ranges + index, mask=token[:, None] < GROUP, other=0)
        found = tl.broadcast_to(once[:, :, None], [token.shape[0], BLOCKS, BLOCK]).reshape([token.shape[0], DIM])
    else:
        index = token[:, None] * BLOCKS + channel[None, :] // BLOCK
        found = tl.load(ranges + index, mask=keep, other=0)
    return found.to(tl.float32)


@triton.jit
def _decode(
    query, plain, output, logsumexp, ids,
    key_codes, key_high, key_scale, key_zero, key_mean, key_table,
    value_codes, value_high, value_scale, value_zero, value_table,
    mask, mask_stride, begin, first_slot, num_sinks, kv_heads, num_blocks, num_groups, groups_per_split,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_ELEMENT: tl.constexpr, KEY_BITS: tl.constexpr, KEY_BLOCK: tl.constexpr, BY_CHANNEL: tl.constexpr,
    VALUE_ELEMENT: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_BLOCK: tl.constexpr, MASK: tl.constexpr,
    PADDED_QUERIES: tl.constexpr, TOKENS: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    DTYPE: tl.constexpr
):  # fmt: skip
    """One split of the tokens of one row and KV head, for all its query heads."""
    program, split = tl.program_id(0), tl.program_id(1)
    row, head = program // kv_heads, program % kv_heads
    m, c, v = tl.arange(0, PADDED_QUERIES), tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    at_query = (program * QUERIES + m[:, None]) * DIM + c[None, :]
    is_query = (m[:, None] < QUERIES) & (c[None, :] < DIM)
    queries = tl.load(query + at_query, mask=is_query, other=0.0)  # [M, D], float32
    peak = tl.full([PADDED_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_QUERIES], tl.float32)
    mixed = tl.zeros([PADDED_QUERIES, PADDED_VALUE_DIM], tl.float32)

    for group in range(split * groups_per_split, min((split + 1) * groups_per_split, num_groups)):
        place = head.to(tl.int64) * num_blocks + tl.load(ids + row.to(tl.int64) * num_groups + group)
        folded = queries
        bias = tl.zeros([PADDED_QUERIES], tl.float32)
        if BY_CHANNEL:
            # One range a channel: the scale goes into the query, and the zero point is one product, once a group.
            scale = tl.load(key_scale + place * DIM + c, mask=c < DIM, other=0).to(tl.float32)
            zero = tl.load(key_zero + place * DIM + c, mask=c < DIM, other=0).to(tl.float32)
            folded = queries * scale[None, :]
            bias = tl.sum(queries * zero[None, :], 1)
        if key_mean is not None:
            unrotated = tl.load(plain + at_query, mask=is_query, other=0.0)
            mean = tl.load(key_mean + place * DIM + c, mask=c < DIM, other=0).to(tl.float32)
            bias += tl.sum(unrotated * mean[None, :], 1)

        for start in range(0, GROUP, TOKENS):
            token = start + tl.arange(0, TOKENS)
            if BY_CHANNEL:
                codes = key_codes + place * (GROUP * DIM * KEY_BITS // 8)
                keep = (c[:, None] < DIM) & (token[None, :] < GROUP)
                keys = _levels(codes, None, key_table, c[:, None], token[None, :], keep, KEY_ELEMENT, KEY_BITS, GROUP)
            else:
                keys = _by_token(
                    key_codes, key_high, key_scale, key_zero, key_table, place, token, c,
                    KEY_ELEMENT, KEY_BITS, KEY_BLOCK, GROUP, DIM
                ).trans()  # fmt: skip
            scores = tl.dot(folded.to(DTYPE), keys.to(DTYPE), input_precision="ieee") + bias[:, None]

            slot = begin + group * GROUP + token
            seen = token < GROUP
            if MASK == 1:
                seen &= tl.load(mask + row * mask_stride + slot, mask=seen, other=0) != 0
            if MASK == 2:
                scores += tl.load(mask + row * mask_stride + slot, mask=seen, other=0).to(tl.float32)[None, :]
            if first_slot is not None:
                first = tl.load(first_slot + row)
                seen &= (slot < first) | (slot >= first + num_sinks)
            scores = tl.where(seen[None, :], scores, float("-inf"))

            higher = tl.maximum(peak, tl.max(scores, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far: exp(-inf - 0) is 0
            weights = tl.exp(scores - shift[:, None])
            faded = tl.exp(peak - shift)
            values = _by_token(
                value_codes, value_high, value_scale, value_zero, value_table, place, token, v,
                VALUE_ELEMENT, VALUE_BITS, VALUE_BLOCK, GROUP, VALUE_DIM
            )  # fmt: skip
            total = total * faded + tl.sum(weights, 1)
            mixed = mixed * faded[:, None] + tl.dot(weights.to(DTYPE), values.to(DTYPE), input_precision="ieee")
            peak = higher

    is_any = total > 0
    at = (program * tl.num_programs(1) + split) * QUERIES + m
    divisor = tl.where(is_any, total, 1.0)
    tl.store(logsumexp + at, tl.where(is_any, peak + tl.log(divisor), float("-inf")), mask=m < QUERIES)
    is_output = (m[:, None] < QUERIES) & (v[None, :] < VALUE_DIM)
    tl.store(output + at[:, None] * VALUE_DIM + v[None, :], mixed / divisor[:, None], mask=is_output)
