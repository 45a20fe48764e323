"""Key index: choose tokens by their scores with a copy of the keys in 2 bits a channel.

Stores `2 + 16 / D` bits for each key channel besides the keys: 7% of the bytes of 16-bit keys and values at `D=64`, all
of which each step reads. Tokens are chosen one by one; the choice is nearly that of the exact scores (`topk`). What is
not read is not left out: the mean value of the first tokens stands for it, with a share of its estimated attention.
On SmolLM2 that halves the KL divergence (12.5% read), to less than that of exact scores without it.
Papers: Ashkboos et al. 2024, QuaRot, https://arxiv.org/abs/2404.00456 (rotation); Lin et al. 2025, Twilight,
https://arxiv.org/abs/2502.02770 (low-bit keys as an index); Ribar et al. 2024, SparQ Attention,
https://arxiv.org/abs/2312.04985 (a mean value for what is not read).
Differs from the papers: 2 bits, keys centred on the mean of the first tokens (one constant a row and head, which moves
all scores of a query alike and so needs not be stored for each block), scale by least squares; the mean value gets half
of the estimated attention: all of it, as in the paper, gained nothing.
"""

import torch

from ..blocks.arena import Plane
from ..codecs.packing import pack, unpack
from ..codecs.rotated import rotation
from ..kernels import structs
from .base import Reader, mean_state, round_to_bytes

_SCALES = (0.8, 0.9, 1.0, 1.15, 1.3)
_STEP = 0.9957  # of the best uniform quantizer with four levels for a normal distribution (Max 1960, table II)


class KeyIndex(Reader):
    """Codes `[B, Hkv, N, block_size * D / 4]` (uint8) and a float16 scale a token.

    A byte holds one code of each of four equal segments of the channels (`codecs.packing`). A code stands for itself
    less 1.5, times the scale. Queries are rounded to 8 bits, an error far below that of the codes, so that the decode
    kernel multiplies bytes.

    Args:
        block_size: tokens a block.
        unread: share of the estimated attention to tokens that are not read that goes to a mean value instead, in
            [0, 1]. The codes' errors make the estimate too large.
    """

    fit_length = 128

    def __init__(self, block_size: int, *, unread: float):
        super().__init__(block_size)
        self.unread = unread

    def planes(self, num_heads, head_dim, dtype):
        padded = -(-head_dim // 4) * 4
        codes = Plane(num_heads, self.block_size * padded // 4, torch.uint8)
        return (codes, Plane(num_heads, self.block_size, torch.float16))

    def fit(self, keys, is_token):
        return [mean_state(keys, is_token)]

    def summarise(self, keys, fitted):
        rotated = _rotate(keys.float() - fitted[0])
        spread = rotated.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-9)
        codes, scale, error = None, None, None
        for factor in _SCALES:
            own = (rotated / (spread * factor * _STEP) + 2).floor_().clamp_(0, 3)
            levels = own - 1.5
            fit = (levels * rotated).sum(dim=-1, keepdim=True) / levels.square().sum(dim=-1, keepdim=True)
            own_error = (levels * fit - rotated).square_().sum(dim=-1, keepdim=True)
            if codes is None:
                codes, scale, error = own, fit, own_error
                continue
            is_better = own_error < error
            codes, scale = torch.where(is_better, own, codes), torch.where(is_better, fit, scale)
            error = torch.minimum(error, own_error)
        planes = [pack(codes.to(torch.uint8), 2), scale.half()]
        return [plane.unflatten(2, (-1, self.block_size)).flatten(3) for plane in planes]

    def prepare(self, query, fitted):
        return round_to_bytes(_rotate(query.float())), (query.float() * fitted[0]).sum(dim=-1)

    def rows(self, summaries):
        codes = unpack(summaries[0].unflatten(3, (self.block_size, -1)), 2).flatten(2, 3)  # [B, H, T, D]
        return (codes.float() - 1.5) * summaries[1].flatten(2).unsqueeze(-1).float()

    def estimate(self, planes, fitted, head_dim, blocks=1):
        if head_dim % 16:
            return None
        key = structs.index_store(*planes, head_dim, 2, blocks * self.block_size, rotation(head_dim))
        return structs.Estimate(key=key, per_slot=blocks * self.block_size, mean=fitted[0].data_ptr(), rounds=True)


def _rotate(states: torch.Tensor) -> torch.Tensor:
    """Rotated `[..., D]`, filled up with zeros to a multiple of four channels."""
    dim = states.shape[-1]
    rotated = states @ rotation(dim).to(states.device).T
    return torch.nn.functional.pad(rotated, (0, -dim % 4))
