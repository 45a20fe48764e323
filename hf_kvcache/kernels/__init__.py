"""Attention of one new token on keys and values as they are stored: one C++ kernel, compiled at its first use."""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch


def triton_kernel(device: torch.device) -> ModuleType | None:
    """The module of the CUDA kernel, or None where it cannot serve `device`. Imports Triton at the first call."""
    if device.type != "cuda" or not _has_triton():
        return None
    return importlib.import_module(f"{__name__}.triton_decode")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
