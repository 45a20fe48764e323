"""The structs that the C++ kernel is called with, as call.h has them, and how tensors are described in them."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ..codecs.base import StoredForm
from ..codecs.packing import fill_table

# Numbers of `enum Form` in products.h.
_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 7}
_FORMS |= {"float8": 3, "int8": 4, "codes": 5, "index": 6, "integers": 8}

# What codes stand for that stand for themselves.
_INTEGERS = {bits: fill_table(torch.arange(2**bits)) for bits in (2, 4)}

# Bytes of a row of codes that the kernel multiplies as such, and what codes stand for where rows have others.
_INDEX_BYTES = (4, 8, 16, 32, 64, 128, 256)
_INDEX_LEVELS = {bits: fill_table(torch.arange(2**bits) - (2**bits - 1) / 2) for bits in (2, 4)}


class Plane(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "group"))]


class Store(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("form", "bits", "dim", "block", "is_columns", "unused")),
        *((name, ctypes.c_int64) for name in ("stride", "high_stride")),
        *((name, Plane) for name in ("codes", "high", "scale", "zero", "mean")),
        *((name, ctypes.c_void_p) for name in ("table", "rotation")),
    ]


class Segment(ctypes.Structure):
    _fields_ = [
        *((name, Store) for name in ("key", "value")),
        ("ids", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("ids_row", "ids_head", "unit", "group_length", "length")),
        *((name, ctypes.c_void_p) for name in ("slots", "scores")),
        ("scores_row", ctypes.c_int64),
        ("first_slot", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("slot", "stop", "hides_sinks", "ignores_mask")),
        ("lengths", ctypes.c_void_p),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "heads", "queries", "num_segments", "num_threads")),
        *((name, ctypes.c_void_p) for name in ("segments", "query")),
        ("scaling", ctypes.c_float),
        ("mask_is_additive", ctypes.c_int32),
        ("mask", ctypes.c_void_p),
        ("mask_stride", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("num_sinks", ctypes.c_int64),
        ("output", ctypes.c_void_p),
    ]


class Estimate(ctypes.Structure):
    _fields_ = [
        ("key", Store),
        ("ids", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("ids_row", "per_slot")),
        *((name, ctypes.c_void_p) for name in ("query", "mean")),
        *((name, ctypes.c_float) for name in ("added", "spread")),
        *((name, ctypes.c_int32) for name in ("has_bounds", "rounds")),
    ]


class Choice(ctypes.Structure):
    _fields_ = [
        ("attention", ctypes.c_void_p),
        ("estimate", Estimate),
        *((name, ctypes.c_int64) for name in ("unit", "num_units")),
        ("first_sink", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_sinks", "sinks_are_apart")),
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("blocks_row", "block_units", "count", "is_mean")),
        ("top_p", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("ids", "slots", "scores", "rest")),
        ("rest_share", ctypes.c_double),
        ("taken", ctypes.c_int64),
    ]


class Places(ctypes.Structure):
    _fields_ = [("ids", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("ids_row", "block"))]


class ClusterChoice(ctypes.Structure):
    _fields_ = [
        ("attention", ctypes.c_void_p),
        ("estimate", Estimate),
        *((name, ctypes.c_int64) for name in ("num_clusters", "scores_row")),
        *((name, Places) for name in ("clusters", "members", "tokens")),
        *((name, ctypes.c_void_p) for name in ("begins", "sizes", "masses", "radii", "member")),
        *((name, ctypes.c_int64) for name in ("cluster_head", "member_head")),
        ("spread", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("count", "is_mean")),
        ("top_p", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("ids", "lengths", "scores")),
    ]


def places(ids: np.ndarray, block: int) -> Places:
    """Where the blocks of a table lie: int64 `[B, N]`, which must stay alive; rows may lie apart."""
    assert not ids.size or ids.strides[1] == ids.itemsize == 8, "ids of a row lie side by side"
    return Places(ids=ids.ctypes.data, ids_row=ids.strides[0] // 8, block=block)


def set_ids(segment: Segment | Estimate, ids: np.ndarray) -> None:
    """Say where the units of each row lie: int64 `[B, K]`, which must stay alive; rows may lie apart."""
    assert not ids.size or ids.strides[1] == ids.itemsize == 8, "ids of a row lie side by side"
    segment.ids, segment.ids_row = ids.ctypes.data, ids.strides[0] // 8


def dense_store(states: torch.Tensor) -> Store:
    """Keys or values `[B, H, T, D]`, a view with any strides but the last."""
    assert states.stride(-1) == 1, "channels lie side by side"
    row, head, token, _ = (stride * states.element_size() for stride in states.stride())
    store = Store(form=_FORMS[states.dtype], dim=states.shape[-1], stride=token)
    store.codes = Plane(states.data_ptr(), row, head, 0)
    return store


def run_store(plane: torch.Tensor, dim: int, unit: int, scale: torch.Tensor | None = None) -> Store:
    """Rows of `dim` channels, one after the other in `plane` `[H, slots, *]`; a group is a run of `unit` of them.

    `scale` is float16 `[H, slots, 1]`, times which the rows are.
    """
    size = dim * plane.element_size()
    store = Store(form=_FORMS[plane.dtype], dim=dim, block=dim, stride=size)
    store.codes = Plane(plane.data_ptr(), 0, plane.stride(0) * plane.element_size(), unit * size)
    if scale is not None:
        store.scale = Plane(scale.data_ptr(), 0, scale.stride(0) * 2, unit * 2)
    return store


def index_store(
    codes: torch.Tensor, scale: torch.Tensor, dim: int, bits: int, unit: int, rotation: torch.Tensor | None = None
) -> Store:
    """Rows of `dim` codes of 2 or 4 bits with a float16 scale, `unit` a slot.

    Args:
        codes: `[H, slots, unit * dim * bits / 8]`, as `packing.pack` lays out each row.
        scale: `[H, slots, unit]`.
        dim: channels, a multiple of 16.
        bits: of a code, which stands for itself less the middle of all codes.
        unit: rows a slot.
        rotation: `[dim, dim]`, of the channels of all rows.
    """
    size = dim * bits // 8
    form = "index" if size in _INDEX_BYTES else "codes"
    store = Store(form=_FORMS[form], bits=bits, dim=dim, block=dim, stride=size)
    store.codes = Plane(codes.data_ptr(), 0, codes.stride(0), unit * size)
    store.scale = Plane(scale.data_ptr(), 0, scale.stride(0) * 2, unit * 2)
    store.table = _INDEX_LEVELS[bits].data_ptr()
    if rotation is not None:
        store.rotation = rotation.data_ptr()
    return store


def coded_store(form: StoredForm, planes: Sequence[torch.Tensor], group_length: int) -> Store:
    """Planes `[H, blocks, *]` of a codec: all rows lie in them, and a block is a group of tokens."""
    assert group_length % 16 == form.dim % form.block == form.block % 16 == 0, f"vectors of 16: {group_length}, {form}"
    assert not form.by_channel or (form.bits != 3 and form.element != "float8"), f"no such kernel: {form}"
    is_integer = form.element == "codes" and form.table is None
    element = "integers" if is_integer else form.element
    store = Store(form=_FORMS[element], bits=form.bits, dim=form.dim, block=form.block)
    store.is_columns = form.by_channel
    # Codes of 3 bits lie in a plane of 2 bits and one of 1.
    length = group_length if form.by_channel else form.dim
    store.stride, store.high_stride = length * (2 if form.bits == 3 else form.bits) // 8, length // 8
    if form.element == "codes":
        store.table = (_INTEGERS[form.bits] if is_integer else form.table).data_ptr()
    if form.rotation is not None:
        store.rotation = form.rotation.data_ptr()
    for name, plane in zip(form.planes, planes, strict=True):
        size = plane.element_size()
        setattr(store, name, Plane(plane.data_ptr(), 0, plane.stride(0) * size, plane.stride(1) * size))
    return store
