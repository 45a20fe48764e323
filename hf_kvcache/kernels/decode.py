"""Attention of one new token over stored keys and values, without decoding them to memory: the C++ kernel's caller.

The kernel reads packed codes in place, wherever their groups lie, decodes 16 values at a time in registers, and takes
one softmax over all segments of tokens. It serves float32, bfloat16 and float16 on CPUs.
Paper: Dao et al. 2023, Flash-Decoding, https://pytorch.org/blog/flash-decoding (splits merged by their log-sum-exp).
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..codecs.base import StoredForm
from . import native, structs

# What the kernel takes: whole vectors of channels, few enough for the places of one token's to be kept at hand.
_LANES = 16
_LARGEST_DIM = 512
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_STOP = 2**62  # of a segment all of whose slots are seen


class Segment(NamedTuple):
    """Consecutive tokens as the kernel takes them, and the tensors that it points into."""

    struct: structs.Segment
    num_heads: int
    alive: tuple


def can_serve(query: torch.Tensor, mask: torch.Tensor | None, dims: Sequence[int]) -> bool:
    """Whether `attend` takes this query and mask, for keys and values of `dims` channels. Does not compile the kernel.

    It takes one token a row, one mask for all heads, and gives no gradients.
    """
    is_fit = query.device.type == "cpu" and query.shape[2] == 1 and query.dtype in _DTYPES and not query.requires_grad
    is_shared = mask is None or mask.shape[1:3] == (1, 1)
    return is_fit and is_shared and all(dim % _LANES == 0 and dim <= _LARGEST_DIM for dim in dims)


def dense_segment(
    states: Sequence[torch.Tensor], *, slot: int = 0, first_slot: torch.Tensor | None = None, stop: int = NO_STOP
) -> Segment:
    """Keys and values `[B, Hkv, T, D]`, views with any strides but the last.

    Token `i` is slot `slot + i` of the mask, or `first_slot[row] + i` (int64 `[B]`). Slots from `stop` on are not seen.
    """
    struct = structs.Segment(slot=slot, stop=stop, length=states[0].shape[2], unit=1, group_length=1)
    struct.key, struct.value = map(structs.dense_store, states)
    if first_slot is not None:
        struct.first_slot = first_slot.data_ptr()
    return Segment(struct, states[0].shape[1], (*states, first_slot))


def coded_segment(
    forms: Sequence[StoredForm],
    planes: Sequence[torch.Tensor],
    block_ids: np.ndarray,
    group_length: int,
    *,
    slot: int = 0,
) -> Segment:
    """Encoded tokens, without the sinks among them.

    Args:
        forms: of the keys and of the values.
        planes: `[H, blocks, dim]`, those of the keys first; a block is a group of tokens.
        block_ids: int64 `[B, N]`: where each group of each row lies.
        group_length: tokens a group.
        slot: of the first encoded token.
    """
    ids = np.ascontiguousarray(block_ids)
    struct = structs.Segment(ids=ids.ctypes.data, ids_row=ids.shape[1], unit=group_length, stop=NO_STOP)
    struct.length, struct.slot, struct.hides_sinks = ids.shape[1] * group_length, slot, 1
    set_coded_stores(struct, forms, planes, group_length)
    return Segment(struct, planes[0].shape[0], (*planes, ids, *forms))


def set_coded_stores(
    struct: structs.Segment, forms: Sequence[StoredForm], planes: Sequence[torch.Tensor], group_length: int
) -> None:
    """Say that a segment lies in groups of `group_length` tokens in these planes of codecs."""
    struct.group_length = group_length
    assert forms[0].by_channel or "zero" not in forms[0].planes, "keys by the token have no zero point"
    assert not forms[1].by_channel, "values have their scales by the token"
    assert "mean" not in forms[1].planes, "values have no mean"
    count = len(forms[0].planes)
    struct.key = structs.coded_store(forms[0], planes[:count], group_length)
    struct.value = structs.coded_store(forms[1], planes[count:], group_length)


def chosen_segment(
    planes: Sequence[torch.Tensor],
    ids: torch.Tensor,
    dims: Sequence[int],
    unit: int,
    *,
    slot: int = 0,
    length: int | None = None,
) -> Segment:
    """Chosen tokens of one KV head a row, as they are.

    Args:
        planes: of keys and of values, contiguous.
        ids: int64 `[rows, K]`: which runs of `unit` tokens of a plane each row sees.
        dims: channels of keys and of values.
        unit: tokens a run.
        slot: of the mask, for the first token.
        length: tokens a row; None: all of the runs.
    """
    ids = ids.contiguous().numpy()
    segment = run_segment(planes, ids, dims, unit, slot=slot, length=ids.shape[1] * unit if length is None else length)
    return segment._replace(num_heads=1)


def run_segment(
    planes: Sequence[torch.Tensor],
    ids: np.ndarray,
    dims: Sequence[int],
    unit: int,
    *,
    length: int,
    slot: int = 0,
    slots: np.ndarray | None = None,
) -> Segment:
    """Tokens as they are, in runs that lie anywhere, the same ones for all heads.

    Args:
        planes: of keys and of values, `[H, slots, D]`, contiguous.
        ids: int64 `[B, K]`: which runs of `unit` tokens each row sees; rows may lie apart.
        dims: channels of keys and of values.
        unit: tokens a run.
        length: tokens a row.
        slot: of the mask, for the first token.
        slots: int64 `[B, K]`, the first slot of each run, or less than 0 for those that are not seen.
    """
    struct = structs.Segment(unit=unit, group_length=unit, slot=slot, length=length, stop=NO_STOP)
    structs.set_ids(struct, ids)
    if slots is not None:
        struct.slots = slots.ctypes.data
    struct.key, struct.value = (structs.run_store(p, dim, unit) for p, dim in zip(planes, dims, strict=True))
    return Segment(struct, planes[0].shape[0], (*planes, ids, slots))


def attend(
    query: torch.Tensor,
    segments: Sequence[Segment],
    *,
    scaling: float | None,
    mask: torch.Tensor | None = None,
    sinks: tuple[torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """Attention of `query` `[B, Hq, 1, D]` over all segments under one softmax.

    Args:
        query: float32, bfloat16 or float16.
        segments: what it sees; grouped heads share a KV head of the segments.
        scaling: of the scores; None: `D ** -0.5`.
        mask: boolean or additive, `[B or 1, 1, 1, slots]`.
        sinks: first slot of each row (int64 `[B]`) and number of the tokens that coded segments leave out.

    Returns:
        `[B, 1, Hq, Dv]` in the query's dtype.

    Raises:
        ValueError: if the mask has too few rows or slots.
    """
    call = Call(segments, rows=query.shape[0], num_heads=query.shape[1], sinks=sinks)
    call.take(query, scaling, mask)
    native.library().hf_kvcache_decode(ctypes.byref(call.struct))
    return call.output.to(query.dtype)


class Call:
    """What the kernel is called with: what is the same for every query, then a query (`take`).

    It keeps nothing alive that segments point into.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        rows: int,
        num_heads: int,
        sinks: tuple[torch.Tensor, int] | None = None,
    ):
        self.segments = (structs.Segment * len(segments))(*(segment.struct for segment in segments))
        kv_heads = segments[0].num_heads
        self.struct = structs.Call(rows=rows, heads=kv_heads, queries=num_heads // kv_heads, num_segments=len(segments))
        self.struct.segments = ctypes.addressof(self.segments)
        self._shape = (rows, 1, num_heads, self.segments[0].value.dim)
        if sinks is not None:
            self.struct.sinks, self.struct.num_sinks = sinks[0].data_ptr(), sinks[1]

    def take(self, query: torch.Tensor, scaling: float | None, mask: torch.Tensor | None) -> None:
        """The query, mask and output of the next run; arguments and errors as for `attend`."""
        call = self.struct
        self.query, self.mask = query.detach().float().contiguous(), None
        self.output = torch.empty(self._shape)
        call.query, call.output = self.query.data_ptr(), self.output.data_ptr()
        call.num_threads = torch.get_num_threads()
        call.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if mask is None:
            call.mask = None
        else:
            self._take_mask(mask)

    def _take_mask(self, mask: torch.Tensor) -> None:
        call = self.struct
        slots = max(min(segment.slot + segment.length, segment.stop) for segment in self.segments)
        if mask.shape[0] not in (1, call.rows) or mask.shape[-1] < slots:
            raise ValueError(
                f"the attention mask {tuple(mask.shape)} does not cover {call.rows} rows of {slots} tokens: give a "
                "mask of all tokens that the cache has seen."
            )
        call.mask_is_additive = mask.dtype != torch.bool
        mask = mask.float() if call.mask_is_additive else mask
        self.mask = mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        call.mask, call.mask_stride = mask.data_ptr(), mask.stride(0) if mask.shape[0] > 1 else 0
