"""Techniques that evict tokens (9): a name for each policy."""

from typing import Any

from .options import (
    Option,
    Technique,
    at_least,
    is_bool,
    number_at_least,
    numbers_of_heads,
    odd,
    one_of,
    optional_ratio,
    share,
)

_BUDGET = (
    Option("budget", "int | None", None, "tokens that each head keeps", at_least(1, optional=True)),
    Option("keep_ratio", "float | None", None, "tokens kept of those seen (0.5 if nothing is given)", optional_ratio),
    Option("budget_bytes", "int | None", None, "bytes that a sequence keeps", at_least(1, optional=True)),
    Option("num_sink_tokens", "int", 4, "first tokens that are never evicted", at_least(0)),
    Option("num_recent_tokens", "int", 16, "newest tokens that are never evicted", at_least(1)),
    Option(
        "positions",
        "str",
        "original",
        "'original', or 'cache': kept keys are turned to stand right before the newer ones",
        one_of("original", "cache"),
    ),
)
_WHEN = (
    Option(
        "when", "str", "prefill", "evict after a prompt, while decoding, or both", one_of("prefill", "decode", "both")
    ),
    Option("interval", "int", 128, "tokens between evictions while decoding", at_least(1)),
)
_MERGE = (
    Option(
        "merge",
        "float | None",
        None,
        "cosine of keys from which an evicted token counts in a kept one (0.8 measured well; None: never)",
        optional_ratio,
    ),
)
_GRANULARITY = (
    Option("granularity", "str", "head", "what keeps tokens of its own: 'head' or 'layer'", one_of("head", "layer")),
)
_SCORERS = ("snapkv", "expected_attention", "keydiff", "leverage", "h2o", "tova", "lagkv", "knorm")


def _scorers(value: Any) -> str | None:
    is_list = isinstance(value, (list, tuple)) and len(value) > 0 and all(name in _SCORERS for name in value)
    return None if is_list else "a list of " + ", ".join(map(repr, _SCORERS))


def _weights(value: Any) -> str | None:
    is_list = isinstance(value, (list, tuple)) and all(number_at_least(0)(weight) is None for weight in value)
    is_right = value is None or (is_list and 0 < sum(value) < float("inf"))
    return None if is_right else "a list of numbers of at least 0, one of them above 0, or None"


_WINDOW_OPTIONS = (
    Option("observation_window", "int", 64, "last queries that vote", at_least(1)),
    Option(
        "window_weights",
        "str",
        "harmonic",
        "how much each of them counts: 'harmonic' (the i-th last by 1 / i), or 'equal'",
        one_of("harmonic", "equal"),
    ),
)
_AVERAGE_OPTIONS = (
    Option("average", "bool", True, "a token's attention is a mean over the queries that could see it", is_bool),
)


def _expected_options(epsilon: float) -> tuple[Option, ...]:
    help_ = "added to every score before the value's norm weighs it"
    return (
        Option("num_future_tokens", "int", 512, "positions at which queries are expected", at_least(1)),
        Option("epsilon", "float", epsilon, help_, number_at_least(0)),
    )


_LAG_OPTIONS = (Option("lag_length", "int", 128, "tokens of each part", at_least(2)),)
_EXPECTED_OPTIONS = _expected_options(0.003)
_BLENDED = ("expected_attention", "keydiff", "leverage")
_ALL_SCORER_OPTIONS = (
    Option("scorers", "list", _BLENDED, "policies whose scores a blend adds up", _scorers),
    Option("weights", "list | None", None, "how much each counts (1.5 for expected_attention, 1 for others)", _weights),
    *_WINDOW_OPTIONS,
    # Beside policies that look for what is unlike the rest, expected attention need not.
    *_expected_options(0.0001),
    *_LAG_OPTIONS,
    *_AVERAGE_OPTIONS,
)


def _eviction(
    name: str, summary: str, *options: Option, kernel_size: int = 1, when: bool = True, granularity: bool = True
) -> Technique:
    pooling = (
        Option("kernel_size", "int", kernel_size, "neighbouring tokens that a score is pooled over", odd),
        Option("pooling", "str", "mean", "how scores of neighbours are joined", one_of("mean", "max")),
    )
    common = (*_BUDGET, *pooling, *((*_WHEN, *_MERGE) if when else ()), *(_GRANULARITY if granularity else ()))
    return Technique(name, 9, "retention", summary, False, (*common, *options))


POLICIES = (
    _eviction("streaming_llm", "sinks and the most recent tokens", granularity=False),
    _eviction("random", "any tokens: the control", Option("seed", "int", 0, "of the choice", at_least(0))),
    _eviction("knorm", "keys of small norm", kernel_size=5),
    _eviction("keydiff", "keys unlike the others", kernel_size=13),
    _eviction("leverage", "keys that the others cannot make up", kernel_size=9),
    _eviction("lagkv", "irregular keys and values, part by part", *_LAG_OPTIONS, kernel_size=5),
    _eviction("tova", "what the last query attends to", kernel_size=13, granularity=False),
    _eviction("h2o", "what all queries attended to", *_AVERAGE_OPTIONS, kernel_size=13),
    _eviction("snapkv", "what the end of the prompt attends to", *_WINDOW_OPTIONS, kernel_size=13),
    _eviction("expected_attention", "what queries to come will attend to", *_EXPECTED_OPTIONS, kernel_size=9),
    _eviction(
        "blend",
        "what several policies agree on",
        *_ALL_SCORER_OPTIONS,
        kernel_size=13,
    ),
    _eviction(
        "pyramidkv",
        "more tokens in lower layers",
        Option("scorer", "str", "snapkv", "policy that scores tokens", one_of(*_SCORERS, "blend")),
        Option("beta", "float", 1.5, "the last layer keeps 1 / beta of the mean", number_at_least(1)),
        *_ALL_SCORER_OPTIONS,
        kernel_size=13,
    ),
    _eviction(
        "adakv",
        "heads share a layer's budget",
        Option("scorer", "str", "blend", "policy that scores tokens", one_of(*_SCORERS, "blend")),
        Option("safeguard", "float", 0.2, "share of the mean budget that each head keeps", share),
        *_ALL_SCORER_OPTIONS,
        kernel_size=13,
        granularity=False,
    ),
    _eviction(
        "duo_attention",
        "retrieval heads keep all, streaming heads sinks and recent tokens",
        Option(
            "pattern",
            "list | None",
            None,
            "for each evicting layer, how well each KV head retrieves (None: measured)",
            numbers_of_heads,
        ),
        granularity=False,
    ),
    _eviction(
        "kvzip",
        "what repeating the prompt needs",
        Option("chunk_length", "int", 2048, "tokens read again at a time", at_least(1)),
        Option("looks", "str", "near", "what each looks at: near (its own text), or all of it", one_of("near", "all")),
        when=False,
        granularity=False,
    ),
)
