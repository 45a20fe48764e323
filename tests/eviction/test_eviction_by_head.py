"""Eviction with codecs that differ from head to head: `transform`, and a width for each head.

The oracle takes a cache apart without the library's way of reading it: it unpacks the stored bytes of each group of
each head, turns keys by the model's own tables, and attends in full.
"""

import copy

import numpy as np
import pytest
import torch

import hf_kvcache
from hf_kvcache import Calibration, calibrate, load_cache, make_cache, measure
from hf_kvcache.codecs import build_codecs
from hf_kvcache.codecs.base import Shape
from hf_kvcache.codecs.rotated import RotatedValueCodec, codebook
from hf_kvcache.codecs.transform import allocate, mixing
from hf_kvcache.eviction import kept_attention, kept_kernel
from hf_kvcache.eviction.kept_layer import KeptLayer
from hf_kvcache.eviction.kept_tokens import KeptTokens

pytestmark = pytest.mark.core

LENGTH, NEW = 331, 180
CHUNKS = [1] * 6 + [20] * 8 + [1] * 14  # newer tokens are encoded on the way, and then read
DIM = 32
CONFIG = {"head_dim": DIM, "max_position_embeddings": 1024}
OPTIONS = {"budget": 190, "num_sink_tokens": 3, "num_recent_tokens": 5, "residual_length": 40}
KEY_BITS = 1.5  # at which some coefficients have no bits
_WIDTHS = [[[2, 8], 4], [8, [4, 2]]]  # keys and values of each layer, and of their heads where these differ
MORE = {
    "int4": {"q_group_size": 32, "bits": _WIDTHS},
    "turboquant": {"bits": [[[4, 2], [2, 3]], 2]},
    "transform": {"key_bits": KEY_BITS},
}
NAMES = [
    *("kvzip+transform", "adakv+transform", "snapkv+transform", "duo_attention+transform"),
    *("kvzip+int4", "adakv+int4", "duo_attention+turboquant"),
]
CLOSE = {"atol": 1e-4, "rtol": 0.0}


@pytest.fixture(params=[False, True], ids=["full", "padded"])
def batch(request, make_ids, left_pad):
    ids = make_ids(2, LENGTH + NEW)
    return left_pad(ids, [LENGTH + NEW - 44, LENGTH + NEW] if request.param else [LENGTH + NEW] * 2)


@pytest.fixture(scope="module")
def fitted(tiny_model, make_ids):
    """A tiny model and the calibration of its keys."""
    model = tiny_model("llama", **CONFIG)
    return model, calibrate(model, make_ids(1, 600, seed=9))


def new_cache(fitted, name, **more):
    model, calibration = fitted
    encoding = name.split("+")[1]
    options = OPTIONS | MORE[encoding] | ({"calibration": calibration} if encoding == "transform" else {})
    if name.startswith("duo_attention"):
        options["pattern"] = [[0.9, 0.1], [0.2, 0.8]]
    return make_cache(model, name, **options | more)


def compressed(fitted, name, run, ids, mask, **more):
    cache = new_cache(fitted, name, **more)
    run(fitted[0], cache, ids[:, :LENGTH], mask)
    cache.compress(ids[:, :LENGTH])
    return cache


# --- the oracle


