"""Options of one cache that contradict one another, or that what is chosen beside them does not use."""

from collections.abc import Callable
from typing import Any

from .options import Option, Technique

_USERS = {  # of the options of scorers
    "observation_window": "snapkv",
    "window_weights": "snapkv",
    "num_future_tokens": "expected_attention",
    "epsilon": "expected_attention",
    "lag_length": "lagkv",
    "average": "h2o",
    "scorers": "blend",
    "weights": "blend",
}


def check_together(
    name: str, techniques: tuple[Technique, ...], known: dict[str, Option], given: dict[str, Any]
) -> None:
    """Refuse options that do not go together.

    Args:
        name: of the cache.
        techniques: those that it is composed of.
        known: all of their options.
        given: those that the caller gave, each of which is allowed by itself.

    Raises:
        ValueError: naming the options and the remedy.
    """

    def value_of(key: str) -> Any:
        return given.get(key, known[key].default) if key in known else None

    roles = {technique.role: technique.name for technique in techniques}
    _check_amounts(given, value_of)
    _check_windows(given, roles)
    _check_reading(name, given, roles, value_of)
    _check_scorers(name, given, roles, value_of)
    _check_bits(given)


def _check_amounts(given: dict[str, Any], value_of: Callable[[str], Any]) -> None:
    amounts = [key for key in ("budget", "keep_ratio", "budget_bytes", "top_p") if given.get(key) is not None]
    if len(amounts) > 1:
        raise ValueError(f"{' and '.join(amounts)} all say how much is kept: give one of them.")
    least = sum(value_of(key) or 0 for key in ("num_sink_tokens", "num_recent_tokens"))
    if given.get("budget") is not None and given["budget"] <= least:
        raise ValueError(
            f"budget={given['budget']} leaves no room beside {least} sinks and recent tokens: give a larger budget, or "
            "a smaller num_sink_tokens or num_recent_tokens."
        )


def _check_windows(given: dict[str, Any], roles: dict[str, str]) -> None:
    if given.get("layers") is not None and given.get("global_every") is not None:
        raise ValueError("layers and global_every both choose the layers that get the window: give one of them.")
    if given.get("positions") == "cache" and roles.get("retention") == "sliding_window" and "encoding" in roles:
        raise ValueError(
            f"positions='cache' is not possible with {roles['encoding']!r}: encoded keys stay as they were rotated. "
            "Give positions='original', or use 'sliding_window' alone."
        )


def _check_reading(name: str, given: dict[str, Any], roles: dict[str, str], value_of: Callable[[str], Any]) -> None:
    if "unread" in given and "encoding" in roles:
        raise ValueError(
            f"cache {name!r} leaves out what it does not read: give unread to 'index' of exact tokens alone."
        )
    if roles.get("reading") != "compressed":
        return
    is_selected = value_of("keep") == "selected"
    if is_selected and given.get("keep_ratio") is None:
        raise ValueError("keep='selected' keeps a share of the old tokens for good: give keep_ratio, like 0.2.")
    if not is_selected:
        unused, why = ("fit",), "keep='all' lets nothing go"
    elif value_of("fit") == "none":
        unused, why = ("spread", "group", "summaries"), "keep='selected' reads all that it keeps"
    else:
        unused = ("cluster_size", "segment_length", "spread", "group", "summaries")
        why = f"fit={value_of('fit')!r} makes no clusters and reads all that it keeps"
    if wrong := [key for key in unused if key in given]:
        raise ValueError(f"{' and '.join(wrong)} would do nothing: {why}. Leave {wrong[0]} out.")


def _check_scorers(name: str, given: dict[str, Any], roles: dict[str, str], value_of: Callable[[str], Any]) -> None:
    policy = roles.get("retention")
    scorer = value_of("scorer") or policy
    if scorer == "blend":
        scorers = value_of("scorers")
        if given.get("weights") is not None and len(given["weights"]) != len(scorers):
            raise ValueError(
                f"weights={given['weights']} does not say how much each of scorers={list(scorers)} counts: give a "
                "number for each, or leave weights out."
            )
    used = {scorer, *(value_of("scorers") if scorer == "blend" else ())}
    for key, user in _USERS.items():
        if key in given and user not in used:
            raise ValueError(
                f"{key} would do nothing: it is an option of {user!r}, by which cache {name!r} does not score here. "
                f"Leave it out, or score by {user!r}."
            )


def _check_bits(given: dict[str, Any]) -> None:
    if (given.get("bits") == "auto") != (given.get("bits_per_value") is not None):
        raise ValueError("bits='auto' and bits_per_value=... belong together: give both, or neither.")
    uniform = [key for key in ("key_bits", "value_bits") if given.get(key) is not None]
    if given.get("bits") is not None and uniform:
        raise ValueError(f"bits and {uniform[0]} both say how many bits a layer has: give one of them.")
