"""Key index: choose tokens by their scores with a copy of the keys in 2 bits a channel.

Stores `2 + 16 / D` bits for each key channel besides the keys: 7% of the bytes of 16-bit keys and values at `D=64`, all
of which each step reads. Tokens are chosen one by one; the choice is nearly that of the exact scores (`topk`).
Papers: Ashkboos et al. 2024, QuaRot, https://arxiv.org/abs/2404.00456 (rotation); Lin et al. 2025, Twilight,
https://arxiv.org/abs/2502.02770 (low-bit keys as an index).
Differs from the papers: 2 bits, keys centred on the mean of the first tokens (one constant a row and head, which moves
all scores of a query alike and so needs not be stored for each block), scale by least squares.
"""

import torch

from ..blocks.arena import Plane
from ..codecs.rotated import rotation
from .base import Reader

_SCALES = (0.8, 0.9, 1.0, 1.15, 1.3)
_STEP = 0.9957  # of the best uniform quantizer with four levels for a normal distribution (Max 1960, table II)
_MASKS = (3, 12, 48, 192)
_SIGN = 128
# From so many tokens on, integer products a head at a time are faster than one batched product of floats.
_MIN_INTEGER_LENGTH = 4096


class KeyIndex(Reader):
    """Codes `[B, Hkv, N, block_size * D / 4]` (uint8) and a float16 scale a token.

    A byte holds one code of each of four equal segments of the channels. The highest code is stored as a signed number,
    so that all four are signed bytes where they lie, without a shift.
    """

    fit_length = 128

    def planes(self, num_heads, head_dim, dtype):
        padded = -(-head_dim // 4) * 4
        codes = Plane(num_heads, self.block_size * padded // 4, torch.uint8)
        return (codes, Plane(num_heads, self.block_size, torch.float16))

    def fit(self, keys, is_token):
        weight = is_token[:, None, :, None].float()
        return [(keys.float() * weight).sum(dim=2, keepdim=True) / weight.sum(dim=2, keepdim=True).clamp(min=1)]

    def summarise(self, keys, fitted):
        rotated = _rotate(keys.float() - fitted[0])
        spread = rotated.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-9)
        codes, scale, error = None, None, None
        for factor in _SCALES:
            own = (rotated / (spread * factor * _STEP) + 2).floor_().clamp_(0, 3)
            levels = (own - 1.5) * _STEP
            fit = (levels * rotated).sum(dim=-1, keepdim=True) / levels.square().sum(dim=-1, keepdim=True)
            own_error = (levels * fit - rotated).square_().sum(dim=-1, keepdim=True)
            if codes is None:
                codes, scale, error = own, fit, own_error
                continue
            is_better = own_error < error
            codes, scale = torch.where(is_better, own, codes), torch.where(is_better, fit, scale)
            error = torch.minimum(error, own_error)
        segments = codes.to(torch.uint8).unflatten(-1, (4, -1)).unbind(dim=-2)
        packed = segments[0] | segments[1] << 2 | segments[2] << 4 | (segments[3] << 6 ^ _SIGN)
        planes = [packed, scale.half()]
        return [plane.unflatten(2, (-1, self.block_size)).flatten(3) for plane in planes]

    def scores(self, query, summaries, fitted):
        codes = summaries[0].unflatten(3, (self.block_size, -1)).flatten(2, 3)  # [B, H, T, D / 4]
        scale = summaries[1].flatten(2).unsqueeze(2).float()  # [B, H, 1, T]
        rotated = _rotate(query.float())
        # The last segment is stored less by two.
        offset = 1.5 * rotated.sum(dim=-1) - 2 * rotated.unflatten(-1, (4, -1))[..., -1, :].sum(dim=-1)
        product = _products(rotated, codes)
        constant = (query.float() * fitted[0]).sum(dim=-1, keepdim=True)
        return product.sub_(offset.unsqueeze(-1)).mul_(scale * _STEP).add_(constant)


def _rotate(states: torch.Tensor) -> torch.Tensor:
    """Rotated `[..., D]`, filled up with zeros to a multiple of four channels."""
    dim = states.shape[-1]
    rotated = states @ rotation(dim).to(states.device).T
    return torch.nn.functional.pad(rotated, (0, -dim % 4))


def _products(query: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """`query` `[B, H, G, D]` (float32) times the codes in `[B, H, T, D / 4]` bytes: `[B, H, G, T]`, float32."""
    segments = query.unflatten(-1, (4, -1)).unbind(dim=-2)
    if codes.device.type == "cpu" and codes.shape[2] >= _MIN_INTEGER_LENGTH:
        return _integer_products(segments, codes)
    parts = [(codes & mask).view(torch.int8).float() / 4**i for i, mask in enumerate(_MASKS)]
    return sum(torch.matmul(own, part.transpose(2, 3)) for own, part in zip(segments, parts, strict=True))


def _integer_products(segments: tuple[torch.Tensor, ...], codes: torch.Tensor) -> torch.Tensor:
    """The same with the query in 8 bits, an error far below that of the codes, and no byte made a float.

    One head at a time: PyTorch has no batched product of bytes.
    """
    scale = torch.stack([part.abs().amax(dim=-1, keepdim=True) for part in segments]).amax(dim=0).clamp(min=1e-9) / 127
    small = [(part / scale).round().to(torch.int8).flatten(0, 1) for part in segments]
    own_codes = codes.flatten(0, 1)
    total = torch.empty(*small[0].shape[:2], codes.shape[2], dtype=torch.int32)
    for head, out in enumerate(total):
        for i, mask in enumerate(_MASKS):
            part = torch._int_mm(small[i][head], (own_codes[head] & mask).view(torch.int8).T)
            torch.mul(part, 64, out=out) if i == 0 else out.add_(part, alpha=4 ** (3 - i))
    return total.unflatten(0, codes.shape[:2]).float().mul_(scale / 64)
