"""Readers: how the tokens that a query should read are found, one file each, and what a technique name builds."""

from typing import Any

import torch

from ..codecs.base import Codec, Shape
from .base import Reader
from .budget import ReadBudget
from .double_sparsity import DoubleSparsity
from .index import KeyIndex
from .page_mean import PageMean
from .quest import Quest
from .sparq import SparQ
from .topk import TopK

__all__ = ["ReadBudget", "Reader", "build_reader", "build_reader_of_encoded"]


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


def build_reader_of_encoded(name: str, options: dict[str, Any], key_codec: Codec, head_dim: int) -> Reader:
    """The reader that a technique name stands for where keys are encoded.

    `index` scores encoded keys in their stored form, and stores nothing besides. Of keys that would have to be decoded
    for that, all of them in each step, it has its copy.
    """
    if name != "index":
        return build_reader(name, options)
    shape = Shape(1, head_dim, torch.float32)
    forms = [key_codec.of_head(head).stored_form(shape) for head in range(key_codec.num_heads or 1)]
    return KeyIndex(key_codec.group_length, unread=0.0) if None in forms else TopK(key_codec.group_length)
