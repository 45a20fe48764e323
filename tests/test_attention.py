"""Merged partial softmaxes against one softmax over everything."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.eager_paged import eager_paged_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_kvcache.attention import Piece, attend_merged, attend_packed, can_merge
from hf_kvcache.masks import first_visible

pytestmark = pytest.mark.core

ROWS, HEADS, KV_HEADS, DIM = 3, 4, 2, 16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def states(length: int, rows: int = ROWS, dim: int = DIM) -> torch.Tensor:
    return torch.randn(rows, KV_HEADS, length, dim)


def expected(query, key, value, mask=None, scale=None) -> torch.Tensor:
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)


def random_mask(queries: int, length: int) -> torch.Tensor:
    """Boolean, with the last position visible to all and the first row blind to the first third."""
    mask = torch.rand(ROWS, 1, queries, length) < 0.6
    mask[0, ..., : length // 3] = False
    mask[..., -1] = True
    return mask


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masking", ["none", "boolean", "additive"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_pieces_merge_to_one_softmax(queries, masking, scale):
    query, key, value = torch.randn(ROWS, HEADS, queries, DIM), states(63), states(63)
    mask = None if masking == "none" else random_mask(queries, 63)
    reference = expected(query, key, value, mask, scale)
    if masking == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    cuts = [(0, 21), (21, 22), (22, 63)]
    groups = [[Piece(key[:, :, a:b], value[:, :, a:b], None if mask is None else mask[..., a:b])] for a, b in cuts]
    merged = attend_merged(query, groups, scale)
    assert merged.shape == (ROWS, queries, HEADS, DIM)
    assert merged.is_contiguous()
    torch.testing.assert_close(merged, reference)


def test_rows_may_come_in_runs_of_their_own():
    query, key, value = torch.randn(ROWS, HEADS, 1, DIM), states(40), states(40)
    whole = [Piece(key[:, :, :30], value[:, :, :30])]
    rows = [Piece(key[:1, :, 30:], value[:1, :, 30:]), Piece(key[1:, :, 30:], value[1:, :, 30:], row=1)]
    torch.testing.assert_close(attend_merged(query, [whole, rows], None), expected(query, key, value))


def test_a_shared_prefix_is_read_once():
    query, prefix = torch.randn(ROWS, HEADS, 1, DIM), states(30, rows=1).expand(ROWS, -1, -1, -1)
    assert prefix.stride(0) == 0
    own = states(9)
    merged = attend_merged(query, [[Piece(prefix, prefix)], [Piece(own, own)]], None)
    key = torch.cat([prefix, own], 2)
    torch.testing.assert_close(merged, expected(query, key, key))


def test_values_may_have_another_width():
    query, key, value = torch.randn(ROWS, HEADS, 1, DIM), states(40), states(40, dim=24)
    groups = [[Piece(key[:, :, :30], value[:, :, :30])], [Piece(key[:, :, 30:], value[:, :, 30:])]]
    torch.testing.assert_close(attend_merged(query, groups, None), expected(query, key, value))


def test_half_precision_merges_in_float32():
    query, key, value = (t.bfloat16() for t in (torch.randn(ROWS, HEADS, 1, DIM), states(63), states(63)))
    groups = [[Piece(key[:, :, a:b], value[:, :, a:b])] for a, b in ((0, 31), (31, 63))]
    merged = attend_merged(query, groups, None)
    assert merged.dtype == torch.bfloat16
    reference = expected(query.float(), key.float(), value.float())
    torch.testing.assert_close(merged.float(), reference, atol=8e-3, rtol=0.0)  # 2 roundings of values below 1


@pytest.mark.parametrize("masked", [False, True])
def test_packed_heads_equal_repeated_ones(masked):
    query, key, value = torch.randn(ROWS, HEADS, 1, DIM), states(63), states(63)
    mask = random_mask(1, 63) if masked else None
    torch.testing.assert_close(attend_packed(query, key, value, mask, None), expected(query, key, value, mask))


@pytest.mark.parametrize(
    ("arguments", "mergeable"),
    [
        ({}, True),
        ({"dropout": 0.0, "scaling": 0.1, "softcap": None, "output_attentions": False}, True),
        ({"dropout": 0.1}, False),
        ({"softcap": 30.0}, False),
        ({"s_aux": torch.zeros(4)}, False),
        ({"position_bias": torch.zeros(4)}, False),
        ({"output_attentions": True}, False),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_only_a_plain_softmax_is_merged(arguments, mergeable):
    assert can_merge(sdpa_attention_forward, arguments) is mergeable
    assert can_merge(eager_paged_attention_forward, arguments) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_a_kernel_has_attended_to_are_merged(dtype):
    query, key, value = (t.to(dtype) for t in (torch.randn(ROWS, HEADS, 1, DIM), states(63), states(63)))
    wide_key, wide_value = (t[:, :, :40].float().repeat_interleave(HEADS // KV_HEADS, 1) for t in (key, value))
    scores = query.float() @ wide_key.transpose(-1, -2) * DIM**-0.5
    attended = [(scores.softmax(-1) @ wide_value, scores.logsumexp(-1))]
    merged = attend_merged(query, [[Piece(key[:, :, 40:], value[:, :, 40:])]], None, attended)
    assert merged.dtype == dtype
    reference = expected(query.float(), key.float(), value.float())
    torch.testing.assert_close(merged.float(), reference, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


def test_padding_ends_where_any_query_sees_the_first_token():
    """A window mask hides the first tokens from the last queries; they are no padding."""
    causal = torch.ones(6, 6).tril().bool()
    window = causal & ~torch.ones(6, 6).tril(-3).bool()
    padded = window.clone()
    padded[:, :2] = False
    mask = torch.stack([causal, window, padded]).unsqueeze(1)
    assert first_visible(mask, 6, 99).tolist() == [0, 0, 2]
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert first_visible(additive, 6, 99).tolist() == [0, 0, 2]
    assert first_visible(mask[2:, :, :2], 2, 99).tolist() == [99]  # padding only so far
    assert first_visible(None, 6, 99) == 0
