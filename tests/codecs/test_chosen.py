"""Units of encoded groups, decoded alone: bit for bit what decoding everything gives, whatever lies around them."""

import pytest
import torch

from hf_kvcache.codecs.base import Shape
from hf_kvcache.codecs.bnb import BitsAndBytesCodec, BlockwiseCodec
from hf_kvcache.codecs.fp8 import Fp8Codec
from hf_kvcache.codecs.headwise import HeadwiseCodec
from hf_kvcache.codecs.integer import KeyIntegerCodec, ValueIntegerCodec
from hf_kvcache.codecs.rotated import RotatedKeyCodec, RotatedValueCodec
from hf_kvcache.codecs.statistics import LayerStatistics
from hf_kvcache.codecs.transform import TransformKeyCodec

ROWS, HEADS, DIM, GROUPS, CHOSEN = 2, 3, 64, 5, 7
SHAPE = Shape(HEADS, DIM, torch.float32)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def key(nbits: int) -> KeyIntegerCodec:
    return KeyIntegerCodec(nbits, q_group_size=32, clip_search=False)


def transform(bits: list[list[int]]) -> TransformKeyCodec:
    """With as many coefficients of a number of bits, in each head, as `bits` says."""
    widths = torch.tensor([[width for width, count in enumerate(row) for _ in range(count)][::-1] for row in bits])
    statistics = LayerStatistics(
        mean=random(0, HEADS, DIM),
        basis=torch.linalg.qr(random(1, HEADS, DIM, DIM))[0],
        variance=random(2, HEADS, DIM).square().sort(descending=True).values + 0.01,
        importance=torch.ones(HEADS),
    )
    return TransformKeyCodec(statistics, widths)


CODECS = {
    **{f"key-int{nbits}": key(nbits) for nbits in (2, 4, 8)},
    "value-int4": ValueIntegerCodec(4, group_length=32, q_group_size=32, clip_search=False),
    "fp8": Fp8Codec(),
    **{f"rotated-key-{nbits}": RotatedKeyCodec(nbits) for nbits in (2, 3, 4)},
    "rotated-value-3": RotatedValueCodec(3),
    "by-head": HeadwiseCodec([(four := key(4)), four, key(2)], starts=[0, 2]),
    "transform": transform([[0, 4, 4, 10, 20, 10, 8, 4, 4], [20, 0, 0, 44], [0, 64]]),
    "transform-of-a-head-without-bits": transform([[32, 0, 32], [64], [0, 30, 30, 4]]),
    "transform-without-bits": transform([[64], [64], [64]]),
    "bnb8": BlockwiseCodec(),
    "nf4": BitsAndBytesCodec("nf4"),
}


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("name", CODECS)
def test_units_are_decoded_alone(name, unit):
    if name in ("bnb8", "nf4"):
        pytest.importorskip("bitsandbytes")
    codec, size = CODECS[name], CODECS[name].group_length
    encoded = codec.encode(random(3, ROWS, HEADS, GROUPS * size, DIM))
    whole = codec.decode(encoded, SHAPE)
    units = torch.randint(GROUPS * size // unit, (ROWS, HEADS, CHOSEN), generator=torch.Generator().manual_seed(4))
    slots = (units.unsqueeze(3) * unit + torch.arange(unit)).flatten(2)
    wanted = whole.gather(2, slots.unsqueeze(3).expand(-1, -1, -1, DIM))
    # A block of the arena for each group, the rows in turn.
    planes = [plane.permute(1, 2, 0, 3).flatten(1, 2).contiguous() for plane in encoded]
    groups = units * unit // size * ROWS + torch.arange(ROWS)[:, None, None]
    got = codec.decode_units(planes, groups, units * unit % size, unit, SHAPE)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("name", "unit", "nbytes"), [("fp8", 4, 4 * (64 + 2)), ("key-int4", 4, 2 * 4 * (32 + 8))])
def test_bytes_of_a_unit(name, unit, nbytes):
    """Of keys by the channel, a byte of codes holds two tokens that lie in other units."""
    assert CODECS[name].unit_bytes(unit, SHAPE) == HEADS * nbytes


def test_bytes_of_a_unit_of_a_transform():
    codec = transform([[60, 0, 4], [63, 0, 0, 1], [64]])
    # Four coefficients of 2 bits, one of 3 in two pieces; a scale a token and head.
    assert codec.unit_bytes(4, SHAPE) == 4 * (4 + 2) + 4 * 3
    assert codec.unit_bytes(128, SHAPE) == codec.group_bytes(SHAPE) == (8 + 3) * 16 + 128 * 3
