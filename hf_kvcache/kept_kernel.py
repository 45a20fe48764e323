"""A decode step over kept and newer tokens by the decode kernel: each head of each row reads its own groups in place.

To the kernel a head of a row is a row of its own with one KV head, whose groups lie anywhere in the store. Where a head
has fewer groups than another, and where a group is not full, the mask says so.
"""

import numpy as np
import torch

from .blocks import BlockTable
from .kept import Kept
from .kept_tokens import KeptTokens
from .kernels import decode, native
from .masks import visible

# Fewer tokens than this are attended to in less time without the kernel.
MIN_LENGTH = 512


def can_serve(query: torch.Tensor, kept: Kept, table: BlockTable) -> bool:
    """Whether `attend` takes this query: one token a row on a CPU, codecs and blocks that the kernel can read."""
    specs = table.arena.specs
    if table.arena.block_size % 16 or kept.length + table.length < MIN_LENGTH:
        return False
    if not decode.can_serve(query, None, [spec.dim for spec in specs]):
        return False
    forms = [form for store in kept.stores.values() if not store.is_exact for form in _forms(store)]
    if None in forms:
        return False
    if native.library() is None and forms:
        native.warn_of_no_library()
    return native.library() is not None


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
    segments, masks, offset = [], [], 0
    for store in kept.stores.values():
        ids, slots = kept.places(store)
        segments.append(_segment(store, ids, offset))
        masks.append(_is_seen(slots, seen))
        offset += slots.shape[-1]
    segments.append(_tail_segment(table, offset))
    begin = table.first_column * table.arena.block_size
    tail = torch.arange(begin, table.stop, device=query.device).expand(rows, kv_heads, -1)
    masks.append(_is_seen(tail.where(tail >= table.start, -1), seen))
    whole = torch.cat(masks, dim=-1)
    if (log_mass := kept.log_mass()) is not None:
        log_mass = torch.nn.functional.pad(log_mass, (0, whole.shape[-1] - log_mass.shape[-1]))
        whole = log_mass.masked_fill(~whole, -torch.inf)
    whole = whole.reshape(rows * kv_heads, 1, 1, -1)
    packed = query.reshape(rows * kv_heads, heads // kv_heads, 1, dim)
    output = decode.attend(packed, segments, scaling=scaling, mask=whole)
    return output.reshape(rows, 1, heads, -1)


def _forms(store: KeptTokens) -> list:
    return [codec.stored_form(shape) for codec, shape in zip(store.codecs, store.shapes, strict=True)]


def _is_seen(slots: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Whether there is a token at each of `slots` `[B, Hkv, n]`, and the query sees it."""
    is_token = slots >= 0
    if seen is None:
        return is_token
    return seen.unsqueeze(1).expand(-1, slots.shape[1], -1).gather(2, slots.clamp(min=0).long()) & is_token


def _segment(store: KeptTokens, ids: np.ndarray, offset: int) -> decode.Segment:
    if store.is_exact:
        dims = [shape.dim for shape in store.shapes]
        return decode.chosen_segment(store.planes, torch.from_numpy(ids), dims, store.group_length, slot=offset)
    planes = [plane.unsqueeze(0) for plane in store.planes]
    return decode.coded_segment(_forms(store), planes, ids, store.group_length, slot=offset)


def _tail_segment(table: BlockTable, offset: int) -> decode.Segment:
    arena = table.arena
    heads = np.arange(arena.specs[0].num_heads)[:, None] * arena.num_blocks
    ids = torch.from_numpy((table.block_ids[:, None] + heads).reshape(-1, table.block_ids.shape[1]))
    length = table.stop - table.first_column * arena.block_size
    dims = [spec.dim for spec in arena.specs]
    return decode.chosen_segment(arena.planes, ids, dims, arena.block_size, slot=offset, length=length)
