"""Sparse reads of encoded tokens: a step equals dense attention to the decoded cache without what was not chosen."""

import copy

import pytest
import torch

import hf_kvcache
from hf_kvcache import calibrate, load_cache, make_cache
from hf_kvcache.kernels import decode
from hf_kvcache.quantization.coded_layer import CodedLayer
from hf_kvcache.readers import ReadBudget
from hf_kvcache.sparse.sparse_coded_layer import SparseCodedLayer

pytestmark = pytest.mark.core

NAMES = ("quest+int4", "index+int4", "page_mean+fp8", "index+fp8", "quest+turboquant", "index+turboquant", "index+int2")
BLOCKWISE = ("quest+nf4", "index+fp4", "page_mean+bnb8", "index+bnb8")
TRANSFORM = ("quest+transform", "page_mean+transform", "index+transform")
# Each head in a way of its own: widths of keys and values, layer by layer.
HEADS = ("quest+int4 by head", "index+int4 by head", "page_mean+turboquant by head", "index+turboquant by head")
WIDTHS = [[[2, 4], [4, 2]], [4, [2, 4]]]
SMALL = {"keep_ratio": 0.3, "num_sink_tokens": 3, "num_recent_tokens": 5, "residual_length": 7}
AMOUNTS = ({"block_size": 8}, {"keep_ratio": None, "budget": 260}, {"keep_ratio": None, "top_p": 0.4}, {"group": "max"})
PROMPT = 333


class Oracle:
    """Compares each sparse step of a cache with one written down here, from what its layers hold decoded."""

    def __init__(self, monkeypatch):
        self.steps = self.in_kernel = 0
        self.shares = []  # of the encoded tokens that were read
        attend, in_kernel = SparseCodedLayer._attend, SparseCodedLayer._call

        def checked(layer, base, module, query, tail, mask, args, kwargs):
            output, weights = attend(layer, base, module, query, tail, mask, args, kwargs)
            if query.shape[2] == 1:
                wanted = self._attend(layer, query, tail, mask, kwargs["scaling"])
                real = mask is None or mask[:, 0, 0, -1]
                torch.testing.assert_close(output[real], wanted[real], atol=1e-4, rtol=1e-4)
                self.steps += 1
            return output, weights

        def counted(*args):
            self.in_kernel += 1
            return in_kernel(*args)

        monkeypatch.setattr(SparseCodedLayer, "_attend", checked)
        monkeypatch.setattr(SparseCodedLayer, "_call", counted)

    def _attend(self, layer, query, tail, mask, scaling):
        coded, first = layer._decode(0, layer.coded.stop), layer.sinks.first_slot
        keys, values = (torch.cat(pair, dim=2) for pair in zip(coded, tail, strict=True))
        slots = torch.arange(keys.shape[2])
        is_sink = (slots >= first[:, None]) & (slots < first[:, None] + layer.num_sink_tokens)
        for row, slot in enumerate(first.tolist()):  # they are exact
            count = min(layer.num_sink_tokens, keys.shape[2] - slot)
            for states, sinks in zip((keys, values), layer.sinks.states, strict=True):
                states[row, :, slot : slot + count] = sinks[row, :, :count]
        rows, heads = keys.shape[:2]
        packed = query.view(rows, heads, -1, query.shape[3])
        scores = packed @ keys.transpose(2, 3) * scaling
        visible = torch.ones(rows, 1, 1, keys.shape[2], dtype=torch.bool) if mask is None else mask
        scores = scores.masked_fill(~visible, -torch.inf)
        is_read = self._choose(layer, packed * scaling, scores, visible[:, 0, 0], is_sink)
        return (scores.masked_fill(~is_read, -torch.inf).softmax(-1) @ values).reshape(rows, 1, -1, values.shape[3])

    def _choose(self, layer, packed, scores, visible, is_sink):
        """Which tokens each head reads, `[B, H, 1, T]`: a row, a head and a unit at a time."""
        length, unit, budget = layer.coded_length, layer.reader.unit, layer.budget
        estimates = scores[..., :length]
        if layer.summaries is not None:
            blocks = layer.group_length // layer.reader.block_size
            pages = [p.unflatten(3, (blocks, -1)).flatten(2, 3) for p in layer.summaries.materialize()]
            estimates = layer.reader.scores(packed, pages, layer.fitted)
        is_read = torch.zeros(*scores.shape[:2], 1, scores.shape[3], dtype=torch.bool)
        is_read[..., length:] = True
        is_read |= is_sink[:, None, None]
        is_exact = is_read[:, 0, 0].clone()
        for row in range(scores.shape[0]):
            can = visible[row, :length].unflatten(0, (-1, unit)).any(1) & ~is_sink[row, :length].unflatten(
                0, (-1, unit)
            ).all(1)
            for head in range(scores.shape[1]):
                exact = scores[row, head][:, is_exact[row]].logsumexp(-1, keepdim=True)
                own = estimates[row, head].masked_fill(~can, -torch.inf)
                share = torch.cat([own, exact], dim=1).softmax(1)
                share = share.mean(0) if budget.group == "mean" else share.amax(0)
                order = share[:-1].argsort(descending=True)
                if budget.top_p is not None:
                    reached, chosen = float(share[-1]), []
                    for i in order.tolist():
                        if can[i] and reached < budget.top_p * float(share.sum()):
                            chosen.append(i)
                            reached += float(share[i])
                else:
                    recent = scores.shape[3] - length
                    if budget.budget is None:
                        count = round(budget.keep_ratio * length / unit)
                    else:
                        count = min(length, budget.budget - budget.num_sink_tokens - recent) // unit
                    chosen = [i for i in order.tolist() if can[i]][: max(1, count)]
                for i in chosen:
                    is_read[row, head, 0, i * unit : (i + 1) * unit] = True
        self.shares.append(float(is_read[..., :length].float().mean()))
        return is_read


