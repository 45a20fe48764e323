"""Compressed attention: clusters by key, members or a summary of them in one softmax, nothing counted twice."""

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_kvcache
from hf_kvcache import make_cache
from hf_kvcache.compressed.clusters import cluster_tokens
from hf_kvcache.compressed.compressed_layer import CompressedLayer
from hf_kvcache.kernels import native

pytestmark = pytest.mark.core

SMALL = {"num_sink_tokens": 3, "num_recent_tokens": 5, "block_size": 4, "cluster_size": 4, "segment_length": 16}
EXACT = SMALL | {"summaries": "exact"}
PROMPT = 91


@pytest.fixture
def chooses_always(monkeypatch):
    """Take the path through clusters also where all of them are chosen."""
    monkeypatch.setattr(CompressedLayer, "_reads_all", lambda layer: not layer.segments)


def dynamic(model) -> DynamicCache:
    return DynamicCache(config=model.config)


def heads_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- clusters


def test_every_member_is_in_one_cluster_and_means_are_those_of_the_members():
    keys, values = heads_of(0, 2, 3, 50, 8), heads_of(1, 2, 3, 50, 6)
    is_member = torch.arange(50) >= torch.tensor([[0], [13]])
    found = cluster_tokens(keys, values, is_member, 7)
    assert (found.keys.shape, found.values.shape) == ((2, 3, 7, 8), (2, 3, 7, 6))
    for row in range(2):
        for head in range(3):
            seen = []
            for cluster, (begin, size) in enumerate(found.spans[row, head].tolist()):
                members = found.members[row, head, begin : begin + size].long()
                seen += members.tolist()
                if size:
                    distances = (keys[row, head, members] - found.keys[row, head, cluster]).norm(dim=-1)
                    torch.testing.assert_close(found.radii[row, head, cluster], distances.max())
                    for mean, states in ((found.keys, keys), (found.values, values)):
                        expected = states[row, head, members].mean(0)
                        torch.testing.assert_close(mean[row, head, cluster], expected)
            assert sorted(seen) == torch.nonzero(is_member[row]).flatten().tolist()


def test_k_means_finds_groups_of_keys_wherever_they_stand():
    centres = 10 * heads_of(0, 5, 8)
    which = torch.arange(60) % 5
    keys = centres[which] + 0.1 * heads_of(1, 60, 8)
    found = cluster_tokens(keys[None, None], keys[None, None], torch.ones(1, 60, dtype=torch.bool), 5)
    assert found.spans[0, 0, :, 1].tolist() == [12] * 5
    for begin, size in found.spans[0, 0].tolist():
        assert len(set(which[found.members[0, 0, begin : begin + size].long()].tolist())) == 1


def test_rows_do_not_see_each_others_padding():
    keys, values = heads_of(0, 2, 2, 40, 8), heads_of(1, 2, 2, 40, 8)
    is_member = torch.arange(40) >= torch.tensor([[0], [15]])
    together = cluster_tokens(keys, values, is_member, 5)
    other = keys.clone()
    other[1, :, :15] = 100.0
    again = cluster_tokens(other, values, is_member, 5)
    for first, second in zip(together, again, strict=True):
        torch.testing.assert_close(first, second)


# --- the layer


