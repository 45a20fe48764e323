"""Readers: how the tokens that a query should read are found, one file each, and what a technique name builds."""

from typing import Any

from .base import Reader
from .budget import ReadBudget
from .double_sparsity import DoubleSparsity
from .index import KeyIndex
from .page_mean import PageMean
from .quest import Quest
from .sparq import SparQ
from .topk import TopK

__all__ = ["ReadBudget", "Reader", "build_reader"]


def build_reader(name: str, options: dict[str, Any]) -> Reader:
    """The reader that a technique name stands for."""
    size = options["block_size"]
    match name:
        case "quest":
            return Quest(size, spread=options["spread"])
        case "page_mean":
            return PageMean(size)
        case "index":
            return KeyIndex(size, unread=options["unread"])
        case "topk":
            return TopK(size)
        case "sparq":
            return SparQ(size, num_channels=options["num_channels"])
        case "double_sparsity":
            return DoubleSparsity(size, num_channels=options["num_channels"])
    raise ValueError(f"unknown reader {name!r}")
