"""Codecs: how keys and values are encoded, one file for each kind, and which one a technique name stands for."""

from typing import Any

from .base import Codec
from .bnb import BitsAndBytesCodec, BlockwiseCodec, check_usable
from .fp8 import Fp8Codec
from .integer import KeyIntegerCodec, ValueIntegerCodec
from .rotated import RotatedKeyCodec, RotatedValueCodec

__all__ = ["Codec", "build_codecs"]


def build_codecs(name: str, options: dict[str, Any], head_dim: int) -> tuple[Codec, Codec]:
    """The key codec and the value codec of an encoding technique.

    Raises:
        ValueError: if the options do not fit the model's head dimension.
        ImportError: if the technique needs a package that is not installed.
    """
    if name == "fp8":
        return Fp8Codec(), Fp8Codec()
    if name in ("nf4", "fp4", "bnb8"):
        check_usable(name, head_dim)
        codec = BlockwiseCodec() if name == "bnb8" else BitsAndBytesCodec(name)
        return codec, codec
    if name == "turboquant":
        return RotatedKeyCodec(options["key_bits"]), RotatedValueCodec(options["value_bits"])
    nbits = int(name.removeprefix("int"))
    size = options["q_group_size"]
    if head_dim % size:
        fitting = [s for s in (16, 32, 64, 128) if head_dim % s == 0]
        remedy = f"choose from {fitting}" if fitting else "no other does; use 'fp8' or 'turboquant'"
        raise ValueError(f"q_group_size={size} does not divide the head dimension {head_dim}: {remedy}.")
    key_bits, value_bits = options["key_bits"] or nbits, options["value_bits"] or nbits
    clip_search = options["clip_search"]
    return (
        KeyIntegerCodec(key_bits, q_group_size=size, clip_search=clip_search),
        ValueIntegerCodec(value_bits, group_length=size, q_group_size=size, clip_search=clip_search),
    )
