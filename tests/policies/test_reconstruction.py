"""The second reading of a prompt against the attention weights of the model itself, eager."""

import functools
import math

import pytest
import torch

from hf_kvcache import make_cache
from hf_kvcache.eviction.compression import _read_again, retrieval_scores
from hf_kvcache.policies.reconstruction import Reconstruction

pytestmark = pytest.mark.core


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("chunk_length", [64, 23])
@pytest.mark.parametrize("looks", ["near", "all"])
def test_kvzip_scores_are_the_highest_weights_of_a_second_reading(
    looks, is_padded, chunk_length, tiny_model, run, make_ids, left_pad, monkeypatch
):
    """The model attends under a mask that says what each query looks at."""
    model = tiny_model("llama")
    first, slots = torch.tensor([[0], [17 if is_padded else 0]]), torch.arange(40)
    ids, mask = left_pad(make_ids(2, 40), [40, 40 - int(first[1])])
    cache = make_cache(model, "kvzip", budget=25)
    run(model, cache, ids, mask)
    sizes = {"QUERIES_AT_A_TIME": 10, "NUM_BEFORE": 3, "NUM_AFTER": 2, "NUM_SINKS": 2, "NUM_OWN": 4, "NUM_SAMPLED": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(f"hf_kvcache.policies.reconstruction._{name}", value)
    kind = functools.partial(Reconstruction, looks_at_all=looks == "all")
    reads = _read_again(model, cache, ids, 0, kind, chunk_length)
    model.set_attn_implementation("eager")
    expected = [torch.zeros(2, 2, 40) for _ in reads]
    sinks = ((slots >= first) & (slots < first + 2)).any(0)  # those of one row are seen in the others too
    for begin in range(0, 40, chunk_length):
        again = slots[begin : begin + chunk_length]
        both, positions = torch.cat([ids, ids[:, again]], 1), torch.arange(40 + len(again)) - first
        positions[:, 40:] -= (first - begin).clamp(min=0)  # no gap for padding
        block = (again - begin) // 10 * 10 + begin  # where the queries that run together begin
        stop = torch.minimum(block + 10, again[-1] + 1)
        near = (slots >= block[:, None] - 3) & (slots < stop[:, None] + 2) | sinks
        own = (again >= block[:, None] - 4) & (again <= again[:, None])
        if looks == "all":
            near, own = torch.ones_like(near), again <= again[:, None]
        bias = torch.full((2, 40 + len(again), 40 + len(again)), torch.finfo(torch.float32).min)
        bias[:, :40, :40] = bias[:, :40, :40].triu(1)
        bias[:, 40:, :40][:, near] = 0.0
        bias[:, 40:, 40:][:, own] = 0.0
        scored = near.clone()
        for row, is_near in enumerate(near):  # a sample stands for what is not near, another one for each block
            if len(far := (~is_near).nonzero().squeeze(1)):
                stride = -(-len(far) // 4)
                sample = far[row // 10 % stride :: stride]
                bias[:, 40 + row, sample] = math.log(len(far) / len(sample))
                scored[row, sample] = True
        bias = bias.masked_fill(~torch.cat([mask, mask[:, again]], 1)[:, None].bool(), torch.finfo(torch.float32).min)
        with torch.no_grad():
            out = model(both, attention_mask=bias[:, None], position_ids=positions.clamp(min=0), output_attentions=True)
        for most, weights in zip(expected, out.attentions, strict=True):
            real = (
                (weights[:, :, 40:, :40] / bias[:, None, 40:, :40].clamp(min=0.0).exp())
                * mask[:, None, again, None]
                * scored
            )
            most.copy_(torch.maximum(most, real.unflatten(1, (2, 2)).amax(dim=(2, 3))))
    for read, most in zip(reads, expected, strict=True):
        is_real = mask[:, None].bool().expand_as(most)
        torch.testing.assert_close(read.most[is_real], most[is_real], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
@pytest.mark.parametrize("chunk_length", [64, 23])
def test_windows_and_states_read_along_from_the_end_of_the_prompt(name, chunk_length, tiny_model, run, make_ids):
    """Each chunk of the second reading is read as if it alone came after the prompt, in all layers."""
    # With larger weights than usual, so that recurrent states have a say.
    model, ids = tiny_model(name, initializer_range=0.1), make_ids(2, 40)
    cache = make_cache(model, "kvzip", budget=25)
    run(model, cache, ids)
    before = [layer.state().tensors for layer in cache.layers]
    reads = _read_again(model, cache, ids, 0, functools.partial(Reconstruction, looks_at_all=True), chunk_length)
    for layer, tensors in zip(cache.layers, before, strict=True):
        for key, tensor in layer.state().tensors.items():
            assert torch.equal(tensor, tensors[key])
    model.set_attn_implementation("eager")
    expected = [torch.zeros(2, 2, 40) for _ in reads]
    for chunk in ids.split(chunk_length, dim=1):
        with torch.no_grad():
            attentions = model(torch.cat([ids, chunk], 1), use_cache=False, output_attentions=True).attentions
        full = [each for each in attentions if each is not None][-len(reads) :]  # gemma3: the last of two is global
        for most, weights in zip(expected, full, strict=True):
            weights = weights[:, :, 40:, :40].unflatten(1, (2, 2))
            most.copy_(torch.maximum(most, weights.amax(dim=(2, 3))))
    for read, most in zip(reads, expected, strict=True):
        torch.testing.assert_close(read.most, most, atol=1e-5, rtol=1e-4)


def test_retrieval_heads_are_those_that_look_up_what_came_before(tiny_model):
    model = tiny_model("llama")
    scores = retrieval_scores(model, lambda: make_cache(model, "streaming_llm"))
    assert [len(heads) for heads in scores] == [2, 2]
    assert all(0 < score < 256 for heads in scores for score in heads)
    assert retrieval_scores(model, None) is scores  # once a model
    cache = make_cache(model, "duo_attention", budget=40, pattern=[[0.1, 0.9], [0.5, 0.2]])
    places = [layer.policy.places for layer in cache.layers]
    assert places == [[3, 0], [1, 2]]
