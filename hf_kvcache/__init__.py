"""Every way of spending less on the KV cache, for Hugging Face transformers.

Importing changes nothing. `enable()` makes the cache names valid in `generate(cache_implementation=...)`;
`make_cache(model, "a+b")` builds the same cache as an object.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import make_cache
    from .cache import KVCache
    from .calibration import Calibration, calibrate, choose_bits
    from .compat import CACHE_ARG, disable, enable, is_enabled
    from .report import MemoryReport, measure
    from .saving import load_cache

__version__ = "0.1.0"

__all__ = [
    "CACHE_ARG",
    "Calibration",
    "KVCache",
    "MemoryReport",
    "calibrate",
    "choose_bits",
    "disable",
    "enable",
    "is_enabled",
    "load_cache",
    "make_cache",
    "measure",
]

_HOMES = {
    "build": ("make_cache",),
    "cache": ("KVCache",),
    "calibration": ("Calibration", "calibrate", "choose_bits"),
    "compat": ("CACHE_ARG", "disable", "enable", "is_enabled"),
    "report": ("MemoryReport", "measure"),
    "saving": ("load_cache",),
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: torch and transformers take seconds, and `hf-kvcache --help` needs neither.
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
