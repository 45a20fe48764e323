"""Techniques that read some of the tokens they store (6 and 7)."""

from .options import Option, Technique, at_least, one_of, optional_ratio, optional_share, share


def _reading(name: str, summary: str, *options: Option, number: int = 7) -> Technique:
    common = (
        Option(
            "budget",
            "int | None",
            None,
            "tokens that a step reads (1024 if nothing is given)",
            at_least(1, optional=True),
        ),
        Option("keep_ratio", "float | None", None, "share read of the tokens neither first nor recent", optional_ratio),
        Option("top_p", "float | None", None, "share of the estimated attention that is read", optional_ratio),
        Option("num_sink_tokens", "int", 4, "first tokens that are always read", at_least(0)),
        Option("num_recent_tokens", "int", 32, "newest tokens that are always read", at_least(1)),
        Option("dense_layers", "int", 0, "first full-attention layers that read everything", at_least(0)),
        Option("group", "str", "mean", "how heads that share keys choose: 'mean' or 'max'", one_of("mean", "max")),
    )
    return Technique(name, number, "reading", summary, False, (*common, *options))


def _page(length: int) -> Option:
    """Smaller pages read what a query needs more exactly, for twice the summaries."""
    return Option("block_size", "int", length, "tokens a block, and a page that is read as a whole", at_least(1))


_CHANNELS = Option("num_channels", "int", 16, "channels of a key that are scored", at_least(1))
READERS = (
    _reading(
        "index",
        "tokens, by a 2-bit copy of the keys",
        Option("unread", "float", 0.5, "share of the attention to unread exact tokens that the mean value gets", share),
    ),
    _reading(
        "quest",
        "blocks, by the bounds of their keys",
        _page(4),
        Option("spread", "float", 0.4, "how far a block's keys reach to their bounds: 1 is the paper's", share),
    ),
    _reading("page_mean", "blocks, by their mean keys", _page(8)),
    _reading("sparq", "tokens, by the largest channels of the query", _CHANNELS),
    _reading("double_sparsity", "tokens, by the largest channels of the keys", _CHANNELS),
    _reading("topk", "tokens, by their exact scores: the yardstick"),
)
COMPRESSED = _reading(
    "compressed",
    "clusters of tokens: their members, or a summary of them",
    Option("cluster_size", "int", 8, "tokens a cluster, on average", at_least(2)),
    Option(
        "spread",
        "float | None",
        None,
        "how far a cluster's keys reach from their mean, of the farthest: to choose (0.3; less for wide heads)",
        optional_share,
    ),
    Option("summaries", "str", "int8", "how mean keys and values lie: 'int8' or 'exact'", one_of("int8", "exact")),
    Option("segment_length", "int", 256, "tokens that are clustered together, at least", at_least(16)),
    Option("keep", "str", "all", "'all' tokens, or the 'selected' ones (keep_ratio)", one_of("all", "selected")),
    Option(
        "fit",
        "str",
        "queries",
        "keep='selected': what stays is fitted to the prompt's 'queries'; chosen by a second 'reading' too; or 'none'",
        one_of("queries", "reading", "none"),
    ),
    number=6,
)

# Readers that find what to read of encoded tokens.
_OF_ENCODED = ("index", "page_mean", "quest")


def check_reads_encoded(reading: str, encoding: str) -> None:
    """Refuse a reading technique that does not compose with an encoding.

    Raises:
        ValueError: naming both, why, and what composes.
    """
    if reading not in _OF_ENCODED:
        raise ValueError(
            f"{reading!r} and {encoding!r} do not compose: {reading!r} reads exact keys. Of encoded tokens "
            f"{', '.join(map(repr, _OF_ENCODED))} find what to read: use one of them."
        )
