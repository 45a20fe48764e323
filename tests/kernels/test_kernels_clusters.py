"""A step of compressed attention by the decode kernel is the same step in PyTorch, whatever lies where."""

import copy

import pytest
import torch

from hf_kvcache import make_cache
from hf_kvcache.kernels import native

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(native.library() is None, reason="no C++ compiler"),
]

STEPS, PROMPT = 24, 403
LIBRARY = native.library()


@pytest.fixture
def steps_of(monkeypatch, make_ids, left_pad, run):
    """`steps_of(model, dtype, lengths, options)`: logits of the same steps with and without the kernel."""

    def both(model, lengths, **options):
        small = {"num_recent_tokens": 5, "cluster_size": 4, "segment_length": 40, "keep_ratio": 0.2}
        ids, mask = left_pad(make_ids(len(lengths), PROMPT + STEPS), [length + STEPS for length in lengths])
        cache = make_cache(model, "compressed", **(small | options))
        run(model, cache, ids[:, :PROMPT], mask[:, :PROMPT], chunks=[PROMPT])
        outputs = []
        for library in (LIBRARY, None):
            monkeypatch.setattr(native, "library", lambda library=library: library)
            outputs.append(run(model, copy.deepcopy(cache), ids[:, PROMPT:], mask, chunks=[1] * STEPS))
        return outputs

    return both


@pytest.mark.parametrize("lengths", [[PROMPT], [PROMPT, 370, 90]], ids=["whole", "padded"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("summaries", ["int8", "exact"])
@pytest.mark.parametrize("sinks", [0, 4])
def test_wherever_blocks_begin(sinks, summaries, block_size, lengths, tiny_model, steps_of):
    """Segments close on the way, and end within blocks."""
    options = {"num_sink_tokens": sinks, "summaries": summaries, "block_size": block_size}
    got, expected = steps_of(tiny_model("llama"), lengths, **options)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("top_p", [None, 0.7])
def test_however_many_heads_share_keys(heads, top_p, tiny_model, steps_of):
    model = tiny_model("llama", num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=32)
    options = {} if top_p is None else {"top_p": top_p, "keep_ratio": None}
    got, expected = steps_of(model, [PROMPT, 100], **options)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(dtype, tiny_model, steps_of):
    """The kernel computes in float32: it is about as near to the same weights in float32 as PyTorch, or nearer."""
    got, rounded = steps_of(tiny_model("llama").to(dtype), [PROMPT, 100])
    full, _ = steps_of(tiny_model("llama").to(dtype).float(), [PROMPT, 100])
    errors = [(output.float() - full).square().mean() for output in (got, rounded)]
    assert errors[0] < 1.5 * errors[1]
    assert errors[0] < 1e-3 * full.square().mean()


def test_with_several_threads(tiny_model, steps_of):
    model, threads = tiny_model("llama"), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        got, expected = steps_of(model, [PROMPT, 300, 90])
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_clusters_of_the_same_rate_are_read_while_there_is_room(tiny_model):
    """A query of zeros tells no cluster from another, and every token weighs the same, read or not."""
    cache = make_cache(tiny_model("llama"), "compressed", budget=60, cluster_size=4, segment_length=40)
    layer = cache.layers[0]
    keys, values = torch.randn(2, 1, 2, 300, 16, generator=torch.Generator().manual_seed(0))
    layer.fill(keys, values)
    call = layer._cluster_call(4)
    output = call.attend(torch.zeros(1, 4, 1, 16), None, None)
    largest = int(layer.sides["clusters"].materialize()[-3].max())
    room = 60 - 4 - 32
    assert 2 * (room - largest) < call.read_length <= 2 * room
    torch.testing.assert_close(output[0, 0], values[0].mean(1).repeat_interleave(2, 0), atol=2e-3, rtol=0)
