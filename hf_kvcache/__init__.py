"""Every way of spending less on the KV cache, for Hugging Face transformers.

Importing changes nothing. `enable()` makes the cache names valid in `generate(cache_implementation=...)`;
`make_cache(model, "a+b")` builds the same cache as an object.
"""

from .cache import KVCache, make_cache
from .compat import CACHE_ARG, disable, enable, is_enabled
from .report import MemoryReport, measure

__version__ = "0.1.0"

__all__ = ["CACHE_ARG", "KVCache", "MemoryReport", "disable", "enable", "is_enabled", "make_cache", "measure"]