@pytest.mark.parametrize("amount", [{"keep_ratio": 1.0}, {"budget": 500}, {"top_p": 1.0}], ids=str)
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), ("llama", "eager"), ("gemma3", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")],
)
def test_with_every_cluster_read_it_is_full_attention(
    amount, is_padded, name, attention, tiny_model, make_ids, left_pad, run, chooses_always
):
    model = tiny_model(name)
    model.set_attn_implementation(attention)
    ids, mask = left_pad(make_ids(3, PROMPT + 20), [PROMPT + 20, 60, 24] if is_padded else [10**6] * 3)
    cache, full = make_cache(model, "compressed", **(SMALL | amount)), dynamic(model)
    chunks = [PROMPT, *[1] * 20]
    got, expected = (run(model, c, ids, mask, chunks=chunks) for c in (cache, full))
    assert isinstance(cache.layers[-1], CompressedLayer)
    assert len(cache.layers[-1].segments) > 1
    real = mask[:, :] > 0
    torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("has_kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("spread", [0.0, 0.8])
@pytest.mark.parametrize("amount", [{"keep_ratio": 0.3}, {"budget": 40}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("summaries", ["exact", "int8"])
def test_a_step_is_one_softmax_over_tokens_and_summaries(
    summaries, amount, spread, group, is_padded, has_kernel, tiny_model, make_ids, left_pad, run, monkeypatch
):
    """Against the same rule written for one row and head at a time."""
    if not has_kernel:
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C++ compiler")
    model = tiny_model("llama")
    ids, mask = left_pad(make_ids(2, PROMPT), [PROMPT, 50] if is_padded else [PROMPT] * 2)
    cache = make_cache(model, "compressed", group=group, spread=spread, summaries=summaries, **(SMALL | amount))
    run(model, cache, ids, mask)
    layer = cache.layers[0]
    query, scale, heads, groups = heads_of(5, 2, 4, 1, 16), 0.3, 2, 2
    columns = mask.bool()[:, None, None]
    got = layer._attend_selected(
        sdpa_attention_forward, model.model.layers[0].self_attn, query, columns, (), {"scaling": scale}
    )[0]
    first = mask.argmax(1)
    for row in range(2):
        exact = [t for t in range(PROMPT) if mask[row, t] and (t >= layer.clustered_length or t < first[row] + 3)]
        for head in range(heads):
            own = query[row, groups * head : groups * (head + 1), 0]
            keys, values = (state[row, head] for state in layer.table.materialize())
            planes = layer.sides["clusters"].materialize()
            centres, means = (state[row, head] for state in layer.store.states(planes, layer.mean_key))
            begins, sizes, _, radii = (plane[row, head] for plane in planes[-4:])
            spans = torch.cat([begins, sizes], dim=1)
            members = layer.sides["members"].materialize()[0][row, head, :, 0].long()
            clusters = [members[begin : begin + size].tolist() for begin, size in spans.tolist()]
            sizes = torch.tensor([float(len(cluster)) for cluster in clusters])
            mass = (scale * own @ centres.T).exp() * sizes
            anyway = (scale * own @ keys[exact].T).exp().sum(-1)
            raised = mass * (spread * scale * own.norm(dim=-1, keepdim=True) * radii.T).exp()
            ranks = raised / (raised.sum(-1) + anyway)[:, None]
            share = mass / (mass.sum(-1) + anyway)[:, None]
            anyway = anyway / (mass.sum(-1) + anyway)
            share, anyway, ranks = (s.mean(0) if group == "mean" else s.amax(0) for s in (share, anyway, ranks))
            chosen, tokens, reached = [], 0, float(anyway)
            for cluster in (ranks / sizes.clamp(min=1)).argsort(descending=True).tolist():
                if "top_p" in amount:
                    if reached >= amount["top_p"] * float(share.sum() + anyway) or share[cluster] == 0:
                        break
                    reached += float(share[cluster])
                tokens += len(clusters[cluster])
                limit = 40 - 3 - 5 if "budget" in amount else round(0.3 * layer.clustered_length)
                if "top_p" not in amount and tokens > limit:
                    break
                chosen.append(cluster)
            read = exact + [token for cluster in chosen for token in clusters[cluster]]
            rest = [i for i in range(len(clusters)) if i not in chosen and clusters[i]]
            weights = torch.cat([(scale * own @ keys[read].T).exp(), (mass)[:, rest]], dim=1)
            expected = weights @ torch.cat([values[read], means[rest]]) / weights.sum(1, keepdim=True)
            torch.testing.assert_close(got[row, 0, groups * head : groups * (head + 1)], expected, atol=1e-5, rtol=1e-4)


def test_clusters_of_equal_tokens_are_exact(tiny_model):
    """One of five tokens, over and over: a summary weighs what its members do."""
    model = tiny_model("llama")
    cache = make_cache(model, "compressed", **(EXACT | {"budget": 9, "num_sink_tokens": 0, "num_recent_tokens": 5}))
    which = torch.randint(5, (80,), generator=torch.Generator().manual_seed(0))
    states = [heads_of(seed, 1, 2, 5, 16)[:, :, which] for seed in (0, 1)]
    layer = cache.layers[0]
    layer.fill(*states)
    assert layer.clustered_length == 75
    query = heads_of(2, 1, 4, 1, 16)
    got = layer._attend_selected(
        sdpa_attention_forward, model.model.layers[0].self_attn, query, None, (), {"scaling": 0.25}
    )[0]
    expected = sdpa_attention_forward(model.model.layers[0].self_attn, query, *states, None, scaling=0.25)[0]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_summaries_beat_leaving_out(tiny_model, make_ids, run):
    """The same clusters, with and without the pseudo-tokens of those that are not read."""
    model, ids = tiny_model("llama"), make_ids(4, 250)
    errors = {}
    expected = run(model, dynamic(model), ids, chunks=[249, 1])[:, -1].log_softmax(-1)
    for name in ("compressed", "topk"):
        options = (
            SMALL if name == "compressed" else {key: SMALL[key] for key in ("num_sink_tokens", "num_recent_tokens")}
        )
        cache = make_cache(model, name, keep_ratio=0.1, **options)
        got = run(model, cache, ids, chunks=[249, 1])[:, -1].log_softmax(-1)
        errors[name] = (expected.exp() * (expected - got)).sum(-1).mean()
    assert errors["compressed"] < 0.2 * errors["topk"]


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_what_generate_does_to_a_cache(is_padded, tiny_model, make_ids, left_pad, run, chooses_always):
    """Chunks, beams, rejected tokens across segments, copies: with all clusters read it stays full attention."""
    model = tiny_model("llama")
    ids, mask = left_pad(make_ids(3, 220), [220, 200, 170] if is_padded else [10**6] * 3)
    cache, full = make_cache(model, "compressed", keep_ratio=1.0, **SMALL), dynamic(model)

    def check(count, chunks=None):
        past = cache.get_seq_length()
        part = ids[:, past : past + count]
        got, expected = (run(model, c, part, mask, chunks=chunks or [1] * count) for c in (cache, full))
        real = mask[:, past : past + count] > 0
        torch.testing.assert_close(got[real], expected[real], atol=1e-4, rtol=1e-4)

    check(60, chunks=[50, 10])
    check(20)
    for beams in ([2, 0, 0], [0, 1, 1]):
        order = torch.tensor(beams)
        mask = mask[order]
        for c in (cache, full):
            c.reorder_cache(order)
        check(7)
    for count in (2, 30):
        segments = cache.layers[0].segments
        for c in (cache, full):
            c.crop(-count)
        assert (cache.layers[0].segments == segments) == (count == 2)
        check(12)
    for duplicate in (lambda c: c.fork(), copy.deepcopy):
        kept = cache
        cache, full = duplicate(cache), copy.deepcopy(full)
        check(6)
        kept.reset()
    cache.to("cpu")
    check(25, chunks=[25])
    check(8)


def test_a_segment_is_clustered_once(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(2, 160)
    cache = make_cache(model, "compressed", keep_ratio=0.2, **SMALL)
    run(model, cache, ids[:, :PROMPT])
    layer = cache.layers[0]
    assert layer.segments == ((86, 21),)
    before = {name: [plane.clone() for plane in side.materialize()] for name, side in layer.sides.items()}
    run(model, cache, ids[:, PROMPT:], chunks=[1] * 69)
    assert layer.segments == ((86, 21), (102, 25), (118, 29), (134, 33), (150, 37))
    for name, planes in before.items():
        for old, new in zip(planes, layer.sides[name].materialize(), strict=True):
            assert torch.equal(new[:, :, : old.shape[2]], old)
    report = cache.report()
    assert report.tokens_kept == 160
    assert report.read_ratio < 0.6


def test_generate_by_name(tiny_model, make_ids):
    model, ids = tiny_model("llama"), make_ids(2, 60)
    options = {"max_new_tokens": 30, "do_sample": False}
    hf_kvcache.enable()
    for more in ({}, {"num_beams": 2}):
        expected = model.generate(ids, **options, **more)
        got = model.generate(ids, **options, **more, cache_implementation="compressed")
        assert torch.equal(got, expected), "fewer tokens than the default budget"
        sparse = model.generate(
            ids, **options, **more, cache_implementation="compressed", cache_config=SMALL | {"keep_ratio": 0.3}
        )
        assert sparse.shape == expected.shape
