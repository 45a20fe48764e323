"""Attention over kept tokens whose codecs differ from head to head: `transform`, and a width for each head.

The oracle takes a cache apart without the library's way of reading it: it unpacks the stored bytes of each group of
each head, turns keys by the model's own tables, and attends in full.
"""

import numpy as np
import pytest
import torch

from hf_kvcache.codecs import build_codecs
from hf_kvcache.codecs.base import Shape
from hf_kvcache.codecs.rotated import RotatedValueCodec, codebook
from hf_kvcache.codecs.transform import mixing
from hf_kvcache.codecs.water_filling import allocate
from hf_kvcache.eviction import kept_attention, kept_kernel
from hf_kvcache.eviction.kept_layer import KeptLayer
from hf_kvcache.eviction.kept_tokens import KeptTokens

pytestmark = pytest.mark.core

LENGTH = 331
DIM = 32
KEY_BITS = 1.5
BITS = {"int4": [[[2, 8], 4], [8, [4, 2]]], "turboquant": [[[4, 2], [2, 3]], 2]}
NAMES = [
    *("kvzip+transform", "adakv+transform", "snapkv+transform", "duo_attention+transform"),
    *("kvzip+int4", "adakv+int4", "duo_attention+turboquant"),
]
CLOSE = {"atol": 1e-4, "rtol": 0.0}


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
        entry = BITS[self.encoding][layer]
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


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_that_over_the_stored_form(name, batch, fitted, run, attended, compressed):
    (ids, mask), oracle = batch, Oracle(fitted, name)
    cache = compressed(name, ids, mask)
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
def test_a_step_decodes_slices(name, batch, fitted, run, monkeypatch, compressed):
    model, (ids, mask) = fitted[0], batch
    cache = compressed(name, ids, mask)
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


def test_bytes_of_a_token_are_those_of_all_heads(fitted, make_ids, run, new_cache):
    cache = new_cache("snapkv+int4")
    run(fitted[0], cache, make_ids(1, 40))
    # Two bytes-wide scales and zero points for every 32 values.
    assert cache.layers[0].token_bytes == DIM * (2 + 8 + 2 * 4 + 4 * 1) / 8
    assert cache.layers[1].token_bytes == DIM * (2 * 8 + 4 + 2 + 4 * 1) / 8
