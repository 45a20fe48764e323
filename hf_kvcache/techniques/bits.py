"""Checks of the options that say how many bits a quantized cache has."""

from collections.abc import Callable
from os import PathLike
from typing import Any


def mixed_bits(*allowed: int) -> Callable[[Any], str | None]:
    """Check of `bits`: for each layer a width, or one for keys and one for values, or lists for its heads; or auto."""

    def is_width(value: Any) -> bool:
        return type(value) is int and value in allowed

    def is_part(value: Any) -> bool:
        is_list = isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_width, value))
        return is_width(value) or is_list

    def is_entry(value: Any) -> bool:
        return is_width(value) or (isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_part, value)))

    def check(value: Any) -> str | None:
        is_list = isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_entry, value))
        if value is None or value == "auto" or is_list:
            return None
        widths = ", ".join(map(str, allowed))
        return (
            f"'auto', None, or a list with a width ({widths}) or a pair [key_bits, value_bits] for each layer, each of "
            "which may be a list with a width for each KV head"
        )

    return check


def average_bits(value: Any) -> str | None:
    """Check of a number of bits that is an average."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number and 0.25 <= value <= 8 else "a number from 0.25 to 8"


def optional_average_bits(value: Any) -> str | None:
    """Check of `bits_per_value`."""
    return None if value is None else average_bits(value)


def is_calibration(value: Any) -> str | None:
    """Check of `calibration`, without loading torch to know the class."""
    is_one = value is None or isinstance(value, (str, PathLike)) or hasattr(value, "key_codecs")
    return None if is_one else "what hf_kvcache.calibrate returns, the path of a file it saved, or None"
