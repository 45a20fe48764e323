"""The transform codec: bits where they lower the error most, what is stored, and what comes back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcache.codecs.base import Shape
from hf_kvcache.codecs.statistics import LayerStatistics
from hf_kvcache.codecs.transform import TransformKeyCodec, mixing
from hf_kvcache.codecs.water_filling import allocate, distortion

HEADS, DIM, TOKENS = 3, 32, 512
SHAPE = Shape(HEADS, DIM, torch.float32)


def _spectrum() -> torch.Tensor:
    """Variances `[H, D]` over four decades; the last head's are a hundredth of the others'."""
    return torch.logspace(0, -4, DIM).expand(HEADS, DIM) * torch.tensor([1.0, 1.0, 0.01])[:, None]


@pytest.fixture
def statistics() -> LayerStatistics:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=generator)).Q
    lengths = torch.rand(HEADS, DIM, 1, generator=generator) + 0.5  # some directions matter more than others
    return LayerStatistics(
        torch.randn(HEADS, DIM, generator=generator), lengths * basis, _spectrum(), importance=torch.ones(HEADS)
    )


@pytest.fixture
def keys(statistics) -> torch.Tensor:
    """Keys `[2, H, T, D]` with exactly these statistics."""
    coefficients = torch.randn(2, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(1))
    coefficients = coefficients * statistics.variance.sqrt()[:, None]
    return coefficients @ torch.linalg.inv(statistics.basis) + statistics.mean[:, None]


def _codec(statistics: LayerStatistics, key_bits: float) -> TransformKeyCodec:
    return TransformKeyCodec(statistics, allocate(statistics.variance, round(key_bits * HEADS * DIM)))


def _error(decoded, keys, statistics) -> float:
    """Mean over coefficients of their squared error."""
    return ((decoded - keys) @ statistics.basis).square().mean().item()


@pytest.mark.parametrize("key_bits", [0.5, 1.5, 2, 2.3, 3, 5])
def test_stores_the_bits_that_were_asked_for(key_bits, statistics, keys):
    codec = _codec(statistics, key_bits)
    encoded = codec.encode(keys)
    assert [(p.num_heads, p.dim, p.dtype) for p in codec.planes(SHAPE)] == [
        (e.shape[1], e.shape[-1], e.dtype) for e in encoded
    ]
    assert all(e.shape[0] == 2 and e.shape[2] == TOKENS // 128 for e in encoded)
    bits = 8 * sum(e.nbytes for e in encoded) / keys.numel()
    assert bits == round(key_bits * HEADS * DIM) / (HEADS * DIM) + 8 / DIM


@pytest.mark.parametrize("key_bits", [1, 2, 3, 4])
def test_error_is_that_of_reverse_water_filling(key_bits, statistics, keys):
    codec = _codec(statistics, key_bits)
    got = _error(codec.decode(codec.encode(keys), SHAPE), keys, statistics)
    bits = allocate(statistics.variance, codec.total_bits)
    kept = torch.tensor([distortion(b) for b in bits.flatten().tolist()]).view(bits.shape)
    expected = (kept * statistics.variance).mean().item()
    # The best of several scales is chosen for each token, which is worth up to half a bit with few dimensions.
    assert 0.4 * expected < got < 1.1 * expected
    uniform = (distortion(key_bits) * statistics.variance).mean().item()
    assert got < uniform / 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=5), st.integers(0, 8))
def test_no_allocation_of_as_many_bits_errs_less(variances, total):
    """Against every other allocation, by brute force."""
    variances = torch.tensor(variances, dtype=torch.float64)
    bits = allocate(variances, total)
    assert int(bits.sum()) == total

    def error(choice) -> float:
        return sum(v * distortion(b) for v, b in zip(variances.tolist(), choice, strict=True))

    def choices(count: int, left: int):
        if count == 1:
            yield (left,)
            return
        for first in range(left + 1):
            for rest in choices(count - 1, left - first):
                yield (first, *rest)

    best = min(error(choice) for choice in choices(len(variances), total))
    assert error(bits.tolist()) == pytest.approx(best, rel=1e-9)


def test_a_head_of_small_keys_gets_fewer_bits(statistics):
    bits = allocate(statistics.variance, 2 * HEADS * DIM)
    assert bits[2].sum() < bits[0].sum() == bits[1].sum()
    assert (bits.diff(dim=-1) <= 0).all(), "a coefficient of smaller variance has more bits"


def test_mixing_is_orthogonal_and_keeps_unequal_bits_apart():
    bits = torch.tensor([3, 3, 2, 2, 2, 0])
    matrix = mixing(bits)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(6, dtype=torch.float64))
    assert (matrix[bits[:, None] != bits] == 0).all()
    assert (matrix[:2, :2] != 0).all()


def test_groups_and_rows_are_independent(statistics, keys):
    codec = _codec(statistics, 2.3)
    encoded = codec.encode(keys)
    whole = codec.decode(encoded, SHAPE)
    assert torch.equal(codec.decode([e[1:, :, 1:3] for e in encoded], SHAPE), whole[1:, :, 128:384])
    for alone, together in zip(codec.encode(keys[1:, :, 128:256]), encoded, strict=True):
        assert torch.equal(alone[0, :, 0], together[1, :, 1])


def test_long_prompts_are_encoded_in_parts_with_the_same_bytes(statistics, monkeypatch, keys):
    from hf_kvcache.codecs import transform

    codec = _codec(statistics, 2)
    expected = codec.encode(keys)
    monkeypatch.setattr(transform, "_GROUPS_AT_A_TIME", 1)
    for part, whole in zip(codec.encode(keys), expected, strict=True):
        assert torch.equal(part, whole)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e4])
def test_keys_of_another_size_than_calibrated_come_back(scale, statistics, keys):
    codec = _codec(statistics, 4)
    scaled = (keys - statistics.mean[:, None]) * scale + statistics.mean[:, None]
    decoded = codec.decode(codec.encode(scaled), SHAPE)
    assert torch.isfinite(decoded).all()
    # 2**-12 of the calibrated size is the smallest scale there is.
    slack = 3e-3 * statistics.variance.sqrt().mean().item()
    limit = 0.02 * scale**2 * _error(statistics.mean[:, None].expand_as(keys), keys, statistics)
    assert _error(decoded, scaled, statistics) < limit + slack**2


def test_a_direction_that_never_varies_is_harmless(statistics, keys):
    variance = statistics.variance.clone()
    variance[:, -8:] = 1e-12
    codec = _codec(statistics._replace(variance=variance), 3)
    assert torch.isfinite(codec.decode(codec.encode(keys), SHAPE)).all()


@pytest.mark.parametrize("key_bits", [0.5, 3])
def test_a_head_alone_is_what_it_is_among_others(key_bits, statistics, keys):
    """In the same bits all together, by the same bases; a head that gets none is its mean."""
    codec = _codec(statistics, key_bits)
    whole = codec.decode(codec.encode(keys), SHAPE)
    sizes = []
    for head in range(HEADS):
        alone = codec.of_head(head)
        shape = SHAPE._replace(num_heads=1)
        encoded = alone.encode(keys[:, head : head + 1])
        assert [(p.num_heads, p.dim) for p in alone.planes(shape)] == [(e.shape[1], e.shape[-1]) for e in encoded]
        torch.testing.assert_close(alone.decode(encoded, shape), whole[:, head : head + 1])
        sizes.append(encoded[0].nbytes)
        for name in ("mean", "analysis", "synthesis"):
            assert (
                getattr(alone, name).untyped_storage().data_ptr() == getattr(codec, name).untyped_storage().data_ptr()
            )
    assert sum(sizes) == codec.encode(keys)[0].nbytes
    assert (sizes[2] == 0) == (key_bits == 0.5)
    assert codec.of_head(1) is codec.of_head(1) is codec.of_head(1).of_head(0)


def test_coding_again_among_other_tokens_changes_little(statistics, keys):
    """What evictions do, again and again: a token is coded by itself, whatever tokens share its group."""
    codec = _codec(statistics, 2.5)
    decoded = once = codec.decode(codec.encode(keys), SHAPE)
    for seed in range(4):
        order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(seed))
        again = torch.empty_like(decoded)
        again[:, :, order] = codec.decode(codec.encode(decoded[:, :, order]), SHAPE)
        decoded = again
    assert (decoded - keys).norm() < 1.05 * (once - keys).norm()
