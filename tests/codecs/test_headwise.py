"""Different codecs for different heads: each head is what its own codec makes of it."""

import numpy as np
import torch

from hf_kvcache.codecs.base import Shape
from hf_kvcache.codecs.by_head import HeadCodecs
from hf_kvcache.codecs.headwise import HeadwiseCodec
from hf_kvcache.codecs.integer import KeyIntegerCodec, ValueIntegerCodec

SHAPE = Shape(num_heads=3, dim=32, dtype=torch.float32)


def test_heads_are_encoded_by_their_own_codec_in_their_own_place():
    few, many = (KeyIntegerCodec(nbits, q_group_size=32, clip_search=False) for nbits in (2, 8))
    codec = HeadwiseCodec([many, few, many], starts=[0, 1, 2])
    states = torch.randn(2, 3, 96, 32, generator=torch.Generator().manual_seed(0))
    encoded = codec.encode(states)
    assert [(p.num_heads, p.dim, p.dtype) for p in codec.planes(SHAPE)] == [
        (e.shape[1], e.shape[-1], e.dtype) for e in encoded
    ]
    assert 8 * sum(e.nbytes for e in encoded) / states.numel() == (8 + 2 + 8) / 3 + 1
    decoded = codec.decode(encoded, SHAPE)
    for head, own in enumerate([many, few, many]):
        alone = own.decode(own.encode(states[:, head : head + 1]), SHAPE._replace(num_heads=1))
        assert torch.equal(decoded[:, head : head + 1], alone)
    assert [codec.of_head(head) for head in range(3)] == [many, few, many]


def test_heads_that_are_encoded_alike_are_one_kind():
    few, many = (KeyIntegerCodec(nbits, q_group_size=32, clip_search=False) for nbits in (2, 8))
    value = ValueIntegerCodec(4, group_length=32, q_group_size=32, clip_search=False)
    codecs = HeadCodecs(HeadwiseCodec([many, few, many], starts=[0, 1, 2]), value)
    assert codecs.pairs == [(many, value), (few, value)]
    assert codecs.heads == [[0, 2], [1]]
    # Groups of two rows, by head: 2, 1 and 0, then 1, 3 and 1.
    assert codecs.kinds_of(np.array([[2, 1, 0], [1, 3, 1]])).tolist() == [0, 0, 1, 0, 1, 1, 1, 0]
    shapes = [SHAPE._replace(num_heads=1)] * 2
    assert codecs.token_bytes(3, shapes) == 32 * ((8 + 2 + 8) + 3 * 4 + 6 * 1) / 8
    assert HeadCodecs(few, value).token_bytes(3, shapes) == 32 * 3 * (2 + 4 + 2 * 1) / 8
