"""Large tensors on large pages of memory: reads that jump look up fewer addresses. On Linux; a hint, never an error."""

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch

# Below it, the pages at both ends are most of a tensor.
MIN_BYTES = 4 * 2**20
_ADVICE = 14  # MADV_HUGEPAGE


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Ask for large pages for a new CPU tensor, before it is written."""
    if memory.nbytes < MIN_BYTES or (madvise := _madvise()) is None:
        return
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise(begin, memory.data_ptr() + memory.nbytes - begin, _ADVICE)


@functools.cache
def _madvise() -> Callable | None:
    if not sys.platform.startswith("linux"):
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
