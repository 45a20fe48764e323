"""The codebooks of bitsandbytes: NF4 for normally distributed values and FP4, of 4 bits; a dynamic map of 8 bits.

Stores 4.25 or 8.25 bits a value: a code, and a float16 largest magnitude for each 64 channels of a token. Of 4 bits,
NF4 is the better here. bitsandbytes encodes; its 4-bit codes are packed again as those of our other codecs, for one
kernel to read all, and those of 8 bits are decoded a slice at a time. Needs the extra `bnb`; works wherever
bitsandbytes has a backend (CPU and CUDA among them).
Papers: Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314 (section 3); 2022, 8-bit optimizers via block-wise
quantization, https://arxiv.org/abs/2110.02861.
"""

import functools
import importlib.util

import torch

from ..blocks.arena import Plane
from .base import Codec, Shape, StoredForm
from .chosen import take_rows
from .packing import look_up, pack, unpack

GROUP_LENGTH = 32


def check_usable(name: str, head_dim: int) -> None:
    """Refuse what bitsandbytes cannot do here, before any model runs.

    Raises:
        ImportError: if it is missing, with the command that installs it.
        ValueError: if no block size of it divides the head dimension.
    """
    if head_dim % 32:
        raise ValueError(f"cache {name!r} needs a head dimension that 32 divides, not {head_dim}: use 'int4'.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(f"cache {name!r} needs bitsandbytes: install it with pip install 'hf_kvcache[bnb]'.")


def _block(dim: int) -> int:
    # Blocks stay within a token: wider ones are decoded wrongly by bitsandbytes' AVX512 kernel.
    return 64 if dim % 64 == 0 else 32


@functools.cache
def _levels(quant_type: str) -> torch.Tensor:
    """What each of the 16 codes stands for."""
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type(quant_type, device="cpu")


class BitsAndBytesCodec(Codec):
    """Two codes a byte, `[tokens, D]`, and a float16 absmax for each block of 64 channels (32, if 64 does not fit).

    Args:
        quant_type: "nf4" or "fp4".
    """

    group_length = GROUP_LENGTH

    def __init__(self, quant_type: str):
        self.quant_type = quant_type

    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        values = self.group_length * shape.dim
        return (
            Plane(shape.num_heads, values // 2, torch.uint8),
            Plane(shape.num_heads, values // _block(shape.dim), torch.float16),
        )

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        from bitsandbytes.functional import quantize_4bit

        rows, heads, _, dim = states.shape
        block = _block(dim)
        flat = states.float().contiguous().view(-1)
        codes, state = quantize_4bit(flat, blocksize=block, quant_type=self.quant_type)
        # Theirs are pairs of neighbours, the first in the higher bits; ours are segments of a token's channels.
        codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(rows, heads, -1, self.group_length, dim)
        return [pack(codes, 4).flatten(-2), state.absmax.half().view(*codes.shape[:3], -1)]

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        codes, absmax = encoded
        unpacked = unpack(codes.unflatten(-1, (self.group_length, -1)), 4)  # [B, H, n, G, D]
        blocks = _levels(self.quant_type).to(codes.device)[unpacked.int()].unflatten(-1, (-1, _block(shape.dim)))
        states = blocks * absmax.float().unflatten(-1, blocks.shape[3:5]).unsqueeze(-1)
        return states.flatten(-2).flatten(2, 3).to(shape.dtype)

    def stored_form(self, shape: Shape) -> StoredForm:
        return StoredForm(
            planes=("codes", "scale"),
            element="codes",
            bits=4,
            dim=shape.dim,
            block=_block(shape.dim),
            table=_levels(self.quant_type),
        )


class BlockwiseCodec(Codec):
    """A code a byte, `[tokens, D]`, and a float16 absmax for each block of 64 channels (32, if 64 does not fit)."""

    group_length = GROUP_LENGTH

    def planes(self, shape: Shape) -> tuple[Plane, ...]:
        values = self.group_length * shape.dim
        return (
            Plane(shape.num_heads, values, torch.uint8),
            Plane(shape.num_heads, values // _block(shape.dim), torch.float16),
        )

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        from bitsandbytes.functional import quantize_blockwise

        flat = states.float().contiguous()
        codes, state = quantize_blockwise(flat.view(-1), blocksize=_block(states.shape[-1]))
        shape = (*states.shape[:2], states.shape[2] // self.group_length, -1)
        return [codes.view(shape), state.absmax.half().view(shape)]

    def decode(self, encoded: list[torch.Tensor], shape: Shape) -> torch.Tensor:
        codes, absmax = encoded
        blocks = _dynamic_map().to(codes.device)[codes.int()].unflatten(-1, (-1, _block(shape.dim)))
        states = (blocks * absmax.float().unsqueeze(-1)).flatten(-2)  # [B, H, n, G * D]
        return states.unflatten(-1, (self.group_length, -1)).flatten(2, 3).to(shape.dtype)

    def decode_units(self, planes, groups, offsets, unit, shape):
        heads = torch.arange(shape.num_heads, device=groups.device)[:, None]
        rows = ((heads * planes[0].shape[1] + groups) * self.group_length + offsets) // unit
        codes, absmax = (take_rows(plane, rows, plane.shape[2] * unit // self.group_length) for plane in planes)
        blocks = look_up(_dynamic_map(), codes).unflatten(-1, (absmax.shape[-1], -1)) * absmax.float().unsqueeze(-1)
        return blocks.flatten(-2).unflatten(-1, (unit, -1)).flatten(2, 3).to(shape.dtype)


@functools.cache
def _dynamic_map() -> torch.Tensor:
    """What each of the 256 codes stands for."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map()