@pytest.fixture
def oracle(monkeypatch):
    return Oracle(monkeypatch)


@pytest.fixture
def no_kernel(monkeypatch):
    monkeypatch.setattr(decode, "can_serve", lambda *args: False)


CALIBRATIONS = {}


def make(model, case: str, **options):
    """The cache of a case: a name, and perhaps "by head" after it."""
    name, _, by_head = case.partition(" ")
    sizes = {"q_group_size": 32} if "int" in name else {}
    if by_head:
        sizes["bits"] = WIDTHS
    if "transform" in name:
        key = type(model).__name__, getattr(model.config, "head_dim", None)
        if key not in CALIBRATIONS:
            ids = torch.randint(2, 97, (1, 600), generator=torch.Generator().manual_seed(9))
            CALIBRATIONS[key] = calibrate(model, ids)
        sizes["calibration"] = CALIBRATIONS[key]
    return make_cache(model, name, **sizes | options)


def model_of(tiny_model):
    """Random weights, with queries so large that attention is of few tokens: no two masses are nearly equal."""
    model = tiny_model("llama", head_dim=32, max_position_embeddings=1024)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 60
    return model


@pytest.mark.parametrize(
    ("has_kernel", "is_padded"),
    [(True, False), (True, True), (False, True)],
    ids=["kernel-whole", "kernel-padded", "torch-padded"],
)
@pytest.mark.parametrize("name", [*NAMES, *BLOCKWISE, *TRANSFORM, *HEADS])
def test_a_step_equals_dense_attention_without_the_unchosen(
    name, is_padded, has_kernel, oracle, tiny_model, make_ids, left_pad, run, request
):
    if name in BLOCKWISE:
        pytest.importorskip("bitsandbytes")
    if not has_kernel:
        request.getfixturevalue("no_kernel")
    model = model_of(tiny_model)
    ids, mask = left_pad(make_ids(3, PROMPT + 5), [PROMPT + 5, 200, 131] if is_padded else [10**6] * 3)
    for amount in AMOUNTS:
        cache = make(model, name, **SMALL | amount)
        run(model, cache, ids, mask if is_padded else None, chunks=[PROMPT, *[1] * 5])
    assert oracle.steps == 4 * 10
    # Those of the tests have two runs of heads in each layer.
    assert oracle.in_kernel == (oracle.steps * (2 if "by head" in name else 1) if has_kernel else 0)
    assert 0.03 < sum(oracle.shares) / len(oracle.shares) < 0.6


