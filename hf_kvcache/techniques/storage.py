"""Techniques that store every token (10), or those of a window (3)."""

from .options import Option, Technique, at_least, layer_list, one_of

STORAGE_OPTIONS = (
    Option("block_size", "int", 16, "tokens a block", at_least(1)),
    Option(
        "max_bytes", "int | None", None, "most bytes the pool of one device may reserve", at_least(1, optional=True)
    ),
)

STORAGE = (
    Technique("blocks", 10, "storage", "blocks on demand from a pool, read in place", True, STORAGE_OPTIONS),
    Technique(
        "sliding_window",
        3,
        "retention",
        "attention sinks and a window of recent tokens",
        False,
        (
            Option("sliding_window", "int", 1024, "recent tokens a query sees, itself included", at_least(1)),
            Option("num_sink_tokens", "int", 4, "first tokens that are never dropped", at_least(0)),
            Option("layers", "list[int] | None", None, "layers that get the window (None: all)", layer_list),
            Option(
                "global_every",
                "int | None",
                None,
                "keep every n-th layer global (n=6: layers 5, 11, ...)",
                at_least(1, optional=True),
            ),
            Option(
                "positions",
                "str",
                "original",
                "'original', or 'cache': sinks stay at the distance they have in the cache",
                one_of("original", "cache"),
            ),
        ),
    ),
)