class Oracle:
    """Keys and values of kept tokens, group by group, from what `KeptTokens.state` says is stored."""

    def __init__(self, fitted, name):
        self.model, self.calibration = fitted
        self.encoding = name.split("+")[1]

    def coded(self, layer, store, row, head, first_slot):
        """Slots, keys and values of the encoded tokens of a head of a row of a store."""
        state = store.state().tensors
        num_groups = state["num_groups"]
        before = int(num_groups.flatten()[: row * 2 + head].sum())
        if not num_groups[row, head]:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, DIM), torch.zeros(0, DIM)
        slots = state["slots"][before : before + int(num_groups[row, head])].flatten()
        keys, values = self._decoded(layer, head, self._planes(layer, state, row, head, num_groups))
        is_token = slots >= 0
        if self.encoding == "transform":
            keys = self._rotated(keys, (slots - first_slot).clamp(min=0))
        return slots[is_token].long(), keys[is_token], values[is_token]

    def _planes(self, layer, state, row, head, num_groups):
        """The planes of one head's groups: heads that are encoded alike share them, in the order of rows and heads."""
        kinds = [self._kind(layer, other) for other in range(2)]
        known = list(dict.fromkeys(kinds))
        kind = known.index(kinds[head])
        begin = sum(self._count(layer, kinds.index(other)) for other in known[:kind])
        own = [state[f"plane_{index}"] for index in range(begin, begin + self._count(layer, head))]
        first = sum(
            int(num_groups[r, h])
            for r in range(row + 1)
            for h in range(2)
            if kinds[h] == kinds[head] and (r, h) < (row, head)
        )
        return [plane[first : first + int(num_groups[row, head])] for plane in own]

    def _kind(self, layer, head):
        if self.encoding == "transform":
            return head
        return tuple(width if isinstance(width, int) else width[head] for width in self._widths(layer))

    def _widths(self, layer):
        entry = MORE[self.encoding]["bits"][layer]
        return (entry, entry) if isinstance(entry, int) else entry

    def _codecs(self, layer, head):
        if self.encoding == "transform":
            return None, RotatedValueCodec(2)
        key_bits, value_bits = self._kind(layer, head)
        options = {"q_group_size": 32, "clip_search": "int" in self.encoding} | {
            "key_bits": key_bits,
            "value_bits": value_bits,
        }
        return build_codecs(self.encoding, options, DIM)

    def _count(self, layer, head):
        keys, values = self._codecs(layer, head)
        shape = Shape(1, DIM, torch.float32)
        return (2 if keys is None else len(keys.planes(shape))) + len(values.planes(shape))

    def _decoded(self, layer, head, planes):
        shape = Shape(1, DIM, torch.float32)
        codecs = self._codecs(layer, head)
        split = 2 if codecs[0] is None else len(codecs[0].planes(shape))
        values = codecs[1].decode([plane[None, None] for plane in planes[split:]], shape)[0, 0]
        if codecs[0] is not None:
            return codecs[0].decode([plane[None, None] for plane in planes[:split]], shape)[0, 0], values
        return torch.cat([self._transformed(layer, head, *group) for group in zip(*planes[:2], strict=True)]), values

    def _transformed(self, layer, head, codes, scales):
        """Keys `[128, D]` of one group before their rotary embedding, by the formulas of transform coding."""
        layers = self.calibration.layers
        weighted = torch.stack([s.variance * s.importance[:, None] for s in layers.values()])
        bits = allocate(weighted, round(KEY_BITS * weighted.numel()))[layer, head]
        codes, begin, coefficients = codes.numpy(), 0, torch.zeros(DIM, 128)
        for width in sorted(set(bits.tolist()) - {0}, reverse=True):
            own = (bits == width).nonzero().flatten()
            found, shift = np.zeros((len(own), 128), dtype=np.int64), 0
            for piece in (p for p in (1, 2, 4, 8) if width & p):
                size = 128 * piece // 8  # bytes of a coefficient
                packed = codes[begin : begin + len(own) * size].reshape(len(own), size)
                begin += len(own) * size
                for token in range(128):
                    part = packed[:, token % size] >> (token // size * piece) & (2**piece - 1)
                    found[:, token] |= part.astype(np.int64) << shift
                shift += piece
            coefficients[own] = codebook(width)[torch.from_numpy(found)]
        assert begin == len(codes)
        coefficients = coefficients * torch.exp2((scales.float() - 128) / 8)
        statistics = layers[layer]
        plain = mixing(bits).mT.float() @ coefficients * statistics.variance[head].sqrt()[:, None]
        return (torch.linalg.inv(statistics.basis[head]).mT @ plain).mT + statistics.mean[head]

    def _rotated(self, keys, positions):
        cos, sin = self.model.model.rotary_emb(keys, positions[None])
        half = DIM // 2
        return keys * cos[0] + torch.cat([-keys[:, half:], keys[:, :half]], dim=1) * sin[0]

    def held(self, layer, kept, tail, row, head):
        """Slots, keys and values of everything that a head of a row of an evicting layer holds."""
        stored, parts = kept.kept.rows[row], []
        for name, store in kept.kept.stores.items():
            if name == "older":
                parts.append(self.coded(layer, store, stored, head, int(kept.first_slot[row])))
                continue
            slots = store.padded_slots(np.array([stored]))[0, head].long()
            keys, values = (state[0, head] for state in store.padded(np.array([stored])))
            parts.append((slots[slots >= 0], keys[slots >= 0], values[slots >= 0]))
        count = tail[0].shape[2]
        parts.append((torch.arange(kept.seen - count, kept.seen), *(state[row, head] for state in tail)))
        return [torch.cat(pair) for pair in zip(*parts, strict=True)]

    def attend(self, layer, kept, query, tail):
        """`[B, T, Hq, D]`: attention in full, in double precision, of queries that are the newest tokens."""
        rows, heads, length, _ = query.shape
        out = torch.zeros(rows, length, heads, DIM)
        for row in range(rows):
            for head in range(heads):
                slots, keys, values = self.held(layer, kept, tail, row, head // 2)
                scores = query[row, head].double() @ keys.double().T * DIM**-0.5
                own = torch.arange(kept.seen - length, kept.seen)
                scores[slots > own[:, None]] = -torch.inf
                scores[:, slots < kept.first_slot[row]] = -torch.inf
                out[row, :, head] = (scores.softmax(-1) @ values.double()).float()
        return out


@pytest.fixture
def attended(monkeypatch):
    """The calls of every evicting layer: layer, query, newer tokens, output, and the cache as it was then."""
    calls, attend = [], KeptLayer._attend

    def record(self, base, module, query, tail, mask, args, kwargs):
        output = attend(self, base, module, query, tail, mask, args, kwargs)
        calls.append((self.context.layer_idx, self, query, tail, output[0]))
        return output

    monkeypatch.setattr(KeptLayer, "_attend", record)
    return calls


# --- attention


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_that_over_the_stored_form(name, batch, fitted, run, attended):
    (ids, mask), oracle = batch, Oracle(fitted, name)
    cache = compressed(fitted, name, run, ids, mask)
    begin = LENGTH
    for count in (1, 5, 40, 1, 130):  # after the last, newer tokens are encoded too
        attended.clear()
        states = []
        cache_before = cache.fork()
        run(fitted[0], cache, ids[:, begin : begin + count], mask)
        begin += count
        for index, _, query, tail, output in attended:
            kept = cache_before.layers[index]
            kept.seen = begin
            torch.testing.assert_close(output, oracle.attend(index, kept, query, tail), **CLOSE)
            states.append(kept)
        assert len(states) == 2
    layer = cache.layers[0]
    assert "newest" not in layer.kept.stores, "newer tokens were to be encoded"
    cache_before = cache.fork()
    attended.clear()
    run(fitted[0], cache, ids[:, begin : begin + 1], mask)
    for index, _, query, tail, output in attended:
        kept = cache_before.layers[index]
        kept.seen = begin + 1
        torch.testing.assert_close(output, oracle.attend(index, kept, query, tail), **CLOSE)


@pytest.mark.parametrize("name", ["adakv+transform", "adakv+int4"])
def test_a_step_decodes_slices(name, batch, fitted, run, monkeypatch):
    model, (ids, mask) = fitted[0], batch
    cache = compressed(fitted, name, run, ids, mask)
    other, sizes, decoded = cache.fork(), [], KeptTokens.decoded
    monkeypatch.setattr(kept_kernel, "can_serve", lambda *args: False)
    expected = run(model, other, ids[:, LENGTH : LENGTH + 2], mask, chunks=[1, 1])
    group_length = cache.layers[0].codecs.group_length
    monkeypatch.setattr(kept_attention, "SLICE_LENGTH", 2 * group_length)
    monkeypatch.setattr(
        KeptTokens, "decoded", lambda self, *span: sizes.append((self, span[1] - span[0])) or decoded(self, *span)
    )
    monkeypatch.setattr("hf_kvcache.eviction.kept.Kept.padded", lambda self: pytest.fail("kept tokens were copied"))
    logits = run(model, cache, ids[:, LENGTH : LENGTH + 2], mask, chunks=[1, 1])
    torch.testing.assert_close(logits, expected, **CLOSE)
    sizes = [size for store, size in sizes if not store.is_exact]
    assert max(sizes) == 2
    assert sum(sizes) == 2 * sum(len(layer.kept.stores["older"].groups) for layer in cache.layers)


# --- positions


def errors_of_keys(fitted, run, cache, ids, mask):
    """How far each key that layer 0 holds is from what a full cache has at its slot, and the same of encoded ones."""
    model = fitted[0]
    full = make_cache(model, "blocks")
    run(model, full, ids, mask)
    layer, rotated = cache.layers[0], Oracle(fitted, "kvzip+transform")._rotated
    held = layer.held()
    errors = []
    for row in range(2):
        for head in range(2):
            at = held.slots[row, head] >= held.first_slot[row]
            slots, positions = held.slots[row, head, at], held.positions[row, head, at]
            keys = full.layers[0].keys[row, head, slots]
            # To where the layer has turned it: back by its own position, and on.
            moved = (positions - held.first_slot[row]).float()
            plain = rotated(keys * torch.ones(1), (held.first_slot[row] - slots).float())
            errors.append((rotated(plain, moved) - held.keys[row, head, at]).norm() / keys.norm())
    return torch.stack(errors)


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("when", ["prefill", "both"])
def test_keys_come_back_at_their_own_positions(positions, when, batch, fitted, run):
    """After an eviction between chunks, one at the end of a prompt, while decoding, and when newer tokens settle."""
    model, (ids, mask) = fitted[0], batch
    more = {"positions": positions, "when": when, "interval": 48, "key_bits": 8, "value_bits": 4}
    cache = new_cache(fitted, "adakv+transform", **more)
    layer = cache.layers[0]
    for chunk in (slice(0, 280), slice(280, LENGTH)):
        layer.begin_prompt(LENGTH)
        cache.layers[1].begin_prompt(LENGTH)
        run(model, cache, ids[:, chunk], mask)
    assert layer.seen == LENGTH
    assert layer.kept.stores["older"].counts.sum() > 0
    assert errors_of_keys(fitted, run, cache, ids[:, :LENGTH], mask[:, :LENGTH]).max() < 0.03
    run(model, cache, ids[:, LENGTH:], mask, chunks=CHUNKS)
    assert errors_of_keys(fitted, run, cache, ids, mask).max() < 0.03
    slots = layer.slots()
    assert (slots >= LENGTH).any(-1).all()
    held = (slots >= layer.first_slot[:, None, None]).sum(-1)
    assert (held < LENGTH).all() if when == "both" else held.float().mean() > 190 + NEW - 1


# --- uses


@pytest.mark.parametrize("name", ["adakv+transform", "duo_attention+turboquant"])
def test_beams_and_copies(name, batch, fitted, run):
    model, (ids, mask) = fitted[0], batch
    cache = compressed(fitted, name, run, ids, mask)
    index = torch.tensor([1, 0, 1])
    others = [cache.fork(), copy.deepcopy(cache), copy.deepcopy(cache).to("cpu")]
    expected = run(model, cache, ids[:, LENGTH:], mask, chunks=CHUNKS)
    for other in others[1:]:
        torch.testing.assert_close(run(model, other, ids[:, LENGTH:], mask, chunks=CHUNKS), expected, **CLOSE)
    beams = others[0]
    beams.batch_select_indices(index)
    logits = run(model, beams, ids[index, LENGTH:], mask[index], chunks=CHUNKS)
    torch.testing.assert_close(logits, expected[index], **CLOSE)
    # Back to one row: the others' groups are let go of, of every kind of head.
    before = measure(beams)
    beams.batch_select_indices(torch.tensor([1]))
    assert measure(beams) < before
    step, grown = torch.full((2, 1), 5), torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    one = run(model, beams, step[:1], grown[:1])
    torch.testing.assert_close(one, run(model, cache, step, grown)[:1], **CLOSE)


@pytest.mark.parametrize("name", ["snapkv+transform", "adakv+int4"])
def test_newer_tokens_can_be_taken_back(name, batch, fitted, run):
    model, (ids, mask) = fitted[0], batch
    cache = compressed(fitted, name, run, ids, mask)
    other = cache.fork()
    run(model, cache, ids[:, LENGTH : LENGTH + 7], mask)
    cache.crop(-7)
    step = ids[:, LENGTH : LENGTH + 1]
    torch.testing.assert_close(run(model, cache, step, mask), run(model, other, step, mask), **CLOSE)


@pytest.mark.parametrize("name", ["kvzip+transform", "adakv+int4"])
def test_saved_caches_go_on_with_the_same_bits(name, batch, fitted, run, tmp_path):
    ids, mask = batch
    model, calibration = fitted
    # Its own: a calibration keeps the codecs of all bits that it was asked for.
    alone = model, Calibration.from_tensors(calibration.tensors(), calibration.num_tokens)
    cache = compressed(alone, name, run, ids, mask)
    cache.batch_select_indices(torch.tensor([1, 0, 0]))
    cache.save(tmp_path / "cache.safetensors")
    loaded = load_cache(model, tmp_path / "cache.safetensors")
    assert measure(loaded) == measure(cache)
    index = torch.tensor([1, 0, 0])
    both = [run(model, c, ids[index, LENGTH:], mask[index], chunks=CHUNKS) for c in (cache, loaded)]
    assert torch.equal(*both)
    assert cache.report().to_dict() == loaded.report().to_dict()


MODES = [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 150}, {}]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "".join(mode))
@pytest.mark.parametrize("name", ["adakv+transform", "snapkv+int4"])
def test_generate_writes_what_the_policy_alone_does(name, mode, fitted, make_ids):
    """With many bits a value."""
    (model, calibration), ids = fitted, make_ids(1, LENGTH, seed=3)
    hf_kvcache.enable()
    policy, encoding = name.split("+")
    config = {key: value for key, value in OPTIONS.items() if key != "residual_length"}
    fine = {
        "transform": {"key_bits": 8, "value_bits": 4, "calibration": calibration},
        "int4": {"q_group_size": 32, "bits": [[[8, 4], 8], [8, [8, 4]]]},
    }[encoding]
    texts = []
    for technique, options in ((policy, config), (name, config | fine | {"residual_length": 40})):
        cache = make_cache(model, technique, **options)
        texts.append(model.generate(ids, max_new_tokens=6, do_sample=False, **mode, **{hf_kvcache.CACHE_ARG: cache}))
        assert all(layer.stored_length < LENGTH for layer in cache.layers)
    assert "older" in cache.layers[0].kept.stores
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["kvzip+transform", "adakv+int4"])
def test_turns_of_a_conversation(name, fitted, make_ids, run):
    """Two turns by `generate()` are what the same cache gives by hand: the second prompt evicts again."""
    model, ids = fitted[0], make_ids(1, LENGTH)
    hf_kvcache.enable()
    cache, by_hand = (new_cache(fitted, name) for _ in range(2))
    for turn in range(2):
        before = cache.get_seq_length()
        text = model.generate(ids, max_new_tokens=8, do_sample=False, **{hf_kvcache.CACHE_ARG: cache})
        assert cache.layers[0].stored_length < LENGTH
        end = ids.shape[1]
        for layer in by_hand.layers:
            layer.begin_prompt(end)
        token = run(model, by_hand, ids[:, before:])[:, -1:].argmax(-1)
        if name.startswith("kvzip"):
            by_hand.compress(ids)
        for index in range(8):
            assert token.item() == text[0, end + index], (turn, index)
            token = run(model, by_hand, token)[:, -1:].argmax(-1) if index < 7 else token
        ids = torch.cat([text, make_ids(1, 150, seed=4)], dim=1)