@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize(
    "name",
    ["quest+int4", "index+turboquant", "page_mean+fp8", "index+transform", "quest+transform", "quest+int4 by head"],
)
def test_beams_forks_and_tokens_taken_back(name, has_kernel, oracle, tiny_model, make_ids, left_pad, run, request):
    if not has_kernel:
        request.getfixturevalue("no_kernel")
    model = model_of(tiny_model)
    ids, mask = left_pad(make_ids(3, 700), [700, 500, 420])
    cache = make(model, name, **SMALL)
    run(model, cache, ids[:, :PROMPT], mask[:, :PROMPT])

    def steps(of, count):
        past = of.get_seq_length()
        run(model, of, ids[:, past : past + count], mask[:, : past + count], chunks=[1] * count)

    steps(cache, 6)
    order = torch.tensor([2, 0, 0])
    ids, mask = ids[order], mask[order]
    cache.reorder_cache(order)
    steps(cache, 40)
    forked, copied = cache.fork(), copy.deepcopy(cache)
    steps(forked, 3)
    for count in (5, 150):  # in the tail, and into a group
        cache.crop(-count)
        steps(cache, 4)
    run(model, cache, ids[:, cache.get_seq_length() :][:, :90], mask[:, : cache.get_seq_length() + 90])
    steps(cache, 4)
    steps(copied, 2)
    cache.reset()
    assert hf_kvcache.measure(cache) == hf_kvcache.measure(make(model, name, **SMALL))  # a transform's bases
    assert oracle.steps == 2 * (6 + 40 + 3 + 8 + 4 + 2)


EVERY = ("quest+int4", "index+int4", "page_mean+turboquant", *TRANSFORM, "index+int4 by head")


@pytest.mark.parametrize("name", EVERY)
def test_a_budget_for_everything_is_the_quantized_cache(name, tiny_model, make_ids, run):
    model, ids = model_of(tiny_model), make_ids(2, PROMPT + 8)
    shared = {"num_sink_tokens": 3, "residual_length": 7}
    plain = make(model, name.split("+")[1], **shared)
    expected = run(model, plain, ids, chunks=[PROMPT, *[1] * 8])
    for amount in ({"budget": 10**6}, {"keep_ratio": 1.0}, {"top_p": 1.0}):
        cache = make(model, name, **shared, num_recent_tokens=5, **amount)
        assert torch.equal(run(model, cache, ids, chunks=[PROMPT, *[1] * 8]), expected)
        assert all(layer.stored_length == plain.layers[0].stored_length for layer in cache.layers)


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", [*EVERY, "quest+turboquant by head", "page_mean+fp8"])
def test_all_units_are_the_quantized_cache(name, is_padded, tiny_model, make_ids, left_pad, run, monkeypatch):
    """Chosen one by one and decoded alone, in whatever order, as all together."""
    model = tiny_model("llama", head_dim=32, max_position_embeddings=1024)
    ids, mask = left_pad(make_ids(3, 310), [310, 200, 139] if is_padded else [10**6] * 3)
    mask, shared = mask if is_padded else None, {"num_sink_tokens": 3, "residual_length": 7}
    expected = run(model, make(model, name.split("+")[1], **shared), ids, mask, chunks=[300, *[1] * 10])
    monkeypatch.setattr(ReadBudget, "reads_all", lambda *args: False)
    cache = make(model, name, **shared, num_recent_tokens=5, keep_ratio=1.0)
    got = run(model, cache, ids, mask, chunks=[300, *[1] * 10])
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["quest+int4", "index+fp8", "page_mean+turboquant", "index+transform", "quest+transform", "index+int4 by head"],
)
def test_a_saved_cache_goes_on_with_the_same_bits(name, tiny_model, make_ids, run, tmp_path):
    model, ids = model_of(tiny_model), make_ids(2, PROMPT + 20)
    cache = make(model, name, **SMALL)
    run(model, cache, ids[:, : PROMPT + 5], chunks=[PROMPT, *[1] * 5])
    cache.save(tmp_path / "cache.safetensors")
    loaded = load_cache(model, tmp_path / "cache.safetensors")
    for of in (cache, loaded):
        of.crop(-2)
    rest = ids[:, PROMPT + 3 :]
    expected = run(model, cache, rest, chunks=[1] * 17)
    assert torch.equal(run(model, loaded, rest, chunks=[1] * 17), expected)


