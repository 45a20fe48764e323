"""The decode kernel against one softmax over the decoded tokens, for every codec, dtype, mask and layout of memory."""

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_kvcache.codecs.base import Shape
from hf_kvcache.codecs.bnb import BitsAndBytesCodec
from hf_kvcache.codecs.fp8 import Fp8Codec
from hf_kvcache.codecs.integer import KeyIntegerCodec, ValueIntegerCodec
from hf_kvcache.codecs.rotated import RotatedKeyCodec, RotatedValueCodec
from hf_kvcache.kernels import decode

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("kernel")]

UNKNOWN = 1 << 40  # first slot of a row that has only had padding


def _integers(nbits, size):
    key = KeyIntegerCodec(nbits, q_group_size=size, clip_search=False)
    return key, ValueIntegerCodec(nbits, group_length=size, q_group_size=size, clip_search=False)


CODECS = {
    **{f"int{nbits}-{size}": _integers(nbits, size) for nbits in (2, 4, 8) for size in (16, 32, 64)},
    "fp8": (Fp8Codec(), Fp8Codec()),
    **{f"rotated-{nbits}": (RotatedKeyCodec(nbits), RotatedValueCodec(nbits)) for nbits in (2, 3, 4)},
}
if importlib.util.find_spec("bitsandbytes") is not None:
    CODECS |= {name: (BitsAndBytesCodec(name), BitsAndBytesCodec(name)) for name in ("nf4", "fp4")}


class Tokens:
    """Random encoded tokens, a tail and sinks, as segments of the kernel and as the dense tensors they stand for.

    Groups lie in shuffled blocks among unused ones; the tail is a view with gaps between rows, heads and tokens.
    """

    def __init__(self, codecs, *, rows, heads, dims, groups, tail, sinks, first_slot, dtype, generator):
        self.length = groups * codecs[0].group_length
        coded, self.segments, self.sinks = [], [], None
        if groups:
            planes, count = [], rows * groups + 3
            ids = torch.randperm(count, generator=generator)[: rows * groups].view(rows, groups)
            for codec, dim in zip(codecs, dims, strict=True):
                states = torch.randn(rows, heads, self.length, dim, generator=generator)
                encoded = codec.encode(states)
                coded.append(codec.decode(encoded, Shape(heads, dim, torch.float32)))
                for plane in encoded:
                    planes.append(torch.zeros(heads, count, plane.shape[-1], dtype=plane.dtype))
                    planes[-1].view(torch.uint8)[:, ids.flatten()] = (
                        plane.transpose(0, 1).flatten(1, 2).contiguous().view(torch.uint8)
                    )
            forms = [codec.stored_form(Shape(heads, dim, dtype)) for codec, dim in zip(codecs, dims, strict=True)]
            self.segments.append(decode.coded_segment(forms, planes, ids.numpy(), codecs[0].group_length))
        else:
            coded = [torch.zeros(rows, heads, 0, dim) for dim in dims]
        gapped = [torch.randn(rows + 1, heads + 1, tail + 2, dim + 8, generator=generator).to(dtype) for dim in dims]
        tails = [states[:rows, 1:, 1:-1, :dim] for states, dim in zip(gapped, dims, strict=True)]
        self.segments.append(decode.dense_segment(tails, slot=self.length))
        if sinks:
            exact = [torch.randn(rows, heads, sinks, dim, generator=generator).to(dtype) for dim in dims]
            self.segments.append(decode.dense_segment(exact, first_slot=first_slot, stop=self.length))
            self.sinks = (first_slot, sinks)
            for row, first in enumerate(first_slot.tolist()):
                for i in range(max(0, min(sinks, self.length - first))):
                    for dense, states in zip(coded, exact, strict=True):
                        dense[row, :, first + i] = states[row, :, i].float()
        self.dense = [torch.cat([c, t.float()], dim=2) for c, t in zip(coded, tails, strict=True)]

    def expected(self, query, mask, scaling):
        groups = query.shape[1] // self.dense[0].shape[1]
        key, value = (states.double().repeat_interleave(groups, 1) for states in self.dense)
        scores = query.double() @ key.mT * scaling
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2).float()