# --- sizes


def test_bits_are_those_of_the_stored_form_and_bases_are_there_once(make_ids, tiny_model, run):
    model = tiny_model("llama", head_dim=64, max_position_embeddings=4096)
    calibration = calibrate(model, make_ids(1, 600, seed=9))
    cache = make_cache(model, "adakv+transform", keep_ratio=0.25, calibration=calibration)
    empty = measure(cache)
    bases = sum(t.nbytes for s in calibration.layers.values() for t in s)
    bases += sum(getattr(c, n).nbytes for c in calibration.key_codecs(2.5).values() for n in ("analysis", "synthesis"))
    assert bases <= empty < 1.1 * bases
    run(model, cache, make_ids(1, 3000))
    cache.compress()
    report = cache.report()
    # A quarter of the tokens: 128 newest ones and sinks exact; others at 2.44 bits and a slot, in groups that are not
    # all full.
    exact = 2 * 2 * (128 + 16) * 2 * 64 * 4
    coded = sum(layer.kept.stores["older"].nbytes for layer in cache.layers)
    num_groups = sum(len(layer.kept.stores["older"].groups) for layer in cache.layers)
    full_groups = 2 * 2 * (750 - 132) / 128
    assert full_groups <= num_groups <= full_groups + 4
    assert coded / num_groups == pytest.approx(128 * (128 * 2.4375 / 8 + 4) + 4, rel=0.05)
    assert coded < report.stored_bytes - empty < 1.05 * (coded + exact)
    assert report.reserved_bytes == measure(cache)
    forked = cache.fork()
    assert measure([cache, forked]) < 1.01 * measure(cache)
    bits = [layer.marginal_bits for layer in cache.layers]
    assert report.marginal_bits_per_value == pytest.approx(sum(bits) / 2)
    # Keys of 2.5 bits over all layers and a scale, values of 2 bits and a scale, an int32 slot for both.
    assert sum(bits) / 2 == pytest.approx((2.5 + 8 / 64 + 2 + 16 / 64) / 2 + 32 / 128)


def test_bytes_of_a_token_are_those_of_all_heads(fitted, make_ids, run):
    cache = new_cache(fitted, "snapkv+int4")
    run(fitted[0], cache, make_ids(1, 40))
    # Two bytes-wide scales and zero points for every 32 values.
    assert cache.layers[0].token_bytes == DIM * (2 + 8 + 2 * 4 + 4 * 1) / 8
    assert cache.layers[1].token_bytes == DIM * (2 * 8 + 4 + 2 + 4 * 1) / 8