@pytest.mark.parametrize("name", ["quest+transform", "index+transform", "index+bnb8", "quest+int4 by head"])
def test_a_step_decodes_no_group(name, tiny_model, make_ids, left_pad, run, monkeypatch):
    """Neither where the kernel chooses, nor where the model has a softmax of its own."""
    if "bnb8" in name:
        pytest.importorskip("bitsandbytes")
    model, (ids, mask) = model_of(tiny_model), left_pad(make_ids(2, PROMPT + 4), [PROMPT + 4, 200])
    cache = make(model, name, **SMALL)
    run(model, cache, ids[:, :PROMPT], mask[:, :PROMPT])
    monkeypatch.setattr(SparseCodedLayer, "_decode", lambda *args: pytest.fail("a group was decoded"))
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        past = cache.get_seq_length()
        run(model, cache, ids[:, past : past + 2], mask[:, : past + 2], chunks=[1, 1])
    assert 0 < cache.report().read_ratio < 1


@pytest.mark.parametrize("name", ["quest+transform", "index+transform"])
def test_half_precision(name, tiny_model, make_ids, run):
    model, ids = copy.deepcopy(model_of(tiny_model)), make_ids(2, PROMPT + 2)
    cache = make(model, name, **SMALL)
    expected = run(model, cache, ids, chunks=[PROMPT, 1, 1])
    model = model.to(torch.bfloat16)
    cache = make(model, name, **SMALL)
    logits = run(model, cache, ids, chunks=[PROMPT, 1, 1])
    assert cache.layers[0].keys.dtype == logits.dtype == torch.bfloat16
    assert (logits[:, -1].float() - expected[:, -1]).norm() < 0.3 * expected[:, -1].norm()


@pytest.mark.parametrize("name", ["quest+int4", "index+int4", "quest+transform", "index+transform"])
@pytest.mark.parametrize(("model", "attention"), [("gemma2", "eager"), ("gpt_oss", "eager"), ("llama", "eager")])
def test_the_softmax_stays_the_models_own(name, model, attention, tiny_model, make_ids, left_pad, run):
    """With everything chosen but no shortcut taken, as the quantized cache decodes for the model's own attention."""
    model = tiny_model(model, max_position_embeddings=1024)
    model.set_attn_implementation(attention)
    ids, mask = left_pad(make_ids(2, 150), [150, 90])
    shared = {"num_sink_tokens": 3, "residual_length": 7} | ({"q_group_size": 16} if "int4" in name else {})
    expected = run(model, make(model, name.split("+")[1], **shared), ids, mask, chunks=[145, *[1] * 5])
    cache = make(model, name, **shared, num_recent_tokens=5, top_p=0.99999999)
    assert isinstance(cache.layers[-1], SparseCodedLayer)
    got = run(model, cache, ids, mask, chunks=[145, *[1] * 5])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["quest+int4", "index+int4", "index+transform", "quest+int4 by head"])
