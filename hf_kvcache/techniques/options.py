"""What an option and a technique are, and checks of values: each returns what is allowed if a value is not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One keyword of a technique. `check` returns what is allowed if the value is not, else None."""

    name: str
    type_name: str
    default: Any
    help: str
    check: Callable[[Any], str | None]


@dataclass(frozen=True)
class Technique:
    """A name that `cache_implementation` takes. `role` is what it decides; a role can be filled once."""

    name: str
    number: int
    role: str
    summary: str
    exact: bool
    options: tuple[Option, ...]


def at_least(minimum: int, *, optional: bool = False) -> Callable[[Any], str | None]:
    """Check of an integer of at least `minimum`, or None where it is optional."""

    def check(value: Any) -> str | None:
        if (optional and value is None) or (type(value) is int and value >= minimum):
            return None
        return f"an integer of at least {minimum}" + (", or None" if optional else "")

    return check


def one_of(*values: str) -> Callable[[Any], str | None]:
    """Check of one of some words."""
    return lambda value: None if value in values else "one of " + ", ".join(map(repr, values))


def is_bool(value: Any) -> str | None:
    """Check of a flag."""
    return None if isinstance(value, bool) else "True or False"


def one_width_of(*allowed: int, optional: bool = False) -> Callable[[Any], str | None]:
    """Check of a width in bits."""

    def check(value: Any) -> str | None:
        if (optional and value is None) or (type(value) is int and value in allowed):
            return None
        return "one of " + ", ".join(map(str, allowed)) + (", or None" if optional else "")

    return check


def layer_list(value: Any) -> str | None:
    """Check of a list of layers."""
    is_list = isinstance(value, (list, tuple)) and all(type(i) is int and i >= 0 for i in value)
    return None if value is None or is_list else "a list of layer indices of at least 0, or None for all layers"


def optional_ratio(value: Any) -> str | None:
    """Check of a part of something, or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if value is None or (is_number and 0 < value <= 1) else "a number in (0, 1], or None"


def share(value: Any) -> str | None:
    """Check of a part of something that may be nothing."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number and 0 <= value <= 1 else "a number in [0, 1]"


def optional_share(value: Any) -> str | None:
    """Check of a part of something that may be nothing, or None."""
    return None if value is None or share(value) is None else "a number in [0, 1], or None"


def number_at_least(minimum: float) -> Callable[[Any], str | None]:
    """Check of a number of at least `minimum`."""

    def check(value: Any) -> str | None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number and value >= minimum else f"a number of at least {minimum}"

    return check


def odd(value: Any) -> str | None:
    """Check of an odd number of neighbours."""
    return None if type(value) is int and value >= 1 and value % 2 else "an odd integer of at least 1"


def numbers_of_heads(value: Any) -> str | None:
    """Check of a number for each KV head of each layer."""
    is_list = isinstance(value, (list, tuple)) and all(
        isinstance(heads, (list, tuple)) and heads and all(isinstance(score, (int, float)) for score in heads)
        for heads in value
    )
    return None if value is None or (is_list and value) else "a list of numbers for each layer, or None"
