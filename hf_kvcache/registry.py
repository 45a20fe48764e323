"""Technique names, their options, and how `a+b` composes: parsed and checked before any model runs."""

import difflib
from dataclasses import dataclass
from typing import Any

from .techniques.encoding import ENCODINGS
from .techniques.eviction import POLICIES
from .techniques.options import Option, Technique
from .techniques.reading import COMPRESSED, READERS, check_reads_encoded
from .techniques.storage import STORAGE, STORAGE_OPTIONS
from .techniques.together import check_together


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


TECHNIQUES: dict[str, Technique] = {
    technique.name: technique for technique in (*STORAGE, *ENCODINGS, *POLICIES, *READERS, COMPRESSED)
}

# Roles that do not go together, and why.
_CONFLICTS = {
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
        "available; native compression is exact under 'blocks'",
        "https://arxiv.org/abs/2502.11089",
    ),
    Family(
        7,
        "Query-aware sparse reads",
        "reads",
        False,
        tuple(reader.name for reader in READERS),
        "available; native indexers are exact under 'blocks'",
        "https://arxiv.org/abs/2406.10774",
    ),
    Family(
        8,
        "KV quantization",
        "bytes a value",
        False,
        ("int8", "int4", "int2", "fp8", "bnb8", "nf4", "fp4", "turboquant", "transform"),
        "available",
        "https://arxiv.org/abs/2402.02750",
    ),
    Family(
        9,
        "Token eviction",
        "tokens retained",
        False,
        tuple(policy.name for policy in POLICIES),
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
    if "reading" in roles and "encoding" in roles:
        check_reads_encoded(roles["reading"].name, roles["encoding"].name)
    return Recipe(name, techniques, _check_options(name, techniques, dict(options or {})))


def _check_options(name: str, techniques: tuple[Technique, ...], given: dict[str, Any]) -> dict[str, Any]:
    known = {option.name: option for option in known_options(techniques)}
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"cache {name!r} has no option {key!r}{_nearest(key, known)}")
        if (allowed := known[key].check(value)) is not None:
            raise ValueError(f"{key}={value!r} is not allowed for cache {name!r}: give {allowed}.")
    check_together(name, techniques, known, given)
    return {key: given.get(key, option.default) for key, option in known.items()}


def known_options(techniques: tuple[Technique, ...]) -> tuple[Option, ...]:
    """All options of a composition; of two with one name the later counts."""
    # Every cache of ours stores its tokens in blocks, so the storage options are always there.
    return (*STORAGE_OPTIONS, *(option for technique in techniques for option in technique.options))


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{hint}: choose from {', '.join(map(repr, sorted(known)))}."
