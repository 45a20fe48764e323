"""Flash-decoding over encoded tokens in Triton: what one program does with its split of a row and KV head.

Packed codes are read where they lie and decoded in registers, a tile of tokens at a time, under an online softmax. No
key or value is written anywhere. `triton_decode` calls it.
Papers: Dao et al. 2023, Flash-Decoding, https://pytorch.org/blog/flash-decoding; Liu et al. 2024, KIVI,
https://arxiv.org/abs/2402.02750 (the scale of a channel is folded into the query).
"""

import triton
import triton.language as tl


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
def decode(
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