def make_mask(kind, rows, length, generator):
    if kind == "none":
        return None
    mask = torch.rand(rows, 1, 1, length, generator=generator) < 0.7
    mask[0, ..., : length // 2] = False  # left padding: whole splits that a row does not see
    mask[..., -1] = True
    if kind == "one row":
        return mask[:1]
    return mask if kind == "boolean" else torch.where(mask, 0.3, torch.finfo(torch.float32).min)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_equals_one_softmax_over_decoded_tokens(data):
    draw = data.draw
    codecs = CODECS[draw(st.sampled_from(sorted(CODECS)))]
    group_length = codecs[0].group_length
    unit = max(32, getattr(codecs[0], "q_group_size", 0))
    dims = [unit * draw(st.integers(1, 160 // unit)) for _ in range(2)]
    rows, heads, queries = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    groups = draw(st.one_of(st.integers(0, 5), st.integers(0, -(-1100 // group_length))))
    tail, sinks = draw(st.one_of(st.integers(1, 70), st.just(1030))), draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    places = st.one_of(st.integers(0, groups * group_length + 3), st.just(UNKNOWN))
    first_slot = torch.tensor([draw(places) for _ in range(rows)])
    kinds = {"rows": rows, "heads": heads, "dims": dims, "groups": groups, "tail": tail, "sinks": sinks}
    tokens = Tokens(codecs, first_slot=first_slot, dtype=dtype, generator=generator, **kinds)
    mask = make_mask(
        draw(st.sampled_from(["none", "boolean", "additive", "one row"])), rows, tokens.length + tail, generator
    )
    query = torch.randn(rows, heads * queries, 1, dims[0], generator=generator).to(dtype)
    scaling = draw(st.sampled_from([None, 0.3]))
    got = decode.attend(query, tokens.segments, scaling=scaling, mask=mask, sinks=tokens.sinks)
    assert got.dtype == dtype
    expected = tokens.expected(query, mask, dims[0] ** -0.5 if scaling is None else scaling)
    # The kernel works in float32; only its result is rounded to the query's dtype.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-3}
    torch.testing.assert_close(got.float(), expected, **tolerance)


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("name", ["int8-16", "int4-16", "int2-16", "fp8", "rotated-2", "rotated-3", "rotated-4"])
def test_every_head_dimension(name, dim):
    generator = torch.Generator().manual_seed(0)
    codecs, kinds = CODECS[name], {"rows": 2, "heads": 2, "tail": 5, "sinks": 0, "first_slot": None}
    tokens = Tokens(codecs, dims=[dim, dim], groups=3, dtype=torch.float32, generator=generator, **kinds)
    query = torch.randn(2, 6, 1, dim, generator=generator)
    got = decode.attend(query, tokens.segments, scaling=None)
    torch.testing.assert_close(got, tokens.expected(query, None, dim**-0.5), rtol=1e-4, atol=1e-5)


def test_threads_share_the_splits():
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(2, 3, length, 64, generator=generator) for length in (2000, 2000, 1))
    segments = [decode.dense_segment([key, value])]
    alone = decode.attend(query, segments, scaling=None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = decode.attend(query, segments, scaling=None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)


def test_a_row_that_sees_nothing_gets_zeros():
    states, query = torch.randn(2, 1, 40, 16), torch.randn(2, 1, 1, 16)
    mask = torch.zeros(2, 1, 1, 40, dtype=torch.bool)
    mask[1] = True
    output = decode.attend(query, [decode.dense_segment([states, states])], scaling=None, mask=mask)
    assert torch.equal(output[0], torch.zeros(1, 1, 16))
    assert output[1].abs().min() > 0


def test_large_scores_do_not_overflow():
    states, query = torch.randn(1, 1, 40, 16) * 300, torch.randn(1, 1, 1, 16) * 300
    output = decode.attend(query, [decode.dense_segment([states, states])], scaling=None)
    expected = (query @ states.mT / 4).softmax(-1) @ states
    torch.testing.assert_close(output.transpose(1, 2), expected)


def test_small_float8_values_are_exact():
    # All 256 bytes but the two NaN, as the values of one token each; e4m3 has values below its normal range.
    codes = torch.arange(256).to(torch.uint8)
    codes[(codes & 127) == 127] = 0
    plane = codes.view(1, 1, 256).repeat(1, 1, 2)  # 32 tokens of 16 channels
    ones = torch.ones(1, 1, 32, dtype=torch.float16)
    form = Fp8Codec().stored_form(Shape(1, 16, torch.float32))
    planes = [plane.view(torch.float8_e4m3fn), ones] * 2
    segment = decode.coded_segment([form, form], planes, np.zeros((1, 1), dtype=np.int64), 32)
    for token in range(16):
        mask = torch.zeros(1, 1, 1, 32, dtype=torch.bool)
        mask[..., token] = True
        output = decode.attend(torch.zeros(1, 1, 1, 16), [segment], scaling=None, mask=mask)
        expected = codes.view(torch.float8_e4m3fn).float()[16 * token : 16 * token + 16]
        assert torch.equal(output.flatten(), expected)


@pytest.mark.parametrize(
    ("query", "mask", "dims"),
    [
        (torch.zeros(1, 2, 2, 16), None, [16, 16]),
        (torch.zeros(1, 2, 1, 16, dtype=torch.float64), None, [16, 16]),
        (torch.zeros(1, 2, 1, 24), None, [24, 16]),
        (torch.zeros(1, 2, 1, 16), None, [16, 528]),
        (torch.zeros(1, 2, 1, 16, requires_grad=True), None, [16, 16]),
        (torch.zeros(1, 2, 1, 16), torch.ones(1, 2, 1, 9, dtype=torch.bool), [16, 16]),
        (torch.zeros(1, 2, 1, 16, device="meta"), None, [16, 16]),
    ],
    ids=["chunk", "float64", "odd channels", "wide heads", "gradients", "a mask a head", "another device"],
)
def test_what_it_cannot_serve(query, mask, dims):
    assert decode.can_serve(torch.zeros(1, 2, 1, 16), None, [16, 16])
    assert not decode.can_serve(query, mask, dims)


@pytest.mark.parametrize("shape", [(1, 1, 1, 39), (3, 1, 1, 40)], ids=["slots", "rows"])
def test_a_mask_that_does_not_fit_is_refused(shape):
    states = torch.randn(2, 1, 40, 16)
    with pytest.raises(ValueError, match="does not cover 2 rows of 40 tokens: give a mask of all tokens"):
        decode.attend(
            states[:, :, :1], [decode.dense_segment([states, states])], scaling=None, mask=torch.ones(shape).bool()
        )
