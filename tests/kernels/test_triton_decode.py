"""The CUDA kernel against attention over decoded keys and values; without a GPU, in Triton's interpreter."""

import importlib
from typing import NamedTuple

import pytest
import torch

from hf_kvcache import make_cache
from hf_kvcache.codecs import build_codecs
from hf_kvcache.codecs.base import Shape
from hf_kvcache.codecs.packing import unpack
from hf_kvcache.codecs.rotated import codebook, rotation
from hf_kvcache.kernels import decode
from hf_kvcache.quantization import coded_layer

pytestmark = pytest.mark.core

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")
triton_decode = importlib.import_module("hf_kvcache.kernels.triton_decode")


class StoredForm(NamedTuple):
    """What the kernel is told of a codec's planes."""

    planes: tuple[str, ...]
    element: str
    bits: int
    dim: int
    block: int
    by_channel: bool = False
    table: torch.Tensor | None = None
    rotation: torch.Tensor | None = None


def integer_form(codec, dim: int, *, by_channel: bool) -> StoredForm:
    element, table = ("int8", None) if codec.nbits == 8 else ("codes", torch.arange(2.0**codec.nbits))
    return StoredForm(("codes", "scale", "zero"), element, codec.nbits, dim, codec.q_group_size, by_channel, table)


def rotated_form(codec, dim: int, *, has_mean: bool) -> StoredForm:
    planes = ("codes", "high", "scale") if codec.nbits == 3 else ("codes", "scale")
    planes = (*planes, "mean") if has_mean else planes
    table = codebook(codec.nbits)
    return StoredForm(planes, "codes", codec.nbits, dim, dim, table=table, rotation=rotation(dim))