def test_generate_by_name(name, tiny_model, make_ids, oracle):
    model, ids = model_of(tiny_model), make_ids(2, 300)
    hf_kvcache.enable()
    options = make(model, name, **SMALL).recipe.changed_options
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_config": options}
    settings["cache_implementation"] = name.partition(" ")[0]
    assert model.generate(ids, **settings).shape == (2, 308)
    assert oracle.steps == 2 * 7
    assert model.generate(ids[:1], **settings, num_beams=3).shape == (1, 308)
    assert oracle.steps > 2 * 13


def test_the_report_counts_what_a_step_reads(tiny_model, make_ids, run):
    model, ids = model_of(tiny_model), make_ids(2, 200)
    exact = {"num_sink_tokens": 3, "num_recent_tokens": 5, "residual_length": 7}
    read, heads = {}, 2
    for name in ("page_mean+fp8", "index+fp8"):
        cache = make_cache(model, name, keep_ratio=0.5, **exact)
        run(model, cache, ids, chunks=[199, 1])
        layer = cache.layers[0]
        assert layer.coded_length == 192
        read[name] = layer.read_bytes
        tail = 2 * heads * (200 - 192) * 32 * 4 * 2  # rows, heads, tokens, float32 keys and values of 32
        tail += layer.sinks.nbytes
        token = heads * (32 + 2)  # a key or a value, and its scale
        if name == "page_mean+fp8":
            wanted = 2 * (12 * 8 * 2 * token + 24 * heads * 32 * 2)  # half of 24 pages, and a float16 mean of each
        else:
            wanted = 2 * (192 * token + 96 * token)  # all keys, half of the values
        assert read[name] == wanted + tail
    assert cache.report().read_ratio < 1


@pytest.mark.parametrize("name", ["sparq+int4", "topk+int8", "double_sparsity+fp8", "compressed+int4"])
def test_what_does_not_compose_is_refused_by_name(name, tiny_model):
    first, second = name.split("+")
    with pytest.raises(ValueError, match=f"'{first}' and '{second}' do not compose"):
        make_cache(tiny_model("llama"), name)


def test_pages_must_fit_groups_and_the_tail_recent_tokens(tiny_model):
    model = model_of(tiny_model)
    with pytest.raises(ValueError, match="quest reads pages of block_size=24 tokens, and this codec encodes groups"):
        make_cache(model, "quest+fp8", block_size=24)
    with pytest.raises(ValueError, match="num_recent_tokens=32, and residual_length=8 of them are exact"):
        make_cache(model, "index+fp8", residual_length=8)
    layers = make_cache(model, "quest+int4", q_group_size=32, dense_layers=1).layers
    assert [type(layer) for layer in layers] == [CodedLayer, SparseCodedLayer]


def test_nothing_stands_for_what_is_not_read_of_encoded_tokens(tiny_model):
    with pytest.raises(ValueError, match="give unread to 'index' of exact tokens alone"):
        make_cache(model_of(tiny_model), "index+int4", unread=0.5)


def test_the_mean_keys_of_bounds_follow_their_rows(tiny_model, make_ids, run, tmp_path):
    """All scores of a row have the same part by it: a choice of so many pages would not show another row's."""
    model = model_of(tiny_model)
    cache = make(model, "quest+int4", **SMALL)
    run(model, cache, make_ids(3, PROMPT))
    means = [layer.fitted[0].clone() for layer in cache.layers]
    assert not torch.equal(means[0][0], means[0][2])
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.save(tmp_path / "cache.safetensors")
    for copied in (cache, cache.fork(), load_cache(model, tmp_path / "cache.safetensors")):
        for layer, mean in zip(copied.layers, means, strict=True):
            assert torch.equal(layer.fitted[0], mean[[2, 0, 0]])
    cache.reset()
    assert not any(layer.fitted for layer in cache.layers)
