"""Techniques that encode old tokens (8)."""

from .bits import average_bits, is_calibration, mixed_bits, optional_average_bits
from .options import Option, Technique, at_least, is_bool, one_width_of

_EXACT_TOKENS = (
    Option("residual_length", "int", 128, "newest tokens that stay exact", at_least(0)),
    Option("num_sink_tokens", "int", 4, "first tokens that stay exact", at_least(0)),
)


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


def _integer_technique(nbits: int) -> Technique:
    options = (
        Option("key_bits", "int | None", None, f"bits of keys (None: {nbits})", one_width_of(2, 4, 8, optional=True)),
        Option(
            "value_bits", "int | None", None, f"bits of values (None: {nbits})", one_width_of(2, 4, 8, optional=True)
        ),
        Option(
            "q_group_size",
            "int",
            64,
            "elements that share a scale; divides the head dimension",
            one_width_of(16, 32, 64, 128),
        ),
        Option("clip_search", "bool", nbits == 2, "shrink a range where that lowers the squared error", is_bool),
        *_mixed_options(2, 4, 8),
        *_EXACT_TOKENS,
    )
    return Technique(f"int{nbits}", 8, "encoding", f"KIVI integers of {nbits} bits", False, options)


ENCODINGS = (
    *(_integer_technique(nbits) for nbits in (8, 4, 2)),
    Technique("fp8", 8, "encoding", "8-bit floating point, a scale a token", False, _EXACT_TOKENS),
    Technique("bnb8", 8, "encoding", "bitsandbytes 8-bit dynamic map, blocks of 64", False, _EXACT_TOKENS),
    Technique("nf4", 8, "encoding", "bitsandbytes NF4, blocks of 64", False, _EXACT_TOKENS),
    Technique("fp4", 8, "encoding", "bitsandbytes FP4, blocks of 64", False, _EXACT_TOKENS),
    Technique(
        "turboquant",
        8,
        "encoding",
        "rotation and a Lloyd-Max codebook",
        False,
        (
            Option("key_bits", "int", 3, "bits of keys", one_width_of(2, 3, 4)),
            Option("value_bits", "int", 3, "bits of values", one_width_of(2, 3, 4)),
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
            Option("value_bits", "int", 2, "bits of values", one_width_of(2, 3, 4)),
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
