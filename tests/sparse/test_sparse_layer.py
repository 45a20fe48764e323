"""Sparse reads: attention equals full attention with the unread tokens masked, whatever happens to the cache."""

import copy
import sys

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

import hf_kvcache
from hf_kvcache import make_cache
from hf_kvcache.layers.block_layer import BlockLayer
from hf_kvcache.layers.sliding_layer import SlidingBlockLayer
from hf_kvcache.masks import visible
from hf_kvcache.readers.index import KeyIndex
from hf_kvcache.readers.quest import Quest
from hf_kvcache.readers.selection import Selection
from hf_kvcache.sparse.sparse_layer import SparseReadLayer

pytestmark = pytest.mark.core

READERS = ("quest", "index", "page_mean", "sparq", "double_sparsity", "topk")
SMALL = {"num_sink_tokens": 3, "num_recent_tokens": 5, "block_size": 4, "keep_ratio": 0.2}
PROMPT = 139  # tokens: past those that `index` and `double_sparsity` wait for, and no multiple of the block size


class Oracle:
    """Forwards of one model with a sparse cache, beside a full cache with what was not read masked in attention."""

    def __init__(self, monkeypatch, tiny_model, name: str = "llama", attention: str = "sdpa"):
        self.read: dict[int, torch.Tensor] = {}  # layer -> bool [B, Hkv, T], of the last step
        # layer -> what stands for all others: log mass [B, Hq, 1, 1] and value [B, Hq, 1, D]
        self.rest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.model, self.oracle = tiny_model(name), tiny_model(name)
        for layer in (*self.model.model.layers, *self.oracle.model.layers):
            # Attention of few tokens: no two masses are equal but for rounding.
            layer.self_attn.q_proj.weight.data *= 30
        self.model.set_attn_implementation(attention)
        self.is_eager = attention == "eager"
        self.in_place = 0  # steps by the decode kernel
        select, attend_in_place = SparseReadLayer._select, SparseReadLayer._attend_in_place

        def note(layer, selection, query, mask):
            tokens = selection.columns(torch.arange(layer.seen).expand(layer.batch_size, 1, 1, -1))
            is_read = torch.ones_like(tokens) if selection.is_read is None else selection.seen(None)
            times = torch.zeros(*tokens.shape[:2], layer.seen).scatter_add_(2, tokens, is_read.float())
            assert times.max() == 1, "a token was read twice"
            self.read[layer.context.layer_idx] = times > 0
            if layer.reader.unread:
                self.rest[layer.context.layer_idx] = rest_of(layer, times > 0, query, mask)

        def rest_of(layer, is_read, query, mask):
            count = layer._num_candidates()
            scores = layer.reader.scores(query, layer.summaries.materialize(), layer.fitted)[..., :count]
            hidden = is_read[:, :, None, :count]
            hidden = hidden if mask is None else hidden | ~visible(mask)[..., :count]
            mass = (scores.double().exp() * ~hidden).sum(-1) * layer.reader.unread
            value = layer.mean_value.repeat_interleave(query.shape[2], dim=1)
            return mass.log().float().flatten(1, 2)[..., None, None], value

        def recording(layer, query, mask):
            selection = select(layer, query, mask)
            note(layer, selection, query, mask)
            return selection

        def recording_in_place(layer, call, query, scaling, mask):
            packed = query.view(query.shape[0], call.call.struct.heads, -1, query.shape[3]) * scaling
            note(layer, select(layer, packed, mask), packed, mask)
            wanted, wanted_bytes = self.read[layer.context.layer_idx], layer.read_bytes
            found, attend = [], call.attend
            with monkeypatch.context() as patch:
                patch.setattr(call, "attend", lambda *args: found.append(attend(*args)) or found[0])
                output = attend_in_place(layer, call, query, scaling, mask)
            slots, unit = found[0][1], layer.reader.unit
            always, _ = layer._always(layer._num_candidates() // unit)
            rest = torch.ones_like(always.units, dtype=torch.bool) if always.is_read is None else always.is_read
            units = torch.cat([slots.clamp(min=0) // unit, always.units], dim=2)
            is_read = torch.cat([slots >= 0, rest], dim=2)
            read_anyway = always.length + slots.shape[2] * unit
            note(layer, Selection(units, is_read, unit, read_anyway), packed, mask)
            if query.dtype == torch.float32:
                # A channel of a query may be rounded the other way: its scores then differ by a 500th.
                most = 0.03 if isinstance(layer.reader, KeyIndex | Quest) else 0.0
                others = (self.read[layer.context.layer_idx] != wanted).float().mean()
                assert others <= most, "the kernel chooses as PyTorch does"
            assert layer.read_bytes == wanted_bytes
            self.in_place += 1
            return output

        monkeypatch.setattr(SparseReadLayer, "_attend_in_place", recording_in_place)
        monkeypatch.setattr(SparseReadLayer, "_select", recording)
        monkeypatch.setitem(AttentionInterface._global_mapping, "oracle", self._attend)
        monkeypatch.setitem(
            AttentionMaskInterface._global_mapping, "oracle", eager_mask if self.is_eager else sdpa_mask
        )
        self.oracle.set_attn_implementation("oracle")

    def _attend(self, module, query, key, value, mask, **kwargs):
        if (read := self.read.get(module.layer_idx)) is not None:
            own = read.repeat_interleave(query.shape[1] // read.shape[1], dim=1).unsqueeze(2)
            if self.is_eager:
                mask = mask.masked_fill(~own, torch.finfo(mask.dtype).min)
            else:
                mask = own if mask is None else own & mask
        if module.layer_idx in self.rest:
            return self._attend_with_rest(module, query, key, value, mask, kwargs["scaling"]), None
        plain = (
            sys.modules[type(module).__module__].eager_attention_forward if self.is_eager else sdpa_attention_forward
        )
        return plain(module, query, key, value, mask, **kwargs)

    def _attend_with_rest(self, module, query, key, value, mask, scaling):
        log_mass, mean_value = self.rest[module.layer_idx]
        key, value = (state.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for state in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        if mask is not None:
            scores = scores + mask if self.is_eager else scores.masked_fill(~mask, -torch.inf)
        parts = [scores, log_mass]
        if (sinks := getattr(module, "sinks", None)) is not None:  # of gpt-oss: a share that goes to no value
            parts.append(sinks.view(1, -1, 1, 1).expand_as(log_mass))
        weights, count = torch.cat(parts, dim=3).softmax(-1), key.shape[2]
        output = weights[..., :count] @ value + weights[..., count : count + 1] * mean_value
        return output.transpose(1, 2)

    def check(self, run, cache, full, ids, mask=None, steps=None):
        """Run `ids` token by token (or in one chunk, `steps=1`) through both, and compare the logits of real tokens."""
        past, length = cache.get_seq_length(), ids.shape[1] // (steps or ids.shape[1])
        for begin in range(0, ids.shape[1], length):
            self.read.clear()
            self.rest.clear()
            part = ids[:, begin : begin + length]
            own = None if mask is None else mask[:, : past + begin + length]
            got = run(self.model, cache, part, own)
            expected = run(self.oracle, full, part, own)
            real = torch.ones_like(part) if own is None else own[:, -length:]
            torch.testing.assert_close(got[real > 0], expected[real > 0], atol=1e-4, rtol=1e-4)


@pytest.fixture
def oracle(monkeypatch, tiny_model):
    return lambda *args: Oracle(monkeypatch, tiny_model, *args)


def dynamic(model) -> DynamicCache:
    return DynamicCache(config=model.config)


AMOUNTS = ({"keep_ratio": 0.2}, {"keep_ratio": None, "budget": 40}, {"keep_ratio": None, "top_p": 0.5})


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("amount", AMOUNTS, ids=["ratio", "budget", "top_p"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_a_step_equals_full_attention_without_the_unread_tokens(
    name, amount, is_padded, oracle, make_ids, left_pad, run
):
    both = oracle()
    ids, mask = left_pad(make_ids(3, PROMPT + 10), [PROMPT + 10, 90, 31] if is_padded else [10**6] * 3)
    mask = mask if is_padded else None
    cache, full = make_cache(both.model, name, **(SMALL | amount)), dynamic(both.oracle)
    both.check(run, cache, full, ids[:, :PROMPT], mask, steps=1)
    assert not both.read, "a prompt reads everything"
    both.check(run, cache, full, ids[:, PROMPT:], mask)
    read = both.read[1].sum(-1)
    assert (read < PROMPT).all()
    if amount == {"keep_ratio": None, "budget": 40}:
        assert read.max() <= 40 + 3 + 2 * 3  # whole blocks of 4 around sinks, and the closed part of the recent one


@pytest.mark.parametrize("name", ["quest", "page_mean", "index", "topk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_read_where_they_lie(name, dtype, oracle, make_ids, run):
    """The decode kernel takes the chosen blocks in place, those of each head and row by their own ids."""
    both = oracle()
    options = {"block_size": 16, "num_sink_tokens": 4, "num_recent_tokens": 5, "keep_ratio": 0.3}
    if dtype == torch.bfloat16:
        both.model.to(dtype)
        cache = make_cache(both.model, name, **options)
        run(both.model, cache, make_ids(2, 200), chunks=[190, *[1] * 10])
        assert both.in_place == 2 * 10
        return
    cache, full = make_cache(both.model, name, **options), dynamic(both.oracle)
    ids = make_ids(3, 240)
    both.check(run, cache, full, ids[:, :190], steps=1)
    both.check(run, cache, full, ids[:, 190:212])
    for c in (cache, full):
        c.reorder_cache(torch.tensor([2, 0, 0]))
    both.check(run, cache, full, ids[:, 212:240])
    assert both.in_place == 2 * 50


@pytest.mark.parametrize("name", ["quest", "index"])
@pytest.mark.parametrize(
    ("model", "attention"),
    [("llama", "eager"), ("gemma3", "sdpa"), ("gemma3", "eager"), ("gemma2", "eager"), ("gpt_oss", "eager")],
)
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_the_softmax_stays_the_models_own(name, model, attention, is_padded, oracle, make_ids, left_pad, run):
    both = oracle(model, attention)
    ids, mask = left_pad(make_ids(2, PROMPT + 4), [PROMPT + 4, 70] if is_padded else [10**6] * 2)
    cache, full = make_cache(both.model, name, **SMALL), dynamic(both.oracle)
    assert isinstance(cache.layers[-1], SparseReadLayer)
    assert isinstance(cache.layers[0], SparseReadLayer if model == "llama" else SlidingBlockLayer)
    both.check(run, cache, full, ids[:, :PROMPT], mask, steps=1)
    both.check(run, cache, full, ids[:, PROMPT:], mask)
    assert both.read[1].sum(-1).max() < 50


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
def test_what_generate_does_to_a_cache(name, is_padded, oracle, make_ids, left_pad, run):
    """Chunks, beams, rejected tokens, a second turn: summaries follow, and rows keep choosing for themselves."""
    both = oracle()
    ids, mask = left_pad(make_ids(3, 260), [260, 220, 190] if is_padded else [10**6] * 3)
    cache, full = make_cache(both.model, name, **SMALL), dynamic(both.oracle)
    both.check(run, cache, full, ids[:, :PROMPT], mask, steps=1)
    both.check(run, cache, full, ids[:, PROMPT : PROMPT + 6], mask)
    for beams in ([2, 0, 0], [0, 1, 1]):
        order = torch.tensor(beams)
        mask = mask[order]
        cache.reorder_cache(order)
        full.reorder_cache(order)
        past = cache.get_seq_length()
        both.check(run, cache, full, ids[:, past : past + 7], mask)
    for count in (1, 6):
        cache.crop(-count)
        full.crop(-count)
        past = cache.get_seq_length()
        both.check(run, cache, full, ids[:, past : past + 9], mask)
    both.check(run, cache, full, ids[:, past + 9 : past + 39], mask, steps=1)
    both.check(run, cache, full, ids[:, past + 39 : past + 44], mask)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: cache.fork()], ids=["deepcopy", "fork"])
def test_copies_choose_for_themselves(name, duplicate, oracle, make_ids, run):
    both = oracle()
    prompt, endings = make_ids(2, PROMPT), [make_ids(2, 9, seed=seed) for seed in (1, 2)]
    cache = make_cache(both.model, name, **SMALL)
    full = dynamic(both.oracle)
    both.check(run, cache, full, prompt, steps=1)
    pairs = [(cache, full), (duplicate(cache), copy.deepcopy(full))]
    for step in range(9):
        for pair, ending in zip(pairs, endings, strict=True):
            both.check(run, *pair, ending[:, step : step + 1])
    cache.reset()
    assert hf_kvcache.measure(cache) == 0
    both.check(run, *pairs[1], endings[0])
    moved = pairs[1][0].to("cpu")
    both.check(run, moved, pairs[1][1], endings[1])
    both.check(run, cache, dynamic(both.oracle), make_ids(1, PROMPT, seed=3), steps=1)


@pytest.mark.parametrize("name", READERS)
def test_a_copy_after_a_step_by_the_kernel_goes_on_alike(name, tiny_model, make_ids, run):
    """The call that a layer keeps for its next step points into its own tensors."""
    model, ids = tiny_model("llama"), make_ids(2, PROMPT + 8)
    cache = make_cache(model, name, **SMALL)
    run(model, cache, ids[:, : PROMPT + 4], chunks=[PROMPT, 1, 1, 1, 1])
    copies = [cache, copy.deepcopy(cache), cache.fork(), copy.copy(cache.fork())]
    outputs = [run(model, c, ids[:, PROMPT + 4 :], chunks=[1] * 4) for c in copies]
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


@pytest.mark.parametrize("name", ["quest", "index", "page_mean", "double_sparsity"])
def test_a_block_is_summarised_once(name, tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(2, 200)
    cache = make_cache(model, name, **SMALL)
    run(model, cache, ids[:, :PROMPT])
    layer = cache.layers[0]
    encoded = []
    summarise = layer.reader.summarise
    layer.reader.summarise = lambda keys, fitted: encoded.append(keys.shape[2]) or summarise(keys, fitted)
    before = [plane.clone() for plane in layer.summaries.materialize()]
    run(model, cache, ids[:, PROMPT:], chunks=[1] * 61)
    assert encoded == [4] * 16
    assert layer.summaries.length == 50
    for old, new in zip(before, layer.summaries.materialize(), strict=True):
        assert torch.equal(new[:, :, : old.shape[2]], old)


@pytest.mark.parametrize("name", ["quest", "index", "page_mean", "double_sparsity"])
def test_summaries_of_tokens_taken_back_are_forgotten(name, tiny_model, make_ids, run):
    """The first layer's keys depend on tokens alone, so that its summaries must be those of a new cache."""
    model, ids, wrong = tiny_model("llama"), make_ids(2, 200), make_ids(2, 30, seed=1)
    cache, fresh = make_cache(model, name, **SMALL), make_cache(model, name, **SMALL)
    run(model, cache, ids[:, :PROMPT])
    run(model, cache, wrong)
    cache.crop(-30)
    cache.reorder_cache(torch.tensor([1, 0]))
    run(model, cache, ids[[1, 0], PROMPT:])
    run(model, fresh, ids[:, :PROMPT])
    run(model, fresh, ids[:, PROMPT:])
    for plane, wanted in zip(*(c.layers[0].summaries.materialize() for c in (cache, fresh)), strict=True):
        torch.testing.assert_close(plane, wanted[[1, 0]])


def test_the_report_counts_what_a_step_reads(tiny_model, make_ids, run):
    model, ids = tiny_model("llama"), make_ids(2, 141)
    cache = make_cache(model, "quest", **(SMALL | {"keep_ratio": 0.5}))
    run(model, cache, ids, chunks=[140, 1])
    token = 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 in float32
    blocks = (141 - 5) // 4  # closed blocks before the recent tokens: 34, of which 17 are read
    read = 17 * 4 + 4 + (141 - 4 * blocks)  # and the block of the sinks, and what follows the last of them
    bounds = 2 * (16 + 2)  # of a block: 32 codes of 4 bits and a float16 scale, for each head
    assert cache.report().read_bytes == 2 * 2 * (read * token + blocks * bounds)
    report = cache.report()
    assert report.tokens_kept == 141, "everything stays stored"
    assert report.read_ratio == report.read_bytes / report.stored_bytes < 1
    assert f"({report.read_ratio:.0%} of stored)" in str(report)


def test_the_first_layers_can_read_everything(tiny_model):
    layers = make_cache(tiny_model("llama"), "quest", dense_layers=1).layers
    assert [type(layer) for layer in layers] == [BlockLayer, SparseReadLayer]
    layers = make_cache(tiny_model("gemma3"), "quest", dense_layers=1).layers
    assert [type(layer) for layer in layers] == [SlidingBlockLayer, BlockLayer]


@pytest.mark.parametrize("name", READERS)
def test_generate_reads_sparsely_by_name(name, tiny_model, make_ids):
    model, ids = tiny_model("llama"), make_ids(2, 30)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options)
    hf_kvcache.enable()
    got = model.generate(ids, **options, cache_implementation=name)
    assert torch.equal(got, expected), "fewer tokens than the default budget"
    for more in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
        expected = model.generate(ids[:1], **options, **more)
        settings = {"cache_implementation": name, "cache_config": SMALL | {"top_p": 1.0, "keep_ratio": None}}
        assert torch.equal(model.generate(ids[:1], **options, **more, **settings), expected)


@pytest.mark.parametrize("name", ["quest+snapkv", "index+kvzip", "sliding_window+quest", "quest+index"])
def test_what_does_not_compose_is_refused(name, tiny_model):
    with pytest.raises(ValueError, match="do not compose"):
        make_cache(tiny_model("llama"), name)


def test_a_budget_leaves_room_beside_sinks_and_recent_tokens(tiny_model):
    with pytest.raises(ValueError, match="budget=36 leaves no room beside 36 sinks and recent tokens"):
        make_cache(tiny_model("llama"), "quest", budget=36)
    with pytest.raises(ValueError, match="budget and top_p all say how much"):
        make_cache(tiny_model("llama"), "quest", budget=50, top_p=0.5)


def test_masks_a_head_are_refused_where_attention_takes_none(tiny_model, make_ids, run):
    """A flash kernel takes no mask of its own for each head."""
    model = tiny_model("llama")
    cache = make_cache(model, "quest", **(SMALL | {"keep_ratio": None, "top_p": 0.3}))
    run(model, cache, make_ids(1, PROMPT))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(NotImplementedError, match="reads other tokens for each head, which attn_implementation"):
        cache.layers[0]._attend_selected(
            None, model.model.layers[0].self_attn, torch.ones(1, 4, 1, 16), torch.ones(1, 1, 1, PROMPT) > 0, (), {}
        )
