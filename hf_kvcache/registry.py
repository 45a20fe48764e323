"""Technique names, their options, and how `a+b` composes: parsed and checked before any model runs."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .bit_options import average_bits, check_together, is_calibration, mixed_bits, optional_average_bits


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


@dataclass(frozen=True)
class Family:
    """One of the twelve ways of spending less on the KV cache, and what this version has of it."""

    number: int
    title: str
    cuts: str
    exact: bool
    names: tuple[str, ...]
    status: str
    paper: str


@dataclass(frozen=True)
class Recipe:
    """A checked composition: its techniques in the order given, and a value for each of their options."""

    name: str
    techniques: tuple[Technique, ...]
    options: dict[str, Any]

    def fills(self, role: str) -> Technique | None:
        """The technique that decides `role`, if any."""
        return next((t for t in self.techniques if t.role == role), None)

    @property
    def changed_options(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        defaults = {option.name: option.default for option in known_options(self.techniques)}
        return {key: value for key, value in self.options.items() if value != defaults[key]}


def _at_least(minimum: int, *, optional: bool = False) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if (optional and value is None) or (type(value) is int and value >= minimum):
            return None
        return f"an integer of at least {minimum}" + (", or None" if optional else "")

    return check


def _one_of(*values: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in values else "one of " + ", ".join(map(repr, values))


def _bool(value: Any) -> str | None:
    return None if isinstance(value, bool) else "True or False"


def _bits(*allowed: int, optional: bool = False) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if (optional and value is None) or (type(value) is int and value in allowed):
            return None
        return "one of " + ", ".join(map(str, allowed)) + (", or None" if optional else "")

    return check


def _mixed_options(*allowed: int) -> tuple[Option, ...]:
    return (
        Option(
            "bits",
            "list | 'auto' | None",
            None,
            "bits of each full-attention layer, or 'auto': where they lower the error most",
            mixed_bits(*allowed),
        ),
        Option(
            "bits_per_value",
            "float | None",
            None,
            "for bits='auto': bits a value to spend, all overhead included",
            optional_average_bits,
        ),
    )


def _layer_list(value: Any) -> str | None:
    is_list = isinstance(value, (list, tuple)) and all(type(i) is int and i >= 0 for i in value)
    return None if value is None or is_list else "a list of layer indices of at least 0, or None for all layers"


_STORAGE = (
    Option("block_size", "int", 16, "tokens a block", _at_least(1)),
    Option(
        "max_bytes", "int | None", None, "most bytes the pool of one device may reserve", _at_least(1, optional=True)
    ),
)

_EXACT_TOKENS = (
    Option("residual_length", "int", 128, "newest tokens that stay exact", _at_least(0)),
    Option("num_sink_tokens", "int", 4, "first tokens that stay exact", _at_least(0)),
)


def _integer_technique(nbits: int) -> Technique:
    options = (
        Option("key_bits", "int | None", None, f"bits of keys (None: {nbits})", _bits(2, 4, 8, optional=True)),
        Option("value_bits", "int | None", None, f"bits of values (None: {nbits})", _bits(2, 4, 8, optional=True)),
        Option(
            "q_group_size", "int", 64, "elements that share a scale; divides the head dimension", _bits(16, 32, 64, 128)
        ),
        Option("clip_search", "bool", nbits == 2, "shrink a range where that lowers the squared error", _bool),
        *_mixed_options(2, 4, 8),
        *_EXACT_TOKENS,
    )
    return Technique(f"int{nbits}", 8, "encoding", f"KIVI integers of {nbits} bits", False, options)


def _ratio(value: Any) -> str | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if value is None or (is_number and 0 < value <= 1) else "a number in (0, 1], or None"


def _share(value: Any) -> str | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number and 0 <= value <= 1 else "a number in [0, 1]"


def _number_at_least(minimum: float) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return None if is_number and value >= minimum else f"a number of at least {minimum}"

    return check


def _numbers_of_heads(value: Any) -> str | None:
    is_list = isinstance(value, (list, tuple)) and all(
        isinstance(heads, (list, tuple)) and heads and all(isinstance(score, (int, float)) for score in heads)
        for heads in value
    )
    return None if value is None or (is_list and value) else "a list of numbers for each layer, or None"


def _odd(value: Any) -> str | None:
    return None if type(value) is int and value >= 1 and value % 2 else "an odd integer of at least 1"


_BUDGET = (
    Option("budget", "int | None", None, "tokens that each head keeps", _at_least(1, optional=True)),
    Option("keep_ratio", "float | None", None, "tokens kept of those seen (0.5 if nothing is given)", _ratio),
    Option("budget_bytes", "int | None", None, "bytes that a sequence keeps", _at_least(1, optional=True)),
    Option("num_sink_tokens", "int", 4, "first tokens that are never evicted", _at_least(0)),
    Option("num_recent_tokens", "int", 16, "newest tokens that are never evicted", _at_least(1)),
    Option(
        "positions",
        "str",
        "original",
        "'original', or 'cache': kept keys are turned to stand right before the newer ones",
        _one_of("original", "cache"),
    ),
)
_WHEN = (
    Option(
        "when", "str", "prefill", "evict after a prompt, while decoding, or both", _one_of("prefill", "decode", "both")
    ),
    Option("interval", "int", 128, "tokens between evictions while decoding", _at_least(1)),
)
_GRANULARITY = (
    Option("granularity", "str", "head", "what keeps tokens of its own: 'head' or 'layer'", _one_of("head", "layer")),
)
_SCORERS = ("snapkv", "expected_attention", "keydiff", "h2o", "tova", "lagkv", "knorm")


def _scorers(value: Any) -> str | None:
    is_list = isinstance(value, (list, tuple)) and len(value) > 0 and all(name in _SCORERS for name in value)
    return None if is_list else "a list of " + ", ".join(map(repr, _SCORERS))


_WINDOW_OPTIONS = (Option("observation_window", "int", 8, "last queries that vote", _at_least(1)),)
_EXPECTED_OPTIONS = (
    Option("num_future_tokens", "int", 512, "positions at which queries are expected", _at_least(1)),
    Option("epsilon", "float", 0.01, "added to every score before the value's norm weighs it", _number_at_least(0)),
)
_LAG_OPTIONS = (Option("lag_length", "int", 128, "tokens of each part", _at_least(2)),)
_ALL_SCORER_OPTIONS = (*_WINDOW_OPTIONS, *_EXPECTED_OPTIONS, *_LAG_OPTIONS)


def _eviction(
    name: str, summary: str, *options: Option, kernel_size: int = 1, when: bool = True, granularity: bool = True
) -> Technique:
    pooling = (
        Option("kernel_size", "int", kernel_size, "neighbouring tokens that a score is pooled over", _odd),
        Option("pooling", "str", "mean", "how scores of neighbours are joined", _one_of("mean", "max")),
    )
    common = (*_BUDGET, *pooling, *(_WHEN if when else ()), *(_GRANULARITY if granularity else ()))
    return Technique(name, 9, "retention", summary, False, (*common, *options))


_POLICIES = (
    _eviction("streaming_llm", "sinks and the most recent tokens", granularity=False),
    _eviction("random", "any tokens: the control", Option("seed", "int", 0, "of the choice", _at_least(0))),
    _eviction("knorm", "keys of small norm"),
    _eviction("keydiff", "keys unlike the others", kernel_size=13),
    _eviction("lagkv", "irregular keys and values, part by part", *_LAG_OPTIONS),
    _eviction("tova", "what the last query attends to", kernel_size=13, granularity=False),
    _eviction("h2o", "what all queries attended to", kernel_size=13),
    _eviction("snapkv", "what the end of the prompt attends to", *_WINDOW_OPTIONS, kernel_size=13),
    _eviction("expected_attention", "what queries to come will attend to", *_EXPECTED_OPTIONS, kernel_size=13),
    _eviction(
        "blend",
        "what several policies agree on",
        Option("scorers", "list", ("expected_attention", "keydiff"), "policies whose ranks are added", _scorers),
        *_ALL_SCORER_OPTIONS,
        kernel_size=9,
    ),
    _eviction(
        "pyramidkv",
        "more tokens in lower layers",
        Option("scorer", "str", "snapkv", "policy that scores tokens", _one_of(*_SCORERS)),
        Option("beta", "float", 20.0, "the last layer keeps 1 / beta of the mean", _number_at_least(1)),
        *_ALL_SCORER_OPTIONS,
        kernel_size=13,
    ),
    _eviction(
        "adakv",
        "heads share a layer's budget",
        Option("scorer", "str", "expected_attention", "policy that scores tokens", _one_of(*_SCORERS)),
        Option("safeguard", "float", 0.2, "share of the mean budget that each head keeps", _share),
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
            _numbers_of_heads,
        ),
        granularity=False,
    ),
    _eviction(
        "kvzip",
        "what repeating the prompt needs",
        Option("chunk_length", "int", 2048, "tokens read again at a time", _at_least(1)),
        when=False,
        granularity=False,
    ),
)


def _reading(name: str, summary: str, *options: Option, number: int = 7) -> Technique:
    common = (
        Option(
            "budget",
            "int | None",
            None,
            "tokens that a step reads (1024 if nothing is given)",
            _at_least(1, optional=True),
        ),
        Option("keep_ratio", "float | None", None, "share read of the tokens neither first nor recent", _ratio),
        Option("top_p", "float | None", None, "share of the estimated attention that is read", _ratio),
        Option("num_sink_tokens", "int", 4, "first tokens that are always read", _at_least(0)),
        Option("num_recent_tokens", "int", 32, "newest tokens that are always read", _at_least(1)),
        Option("dense_layers", "int", 0, "first full-attention layers that read everything", _at_least(0)),
        Option("group", "str", "mean", "how heads that share keys choose: 'mean' or 'max'", _one_of("mean", "max")),
    )
    return Technique(name, number, "reading", summary, False, (*common, *options))


_CHANNELS = Option("num_channels", "int", 16, "channels of a key that are scored", _at_least(1))
_READERS = (
    _reading("index", "tokens, by a 2-bit copy of the keys"),
    _reading(
        "quest",
        "blocks, by the bounds of their keys",
        Option("spread", "float", 0.25, "how far a block's keys reach to their bounds: 1 is the paper's", _share),
    ),
    _reading("page_mean", "blocks, by their mean keys"),
    _reading("sparq", "tokens, by the largest channels of the query", _CHANNELS),
    _reading("double_sparsity", "tokens, by the largest channels of the keys", _CHANNELS),
    _reading("topk", "tokens, by their exact scores: the yardstick"),
)
_COMPRESSED = _reading(
    "compressed",
    "clusters of tokens: their members, or a summary of them",
    Option("cluster_size", "int", 16, "tokens a cluster, on average", _at_least(2)),
    Option("segment_length", "int", 256, "tokens that are clustered together, at least", _at_least(16)),
    Option("keep", "str", "all", "'all' tokens, or the 'selected' ones (keep_ratio)", _one_of("all", "selected")),
    number=6,
)

TECHNIQUES: dict[str, Technique] = {
    t.name: t
    for t in (
        Technique("blocks", 10, "storage", "blocks on demand from a pool, read in place", True, _STORAGE),
        Technique(
            "sliding_window",
            3,
            "retention",
            "attention sinks and a window of recent tokens",
            False,
            (
                Option("sliding_window", "int", 1024, "recent tokens a query sees, itself included", _at_least(1)),
                Option("num_sink_tokens", "int", 4, "first tokens that are never dropped", _at_least(0)),
                Option("layers", "list[int] | None", None, "layers that get the window (None: all)", _layer_list),
                Option(
                    "global_every",
                    "int | None",
                    None,
                    "keep every n-th layer global (n=6: layers 5, 11, ...)",
                    _at_least(1, optional=True),
                ),
                Option(
                    "positions",
                    "str",
                    "original",
                    "'original', or 'cache': sinks stay at the distance they have in the cache",
                    _one_of("original", "cache"),
                ),
            ),
        ),
        *(_integer_technique(nbits) for nbits in (8, 4, 2)),
        *_POLICIES,
        _COMPRESSED,
        *_READERS,
        Technique("fp8", 8, "encoding", "8-bit floating point, a scale a token", False, _EXACT_TOKENS),
        Technique("nf4", 8, "encoding", "bitsandbytes NF4, blocks of 64", False, _EXACT_TOKENS),
        Technique("fp4", 8, "encoding", "bitsandbytes FP4, blocks of 64", False, _EXACT_TOKENS),
        Technique(
            "turboquant",
            8,
            "encoding",
            "rotation and a Lloyd-Max codebook",
            False,
            (
                Option("key_bits", "int", 3, "bits of keys", _bits(2, 3, 4)),
                Option("value_bits", "int", 3, "bits of values", _bits(2, 3, 4)),
                *_mixed_options(2, 3, 4),
                *_EXACT_TOKENS,
            ),
        ),
        Technique(
            "transform",
            8,
            "encoding",
            "calibrated transform coding of keys, rotated values",
            False,
            (
                Option("key_bits", "float", 2.5, "average bits of keys", average_bits),
                Option("value_bits", "int", 2, "bits of values", _bits(2, 3, 4)),
                Option(
                    "calibration",
                    "Calibration | path | None",
                    None,
                    "what hf_kvcache.calibrate measured (None: measured once, on a text of ours)",
                    is_calibration,
                ),
                *_EXACT_TOKENS,
            ),
        ),
    )
}

# Roles that do not go together, and why.
_CONFLICTS = {
    ("reading", "encoding"): "what a query reads is gathered token by token, and encoded tokens lie in groups",
    ("reading", "retention"): "one reads some of all tokens, the other lets go of tokens for good",
}

_NATIVE = "native: caches of models trained with it are held exactly"
_LATER = "not in this version"

CATALOG: tuple[Family, ...] = (
    Family(1, "GQA / MQA", "KV heads", True, (), _NATIVE, "https://arxiv.org/abs/2305.13245"),
    Family(2, "Cross-layer sharing", "layers", True, (), _NATIVE, "https://arxiv.org/abs/2405.12981"),
    Family(
        3,
        "Sliding window",
        "tokens retained",
        False,
        ("sliding_window",),
        "available; native windows are exact under every cache",
        "https://arxiv.org/abs/2309.17453",
    ),
    Family(4, "Multi-head latent attention", "heads x dims", True, (), _NATIVE, "https://arxiv.org/abs/2405.04434"),
    Family(5, "Hybrid Mamba", "layers", True, (), _NATIVE, "https://arxiv.org/abs/2403.19887"),
    Family(
        6,
        "Compressed attention",
        "reads or tokens retained",
        False,
        ("compressed",),
        "available",
        "https://arxiv.org/abs/2502.11089",
    ),
    Family(
        7,
        "Query-aware sparse reads",
        "reads",
        False,
        tuple(r.name for r in _READERS),
        "available",
        "https://arxiv.org/abs/2406.10774",
    ),
    Family(
        8,
        "KV quantization",
        "bytes a value",
        False,
        ("int8", "int4", "int2", "fp8", "nf4", "fp4", "turboquant", "transform"),
        "available",
        "https://arxiv.org/abs/2402.02750",
    ),
    Family(
        9,
        "Token eviction",
        "tokens retained",
        False,
        tuple(policy.name for policy in _POLICIES),
        "available",
        "https://arxiv.org/abs/2404.14469",
    ),
    Family(10, "Paged allocation", "waste", True, ("blocks",), "available", "https://arxiv.org/abs/2309.06180"),
    Family(11, "Prefix reuse", "duplicated compute", True, (), _LATER, "https://arxiv.org/abs/2312.07104"),
    Family(12, "Offloading", "GPU residency", True, (), _LATER, "https://arxiv.org/abs/2303.06865"),
)

_TRANSFORMERS_NAMES = ("dynamic", "static", "offloaded", "offloaded_static", "quantized", "paged", "hybrid")


def is_ours(name: Any) -> bool:
    """Whether `name` is one of our techniques or a composition, valid or not, and not transformers' own name."""
    return isinstance(name, str) and ("+" in name or name in TECHNIQUES)


