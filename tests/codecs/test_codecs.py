"""Every codec: what it stores, what comes back, and attention on the stored form."""

import pytest
import torch

from hf_kvcache.codecs.base import Shape
from hf_kvcache.codecs.bnb import BitsAndBytesCodec, BlockwiseCodec
from hf_kvcache.codecs.fp8 import Fp8Codec
from hf_kvcache.codecs.integer import KeyIntegerCodec, ValueIntegerCodec
from hf_kvcache.codecs.packing import pack, unpack
from hf_kvcache.codecs.rotated import RotatedKeyCodec, RotatedValueCodec, codebook, rotation


def _key(nbits, size=32, clip=False):
    return KeyIntegerCodec(nbits, q_group_size=size, clip_search=clip)


def _value(nbits, size=32, clip=False, length=32):
    return ValueIntegerCodec(nbits, group_length=length, q_group_size=size, clip_search=clip)


# Codec, bits a value at D=64, and the largest mean squared error for standard normal values (a few percent above what
# was measured with this seed; Lloyd-Max's own distortions D are 0.117, 0.0345 and 0.0095 at 2, 3 and 4 bits, and
# D / (1 - D) with the unbiased scale of values).
CODECS = {
    "key-int8": (_key(8), 9.0, 3e-5),
    "key-int4": (_key(4), 5.0, 0.0065),
    "key-int2": (_key(2), 3.0, 0.16),
    "key-int2-clipped": (_key(2, clip=True), 3.0, 0.13),
    "value-int8": (_value(8), 9.0, 3e-5),
    "value-int4": (_value(4), 5.0, 0.0065),
    "value-int2-64": (_value(2, 64), 2.5, 0.22),
    "fp8": (Fp8Codec(), 8.25, 8e-4),
    "rotated-value-2": (RotatedValueCodec(2), 2.25, 0.13),
    "rotated-value-3": (RotatedValueCodec(3), 3.25, 0.037),
    "rotated-key-3": (RotatedKeyCodec(3), 3.375, 0.036),
    "rotated-key-4": (RotatedKeyCodec(4), 4.375, 0.0105),
}

SHAPE = Shape(num_heads=3, dim=64, dtype=torch.float32)


@pytest.fixture(params=CODECS, ids=str)
def case(request):
    return CODECS[request.param]


@pytest.fixture
def states():
    return torch.randn(2, 3, 4 * 128, 64, generator=torch.Generator().manual_seed(0))


