"""transformers' own caches, measured beside ours."""

from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import Cache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

PEERS = ("dynamic", "static", "quantized")


def check_peer(name: str) -> None:
    """Refuse a peer that cannot be built here, before any model runs.

    Raises:
        ImportError: if `"quantized"` has none of the packages it needs, with the command that installs one.
    """
    if name == "quantized":
        quantized_backend()


def quantized_backend() -> str:
    """What transformers' QuantizedCache quantizes with here: `"quanto"`, or `"hqq"` if only that is installed.

    Raises:
        ImportError: if neither is installed.
    """
    if is_optimum_quanto_available():
        return "quanto"
    if is_hqq_available():
        return "hqq"
    raise ImportError(
        "cache 'quantized' is transformers' own QuantizedCache, which needs one of two packages: pip install "
        "optimum-quanto, or pip install hqq."
    )


def peer_label(name: str) -> str:
    """The name, and for `"quantized"` its backend."""
    return f"{name} ({quantized_backend()})" if name == "quantized" else name


def build_peer(model: PreTrainedModel, name: str, length: int) -> Cache:
    """A new cache of transformers: `"static"` for exactly `length` tokens, `"quantized"` with its defaults (4 bits).

    Raises:
        ImportError: if `"quantized"` has none of the packages it needs.
        ValueError: if `"quantized"` is built for a model with layers that are not full attention.
    """
    config = model.config.get_text_config(decoder=True)
    if name == "static":
        return StaticCache(config=config, max_cache_len=length)
    if name == "quantized":
        return QuantizedCache(quantized_backend(), config)
    return DynamicCache(config=config)