def resolve(name: str, options: dict[str, Any] | None = None) -> Recipe:
    """Check a technique name or composition `a+b` and its options.

    Raises:
        ValueError: naming the unknown technique or option and the nearest spelling, the value that is not allowed, or
            the pair that does not compose and why.
    """
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        if part in _TRANSFORMERS_NAMES and len(parts) > 1:
            raise ValueError(f"{part!r} is transformers' own cache and does not compose with ours: use it alone.")
        if part not in TECHNIQUES:
            raise ValueError(f"unknown cache technique {part!r}{_nearest(part, TECHNIQUES)}")
    techniques = tuple(TECHNIQUES[part] for part in parts)
    roles: dict[str, Technique] = {}
    for technique in techniques:
        if (other := roles.get(technique.role)) is not None:
            raise ValueError(
                f"{other.name!r} and {technique.name!r} do not compose: both decide the {technique.role}. Keep one."
            )
        roles[technique.role] = technique
    for pair, reason in _CONFLICTS.items():
        if all(role in roles for role in pair):
            first, second = (roles[role].name for role in pair)
            raise ValueError(f"{first!r} and {second!r} do not compose: {reason}. Use one of them.")
    return Recipe(name, techniques, _check_options(name, techniques, dict(options or {})))


def _check_options(name: str, techniques: tuple[Technique, ...], given: dict[str, Any]) -> dict[str, Any]:
    known = {option.name: option for option in known_options(techniques)}
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"cache {name!r} has no option {key!r}{_nearest(key, known)}")
        if (allowed := known[key].check(value)) is not None:
            raise ValueError(f"{key}={value!r} is not allowed for cache {name!r}: give {allowed}.")
    if given.get("layers") is not None and given.get("global_every") is not None:
        raise ValueError("layers and global_every both choose the layers that get the window: give one of them.")
    amounts = [key for key in ("budget", "keep_ratio", "budget_bytes", "top_p") if given.get(key) is not None]
    if len(amounts) > 1:
        raise ValueError(f"{' and '.join(amounts)} all say how much is kept: give one of them.")
    least = sum(given.get(key, known[key].default) for key in ("num_sink_tokens", "num_recent_tokens") if key in known)
    if given.get("budget") is not None and given["budget"] <= least:
        raise ValueError(
            f"budget={given['budget']} leaves no room beside {least} sinks and recent tokens: give a larger budget, or "
            "a smaller num_sink_tokens or num_recent_tokens."
        )
    names = {t.role: t.name for t in techniques}
    if given.get("positions") == "cache" and names.get("retention") == "sliding_window" and "encoding" in names:
        raise ValueError(
            f"positions='cache' is not possible with {names['encoding']!r}: encoded keys stay as they were rotated. "
            "Give positions='original', or use 'sliding_window' alone."
        )
    if given.get("keep") == "selected" and given.get("keep_ratio") is None:
        raise ValueError("keep='selected' keeps a share of the old tokens for good: give keep_ratio, like 0.2.")
    check_together(given)
    return {key: given.get(key, option.default) for key, option in known.items()}


def known_options(techniques: tuple[Technique, ...]) -> tuple[Option, ...]:
    """All options of a composition; of two with one name the later counts."""
    # Every cache of ours stores its tokens in blocks, so the storage options are always there.
    return (*_STORAGE, *(option for technique in techniques for option in technique.options))


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{hint}: choose from {', '.join(map(repr, sorted(known)))}."