class Case:
    """Encoded keys and values of `rows` sequences in arena planes, blocks in any order, and what they decode to."""

    def __init__(self, name, options, *, rows=2, heads=2, groups=5, dims=(64, 64), dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        codecs = build_codecs(name, {"clip_search": False, "key_bits": None, "value_bits": None} | options, dims[0])
        self.group_length = codecs[0].group_length
        length, self.dims, self.dtype = groups * self.group_length, dims, dtype
        self.block_ids = torch.randperm(rows * groups + 3, generator=generator)[: rows * groups].view(rows, groups)
        self.planes, self.states = [], []
        for codec, dim in zip(codecs, dims, strict=True):
            states = torch.randn(rows, heads, length, dim, generator=generator).to(dtype)
            states[..., ::5] *= 6  # a few large channels
            encoded = codec.encode(states)
            self.states.append(codec.decode(encoded, Shape(heads, dim, torch.float32)))
            self.planes += [self._scattered(plane) for plane in encoded]
        if name == "turboquant":
            self.forms = [
                rotated_form(codec, d, has_mean=i == 0) for i, (codec, d) in enumerate(zip(codecs, dims, strict=True))
            ]
        elif name == "fp8":
            self.forms = [StoredForm(("codes", "scale"), "float8", 8, dim, dim) for dim in dims]
        else:
            self.forms = [integer_form(codec, dims[i], by_channel=i == 0) for i, codec in enumerate(codecs)]

    def _scattered(self, plane: torch.Tensor) -> torch.Tensor:
        """`[B, H, n, *]` as an arena holds it, `[H, blocks, *]`, with free blocks of garbage between."""
        arena = torch.full((plane.shape[1], self.block_ids.numel() + 3, plane.shape[-1]), 99).to(plane.dtype)
        arena[:, self.block_ids.flatten()] = plane.transpose(0, 1).flatten(1, 2)
        return arena

    def run(self, query, **options) -> tuple[torch.Tensor, torch.Tensor]:
        if options.get("mask") is not None:
            options["mask"] = options["mask"].to(DEVICE)
        if options.get("sinks") is not None:
            options["sinks"] = (options["sinks"][0].to(DEVICE), options["sinks"][1])
        planes = [plane.to(DEVICE) for plane in self.planes]
        ids, query = self.block_ids.numpy(), query.to(DEVICE, self.dtype)
        result = triton_decode.attend_coded(query, self.forms, planes, ids, self.group_length, **options)
        return result.output.cpu(), result.logsumexp.cpu()

    def expected(self, query, *, scaling=None, mask=None, sinks=None, slot=0) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (state.repeat_interleave(query.shape[1] // state.shape[1], 1) for state in self.states)
        query = query.to(self.dtype).float()
        scores = query @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if mask is not None:
            mask = mask[..., slot : slot + scores.shape[-1]]
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        if sinks is not None:
            slots = slot + torch.arange(scores.shape[-1])
            hidden = (slots >= sinks[0][:, None]) & (slots < sinks[0][:, None] + sinks[1])
            scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        return scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)

    def check(self, query, *, atol=2e-5, **options) -> None:
        for got, wanted in zip(self.run(query, **options), self.expected(query, **options), strict=True):
            torch.testing.assert_close(got, wanted, atol=atol, rtol=1e-4 if atol < 1e-3 else 2e-2)


def queries(rows=2, heads=6, dim=64):
    return torch.randn(rows, heads, 1, dim, generator=torch.Generator().manual_seed(7))


INTEGERS = [(bits, size) for bits in (8, 4, 2) for size in (16, 64)]


@pytest.mark.parametrize(("bits", "size"), INTEGERS)
def test_integers(bits, size):
    Case(f"int{bits}", {"q_group_size": size}).check(queries())


@pytest.mark.parametrize("name", ["int4", "int2"])
def test_other_bits_for_keys_than_for_values(name):
    Case(name, {"q_group_size": 32, "key_bits": 8, "value_bits": 2}).check(queries())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebooks(bits):
    Case("turboquant", {"key_bits": bits, "value_bits": bits}, groups=2).check(queries())


def test_float8():
    case = Case("fp8", {})
    place = case.block_ids[0, 0]
    every = torch.arange(256).to(torch.uint8)
    every[[127, 255]] = 0  # all but the two NaNs, subnormal ones included
    for codes, scale, states in ((0, 1, case.states[0]), (2, 3, case.states[1])):
        case.planes[codes][0, place, :256] = every.view(torch.float8_e4m3fn)
        case.planes[scale][0, place, :4] = 1 / 448
        decoded = case.planes[codes][0, place].float().view(-1, 64) * case.planes[scale][0, place].float()[:, None]
        states[0, 0, :32] = decoded
    case.check(queries())


@pytest.mark.parametrize("dims", [(16, 16), (128, 128), (256, 256), (96, 96), (80, 80), (64, 32)])
def test_head_dimensions(dims):
    """One range a token, several, and numbers of them that are no power of two."""
    Case("int4", {"q_group_size": 16}, dims=dims, groups=3).check(queries(dim=dims[0]))


def test_a_codebook_of_several_ranges_a_token():
    case = Case("int4", {"q_group_size": 32}, groups=2)
    table = torch.randn(16, generator=torch.Generator().manual_seed(3)).sort().values
    codes, scale = (p[:, case.block_ids].transpose(0, 1) for p in (case.planes[3], case.planes[4]))
    values = table[unpack(codes.unflatten(-1, (32, -1)), 4).int()].unflatten(-1, (2, 32))
    case.states[1] = (values * scale.float().unflatten(-1, (32, 2)).unsqueeze(-1)).flatten(-2).flatten(2, 3)
    case.forms[1], case.planes = StoredForm(("codes", "scale"), "codes", 4, 64, 32, table=table), case.planes[:5]
    case.check(queries())


@pytest.mark.parametrize("heads", [2, 14, 40])
def test_query_heads_share_a_kv_head(heads):
    Case("int4", {"q_group_size": 32}, groups=2).check(queries(heads=heads))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("is_boolean", [True, False])
def test_masks(rows, is_boolean):
    mask = torch.rand(rows, 1, 1, 170, generator=torch.Generator().manual_seed(1)) > 0.4
    if not is_boolean:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    Case("int4", {"q_group_size": 32}).check(queries(), mask=mask, scaling=0.3)


def test_sinks_are_left_out():
    case = Case("int4", {"q_group_size": 16})
    case.check(queries(), sinks=(torch.tensor([0, 30]), 4))
    mask = (torch.arange(80) >= torch.tensor([0, 30])[:, None])[:, None, None]
    case.check(queries(), sinks=(torch.tensor([0, 30]), 4), mask=mask)


def test_groups_before_may_have_been_dropped():
    mask = torch.rand(2, 1, 1, 200, generator=torch.Generator().manual_seed(1)) > 0.4
    Case("int4", {"q_group_size": 16}).check(queries(), mask=mask, slot=96, sinks=(torch.tensor([3, 110]), 4))


def test_a_row_that_sees_nothing():
    case = Case("int4", {"q_group_size": 16})
    mask = torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 80)
    output, logsumexp = case.run(queries(), mask=mask)
    assert (output[1] == 0).all()
    assert (logsumexp[1] == float("-inf")).all()
    case.check(queries(), mask=mask)


@pytest.mark.parametrize("wanted", [1, 2, 3, 100])
def test_splits_are_merged(wanted, monkeypatch):
    monkeypatch.setattr(triton_decode, "_PROGRAMS", 4 * wanted)
    monkeypatch.setattr(triton_decode, "_num_multiprocessors", lambda device: 1)
    case = Case("int4", {"q_group_size": 16}, groups=7)
    assert triton_decode._split(4, 7, torch.device(DEVICE))[0] == {1: 1, 2: 2, 3: 3, 100: 7}[wanted]
    case.check(queries())
    case.check(queries(), mask=(torch.arange(112) >= 50)[None, None, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    # The products' inputs have 8 or 11 bits: outputs of about 1 are off by up to 1e-2 or 2e-3.
    Case("int4", {"q_group_size": 64}, dtype=dtype).check(queries(), atol=3e-2 if dtype == torch.bfloat16 else 4e-3)


def test_rows_share_their_blocks():
    case = Case("int4", {"q_group_size": 16})
    case.block_ids[1] = case.block_ids[0]
    for state in case.states:
        state[1] = state[0]
    case.check(queries())


def test_many_groups_and_extreme_scores():
    case = Case("int8", {"q_group_size": 16}, rows=1, groups=40)
    case.check(queries(rows=1) * 30, atol=2e-4)


@pytest.mark.parametrize("name", ["int4", "turboquant", "sliding_window+int4"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_layers_attend_in_triton_as_a_slice_at_a_time(
    name, is_padded, tiny_model, make_ids, left_pad, run, monkeypatch
):
    model = tiny_model("llama", max_position_embeddings=512)
    options = {"residual_length": 24} | ({"q_group_size": 16} if "int4" in name else {})
    options |= {"sliding_window": 50} if "+" in name else {}
    ids, mask = left_pad(make_ids(2, 203), [203, 120] if is_padded else [203, 203])
    mask, model = mask if is_padded else None, model.to(DEVICE)

    def run_one():
        return run(model, make_cache(model, name, **options), ids.to(DEVICE), mask, chunks=[200, 1, 1, 1])

    monkeypatch.setattr(decode, "can_serve", lambda *args: False)
    expected, calls = run_one(), []
    monkeypatch.setattr(triton_decode, "can_serve", lambda query, mask: query.shape[2] == 1)
    attend = triton_decode.attend_coded
    monkeypatch.setattr(triton_decode, "attend_coded", lambda *a, **k: calls.append(1) or attend(*a, **k))
    monkeypatch.setattr(coded_layer, "triton_kernel", lambda device: triton_decode)
    torch.testing.assert_close(run_one(), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 6