def test_stores_what_it_declares(case, states):
    codec, nbits, _ = case
    encoded = codec.encode(states)
    assert [(p.dim, p.dtype) for p in codec.planes(SHAPE)] == [(e.shape[-1], e.dtype) for e in encoded]
    assert all(e.shape[:3] == (2, 3, states.shape[2] // codec.group_length) for e in encoded)
    assert 8 * sum(e.nbytes for e in encoded) / states.numel() == nbits


def test_error_is_what_its_bits_allow(case, states):
    codec, _, largest = case
    error = (codec.decode(codec.encode(states), SHAPE) - states).square().mean().item()
    assert largest / 4 < error < largest


def test_groups_are_independent_and_heads_stay_apart(case, states):
    codec, _, _ = case
    size = codec.group_length
    encoded = codec.encode(states)
    whole = codec.decode(encoded, SHAPE)
    middle = codec.decode([e[:, :, 1:3] for e in encoded], SHAPE)
    torch.testing.assert_close(middle, whole[:, :, size : 3 * size], rtol=0, atol=0)
    one_head = codec.encode(states[1:, 1:2, size : 2 * size])
    for alone, together in zip(one_head, encoded, strict=True):
        assert torch.equal(alone[0, 0, 0], together[1, 1, 1])


def test_constant_zero_and_huge_values_come_back(case):
    codec, _, _ = case
    flat = torch.zeros(1, 3, 128, 64)
    assert torch.equal(codec.decode(codec.encode(flat), SHAPE), flat)
    huge = torch.full((1, 3, 128, 64), 3e4)
    decoded = codec.decode(codec.encode(huge), SHAPE)
    assert (decoded - huge).norm() < 0.4 * huge.norm()


@pytest.mark.parametrize("dim", [16, 64, 256])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("nbits", [2, 4, 8])
def test_integers_err_by_half_a_step_at_most(nbits, size, dim):
    if dim % size:
        pytest.skip("the group does not divide the head dimension")
    shape = Shape(2, dim, torch.float32)
    states = torch.randn(1, 2, 128, dim, generator=torch.Generator().manual_seed(1)) * 5
    grouped = {
        _key(nbits, size): states.unflatten(2, (-1, size)).transpose(-1, -2),
        _value(nbits, size): states.unflatten(-1, (-1, size)),
    }
    for codec, groups in grouped.items():
        decoded = codec.decode(codec.encode(states), shape)
        step = (groups.amax(-1) - groups.amin(-1)).max() / (2**nbits - 1)
        # Scale and zero point are float16: each adds up to 2**-11 of its size.
        slack = states.abs().max() * 2**-9
        assert (decoded - states).abs().max() <= step / 2 + slack


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_packing_is_undone(nbits):
    codes = torch.randint(0, 2**nbits, (3, 5, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    assert pack(codes, nbits).shape[-1] == 64 * nbits // 8
    assert torch.equal(unpack(pack(codes, nbits), nbits), codes)


def test_codebook_is_lloyd_max():
    # The published optimum for a normal distribution (Max 1960, table I).
    torch.testing.assert_close(codebook(2), torch.tensor([-1.510, -0.4528, 0.4528, 1.510]), rtol=0, atol=1e-3)
    assert codebook(3).shape == (8,)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_rotation_is_orthogonal(dim):
    matrix = rotation(dim)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), rtol=0, atol=1e-5)


def test_centring_removes_a_common_offset():
    offset = torch.randn(1, 3, 1, 64, generator=torch.Generator().manual_seed(8)) * 50
    states = torch.randn(1, 3, 128, 64, generator=torch.Generator().manual_seed(9))
    errors = []
    for codec in (RotatedKeyCodec(3), RotatedValueCodec(3)):
        errors.append((codec.decode(codec.encode(states + offset), SHAPE) - states - offset).square().mean())
    assert errors[0] < 0.05 < errors[1]


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_decoded_values_are_as_long_as_the_original(nbits, states):
    """A weighted sum of many values is not shorter than that of the originals, as least squares would make it."""
    decoded = RotatedValueCodec(nbits).decode(RotatedValueCodec(nbits).encode(states), SHAPE)
    ratio = (decoded * states).sum(-1) / states.square().sum(-1)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=2e-3)


def test_a_vector_that_no_codebook_fits_is_not_drowned():
    spike = rotation(64)[3].expand(1, 3, 128, 64)  # one coordinate after the rotation
    decoded = RotatedValueCodec(2).decode(RotatedValueCodec(2).encode(spike), SHAPE)
    assert (decoded - spike).norm() < 1.2 * spike.norm()


@pytest.mark.parametrize(("name", "bits", "largest"), [("nf4", 4.25, 0.01), ("fp4", 4.25, 0.016), ("bnb8", 8.25, 3e-4)])
def test_bitsandbytes_codebooks(name, bits, largest, states):
    pytest.importorskip("bitsandbytes")
    codec = BlockwiseCodec() if name == "bnb8" else BitsAndBytesCodec(name)
    encoded = codec.encode(states)
    assert [(p.dim, p.dtype) for p in codec.planes(SHAPE)] == [(e.shape[-1], e.dtype) for e in encoded]
    assert 8 * sum(e.nbytes for e in encoded) / states.numel() == bits
    whole = codec.decode(encoded, SHAPE)
    assert largest / 4 < (whole - states).square().mean() < largest
    part = codec.decode([e[:, :, 2:5] for e in encoded], SHAPE)
    assert torch.equal(part, whole[:, :, 2 * codec.group_length : 5 * codec.group_length])
