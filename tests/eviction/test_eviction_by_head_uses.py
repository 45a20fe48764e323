"""Eviction with codecs that differ from head to head in all uses: positions, models, beams, files, turns, sizes."""

import copy

import pytest
import torch

import hf_kvcache
from hf_kvcache import Calibration, calibrate, load_cache, make_cache, measure
from hf_kvcache.eviction.compression import evicting_layers

pytestmark = pytest.mark.core

LENGTH, NEW = 331, 180
CHUNKS = [1] * 6 + [20] * 8 + [1] * 14  # newer tokens are encoded on the way, and then read
DIM = 32
CONFIG = {"head_dim": DIM, "max_position_embeddings": 1024}
OPTIONS = {"budget": 190, "num_sink_tokens": 3, "num_recent_tokens": 5}
CLOSE = {"atol": 1e-4, "rtol": 0.0}


def _rotated(model, keys, distances):
    """Keys `[n, D]` by the model's own tables, which may go back."""
    cos, sin = model.model.rotary_emb(keys, distances[None])
    half = keys.shape[1] // 2
    return keys * cos[0] + torch.cat([-keys[:, half:], keys[:, :half]], dim=1) * sin[0]


def errors_of_keys(fitted, run, cache, ids, mask):
    """How far the keys that layer 0 holds are from those of a full cache at their slots: of each row and head."""
    model = fitted[0]
    full = make_cache(model, "blocks")
    run(model, full, ids, mask)
    layer = cache.layers[0]
    held = layer.held()
    errors = []
    for row in range(2):
        for head in range(2):
            at = held.slots[row, head] >= held.first_slot[row]
            slots, positions = held.slots[row, head, at], held.positions[row, head, at]
            keys = full.layers[0].keys[row, head, slots]
            # To where the layer has turned it.
            moved = _rotated(model, keys, positions - slots)
            errors.append((moved - held.keys[row, head, at]).norm() / keys.norm())
    return torch.stack(errors)


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("when", ["prefill", "both"])
def test_keys_come_back_at_their_own_positions(positions, when, batch, fitted, run, new_cache):
    """After an eviction between chunks, one at the end of a prompt, while decoding, and when newer tokens settle."""
    model, (ids, mask) = fitted[0], batch
    more = {"positions": positions, "when": when, "interval": 48, "key_bits": 8, "value_bits": 4}
    cache = new_cache("adakv+transform", **more)
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


MODELS = ["qwen3", "gemma2", "gemma3", "falcon_h1", "gpt_oss", "partial"]
_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_sees_what_the_policy_keeps(name, tiny_model, make_ids, left_pad, run):
    """With many bits: normed keys, softcaps, sink logits, windows and states beside, partial rotation."""
    config = CONFIG if name != "partial" else {"max_position_embeddings": 1024, "rope_parameters": _HALF}
    model = tiny_model("phi3" if name == "partial" else name, **config)
    fine = {"key_bits": 8, "value_bits": 4, "calibration": calibrate(model, make_ids(1, 600, seed=9))}
    ids, mask = left_pad(make_ids(2, LENGTH + 42), [LENGTH + 42, 301])
    logits, layers = [], []
    for technique, options in (("snapkv", {}), ("snapkv+transform", fine | {"residual_length": 40})):
        cache = make_cache(model, technique, **OPTIONS, **options)
        with cache.prompt(ids[:, :LENGTH], LENGTH):  # evicted from as it was, not as it is encoded
            run(model, cache, ids[:, :LENGTH], mask)
        logits.append(run(model, cache, ids[:, LENGTH:], mask, chunks=[1, 40, 1]))
        layers.append(evicting_layers(cache.layers)[-1])
    assert (layers[1].kept.stores["older"].counts > 128).all()
    held = [layer.held() for layer in layers]
    for row in range(2):
        slots = [part.slots[row, 0] for part in held]
        keys = [part.keys[row, 0][own >= 0] for part, own in zip(held, slots, strict=True)]
        assert torch.equal(*(own[own >= 0] for own in slots))
        assert (keys[1] - keys[0]).norm() < 0.03 * keys[0].norm()
    real = mask[:, LENGTH:].bool()
    assert (logits[1] - logits[0])[real].norm() < 0.05 * logits[0][real].norm()
    assert not torch.equal(*logits)


def test_half_precision(fitted, make_ids, run, new_cache):
    model = copy.deepcopy(fitted[0]).to(torch.bfloat16)
    cache = new_cache("adakv+transform", model=model, when="both", merge=0.8, interval=30)
    logits = run(model, cache, make_ids(2, LENGTH + 150), chunks=[LENGTH] + [1] * 50 + [100])
    assert cache.layers[0].held().keys.dtype == logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
    stored = cache.layers[0].kept.stores["older"]
    assert stored.log_mass is not None
    assert torch.isfinite(stored.decoded(0, len(stored.groups))[0]).all()


def test_models_without_a_rotary_embedding_are_refused_by_name(tiny_model):
    with pytest.raises(
        NotImplementedError, match=r"transform cannot turn this model's keys: .* Use cache 'turboquant'"
    ):
        make_cache(tiny_model("jamba"), "snapkv+transform")


# --- uses


@pytest.mark.parametrize("name", ["adakv+transform", "duo_attention+turboquant"])
def test_beams_and_copies(name, batch, fitted, run, compressed):
    model, (ids, mask) = fitted[0], batch
    cache = compressed(name, ids, mask)
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
def test_newer_tokens_can_be_taken_back(name, batch, fitted, run, compressed):
    model, (ids, mask) = fitted[0], batch
    cache = compressed(name, ids, mask)
    other = cache.fork()
    run(model, cache, ids[:, LENGTH : LENGTH + 7], mask)
    cache.crop(-7)
    step = ids[:, LENGTH : LENGTH + 1]
    torch.testing.assert_close(run(model, cache, step, mask), run(model, other, step, mask), **CLOSE)


@pytest.mark.parametrize("name", ["kvzip+transform", "adakv+int4"])
def test_saved_caches_go_on_with_the_same_bits(name, batch, fitted, run, tmp_path, compressed):
    ids, mask = batch
    model, calibration = fitted
    own = {}
    if "transform" in name:  # a calibration keeps the codecs of all bits that it was asked for
        own["calibration"] = Calibration.from_tensors(calibration.tensors(), calibration.num_tokens)
    cache = compressed(name, ids, mask, **own)
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
    fine = {
        "transform": {"key_bits": 8, "value_bits": 4, "calibration": calibration},
        "int4": {"q_group_size": 32, "bits": [[[8, 4], 8], [8, [8, 4]]]},
    }[encoding]
    texts = []
    for technique, options in ((policy, OPTIONS), (name, OPTIONS | fine | {"residual_length": 40})):
        cache = make_cache(model, technique, **options)
        texts.append(model.generate(ids, max_new_tokens=6, do_sample=False, **mode, **{hf_kvcache.CACHE_ARG: cache}))
        assert all(layer.stored_length < LENGTH for layer in cache.layers)
    assert "older" in cache.layers[0].kept.stores
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["kvzip+transform", "adakv+int4"])
def test_turns_of_a_conversation(name, fitted, make_ids, run, new_cache):
    """Two turns by `generate()` are what the same cache gives by hand: the second prompt evicts again."""
    model, ids = fitted[0], make_ids(1, LENGTH)
    hf_kvcache.enable()
    cache, by_hand = (new_cache(name) for _ in range(2))
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
