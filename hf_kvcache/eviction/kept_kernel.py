"""A decode step over kept and newer tokens by the decode kernel: each head of each row reads its own groups in place.

To the kernel a head of a row is a row of its own with one KV head, whose groups lie anywhere in the store. Where a head
has fewer groups than another, and where a group is not full, the mask says so. Heads that are encoded in other ways are
other calls.
"""

import numpy as np
import torch

from ..blocks import BlockTable
from ..codecs.base import StoredForm
from ..kernels import decode, native
from ..masks import visible
from .kept import Kept
from .kept_tokens import KeptTokens

# Fewer tokens than this are attended to in less time without the kernel.
MIN_LENGTH = 512


def can_serve(query: torch.Tensor, kept: Kept, table: BlockTable) -> bool:
    """Whether `attend` takes this query: one token a row on a CPU, codecs and blocks that the kernel can read."""
    if table.arena.block_size % 16 or kept.length + table.length < MIN_LENGTH:
        return False
    if not decode.can_serve(query, None, [spec.dim for spec in table.arena.specs]):
        return False
    if kept.prepared is None:
        coded = [store for store in kept.stores.values() if not store.is_exact]
        forms = [form for store in coded for kind in range(len(store.codecs.pairs)) for form in _forms(store, kind)]
        if None in forms:
            return False
        if native.library() is None:
            if forms:
                native.warn_of_no_library()
            return False
        kept.prepared = prepare(kept)
    return True


def attend(
    query: torch.Tensor, mask: torch.Tensor | None, scaling: float, kept: Kept, table: BlockTable
) -> torch.Tensor:
    """Attention of `query` `[B, Hq, 1, D]` to all tokens of `kept` and `table` under one softmax.

    Args:
        mask: boolean or additive, `[B or 1, 1, 1, T]`, a column for each slot.

    Returns:
        `[B, 1, Hq, Dv]`.
    """
    rows, heads, _, dim = query.shape
    kv_heads = table.arena.specs[0].num_heads
    seen = None if mask is None else visible(mask)[:, 0, 0].expand(rows, -1)  # [B, T]
    packed = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    outputs = [part.attend(packed[:, part.heads], seen, scaling, table) for part in kept.prepared]
    if len(outputs) == 1:
        return outputs[0].reshape(rows, 1, heads, -1)
    output = packed.new_empty(*packed.shape[:3], outputs[0].shape[-1])
    for part, own in zip(kept.prepared, outputs, strict=True):
        output[:, part.heads] = own
    return output.reshape(rows, 1, heads, -1)


def prepare(kept: Kept) -> list["Prepared"]:
    """One call for each kind of heads."""
    codecs = next((store.codecs for store in kept.stores.values() if len(store.codecs.pairs) > 1), None)
    if codecs is None:
        return [Prepared(kept, slice(None), 0)]
    return [Prepared(kept, heads, kind) for kind, heads in enumerate(codecs.heads)]


class Prepared:
    """What the kernel is told of kept tokens, the same at every step until others are kept.

    Args:
        kept: the tokens.
        heads: those that are encoded alike, an index.
        kind: of these heads, in stores that know several.

    Attributes:
        segments: of each store.
        length: slots of the mask that they take.
    """

    def __init__(self, kept: Kept, heads: slice | list[int], kind: int):
        self.heads = heads
        self.segments: list[decode.Segment] = []
        self.length, slots = 0, []
        for store in kept.stores.values():
            ids = store.group_ids(kept.rows, heads)
            if ids.shape[1]:
                self.segments.append(_segment(store, kind, ids, self.length))
            slots.append(store.padded_slots(kept.rows)[:, heads, : ids.shape[1] * store.group_length].flatten(0, 1))
            self.length += slots[-1].shape[-1]
        self._slots = torch.cat(slots, dim=-1)  # [B * H, n]
        self._log_mass: torch.Tensor | None = None
        if any(store.log_mass is not None for store in kept.stores.values()):
            own = zip(kept.stores.values(), slots, strict=True)
            parts = [s.padded_log_mass(kept.rows)[:, heads, : part.shape[-1]].flatten(0, 1) for s, part in own]
            self._log_mass = torch.cat(parts, dim=-1)
        self._mask: torch.Tensor | None = None
        self._gap = 0

    def attend(self, query: torch.Tensor, seen: torch.Tensor | None, scaling: float, table: BlockTable) -> torch.Tensor:
        """Attention of `query` `[B, H, queries, D]` of these heads to kept and newer tokens: `[B, H, queries, Dv]`.

        Args:
            seen: slots that each row sees, bool `[B, T]`; None for all.
        """
        segments = [*self.segments, _tail_segment(table, self.heads, self.length)]
        packed = query.flatten(0, 1).unsqueeze(2)
        output = decode.attend(packed, segments, scaling=scaling, mask=self.mask(seen, table))
        return output.view(*query.shape[:3], -1)

    def mask(self, seen: torch.Tensor | None, table: BlockTable) -> torch.Tensor:
        """Whether there is a token that the query sees, or what is added to its score: `[B * H, 1, 1, n + tail]`.

        Args:
            seen: slots that each row sees, bool `[B, T]`; None for all.
            table: of the newer tokens.
        """
        begin = table.first_column * table.arena.block_size
        gap, length = table.start - begin, table.stop - begin
        if self._mask is None or gap != self._gap or self._mask.shape[-1] < self.length + length:
            # Room for the steps to come, all of which see what this one does.
            is_token = torch.arange(2 * length, device=self._slots.device) >= gap
            self._mask = torch.cat([self._slots >= 0, is_token.expand(len(self._slots), -1)], dim=-1)[:, None, None]
            self._gap = gap
        whole = self._mask[..., : self.length + length]
        if seen is not None:
            own = seen.repeat_interleave(len(self._slots) // len(seen), dim=0)
            old = own.gather(1, self._slots.clamp(min=0).long())
            whole = whole & torch.cat([old, own[:, begin : table.stop]], dim=-1)[:, None, None]
        if self._log_mass is None:
            return whole
        bias = torch.nn.functional.pad(self._log_mass, (0, length))[:, None, None]
        return bias.masked_fill(~whole, -torch.inf)


def _forms(store: KeptTokens, kind: int) -> list[StoredForm | None]:
    return [codec.stored_form(shape) for codec, shape in zip(store.codecs.pairs[kind], store.shapes, strict=True)]


def _segment(store: KeptTokens, kind: int, ids: np.ndarray, offset: int) -> decode.Segment:
    if store.is_exact:
        dims = [shape.dim for shape in store.shapes]
        return decode.chosen_segment(
            store.groups.planes[0], torch.from_numpy(ids), dims, store.group_length, slot=offset
        )
    planes = [plane.unsqueeze(0) for plane in store.groups.planes[kind]]
    ids = store.groups.places[ids]
    return decode.coded_segment(_forms(store, kind), planes, ids, store.group_length, slot=offset)


def _tail_segment(table: BlockTable, heads: slice | list[int], offset: int) -> decode.Segment:
    arena = table.arena
    heads = np.arange(arena.specs[0].num_heads)[heads, None] * arena.num_blocks
    ids = torch.from_numpy((table.block_ids[:, None] + heads).reshape(-1, table.block_ids.shape[1]))
    length = table.stop - table.first_column * arena.block_size
    dims = [spec.dim for spec in arena.specs]
    return decode.chosen_segment(arena.planes, ids, dims, arena.block_size, slot=offset, length=length)
