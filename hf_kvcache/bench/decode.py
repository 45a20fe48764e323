"""Time, memory and peak of one decode step, ours beside transformers' caches, interleaved step by step.

The caches are filled with random states (a step's time does not depend on values); then every cache takes a step in
turn, so that noise on the machine meets all alike. Ratios are of medians.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..build import make_cache
from ..cache import KVCache
from ..compat import CACHE_ARG
from ..report import format_bytes, measure
from .labels import cache_label, model_label
from .peak import peak_growth
from .peers import PEERS, build_peer, peer_label

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class DecodeRow:
    """One cache at one context length. Seconds and bytes; ratios against DynamicCache and an exact StaticCache."""

    cache: str
    context: int
    step_s: float
    worst_step_s: float
    vs_dynamic: float
    vs_static: float | None
    held_bytes: int
    peak_bytes: int | None
    stored_bytes: int

    @property
    def peak_ratio(self) -> float | None:
        """Peak in one step that grows the cache, over the bytes of the tokens themselves."""
        return None if self.peak_bytes is None else self.peak_bytes / self.stored_bytes


@dataclass(frozen=True)
class DecodeBench:
    """All rows of a run, and what they were measured on."""

    model: str
    dtype: str
    device: str
    threads: int
    steps: int
    rows: tuple[DecodeRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [asdict(row) | {"peak_ratio": row.peak_ratio} for row in self.rows]}

    def table(self) -> Table:
        """A rich table, one line a cache and context."""
        title = f"decode step: {self.model}, {self.dtype}, {self.device}, {self.threads} threads, {self.steps} steps"
        table = Table(title=title)
        for column in ("context", "cache", "median step", "worst step", "/ dynamic", "/ static", "held", "peak/stored"):
            table.add_column(column, justify="left" if column == "cache" else "right")
        for row in self.rows:
            table.add_row(
                f"{row.context:,}",
                row.cache,
                f"{row.step_s * 1e3:.1f} ms",
                f"{row.worst_step_s * 1e3:.1f} ms",
                f"{row.vs_dynamic:.2f}x",
                "-" if row.vs_static is None else f"{row.vs_static:.2f}x",
                format_bytes(row.held_bytes),
                "-" if row.peak_ratio is None else f"{row.peak_ratio:.2f}x",
            )
        return table


def bench_decode(
    model: PreTrainedModel,
    *,
    contexts: Sequence[int] = (1024, 8192),
    steps: int = 20,
    caches: Sequence[tuple[str, dict[str, Any]]] = (("blocks", {}), ("static", {})),
    progress: Callable[[str], None] | None = None,
) -> DecodeBench:
    """Measure decode steps at each context length (tokens), DynamicCache and `caches` in turn.

    Args:
        model: where the caches are used.
        contexts: tokens in the cache when the measured steps begin.
        steps: measured steps of each cache, after two that are not counted.
        caches: pairs of a name and its options: ours; "static", a StaticCache of the exact size; "quantized",
            transformers' QuantizedCache. What evicts has evicted before the first step.
        progress: called with a line of text before each part.

    Raises:
        ImportError: if "quantized" has none of the packages it needs.
    """
    if steps < 1 or not contexts or min(contexts) < 2:
        raise ValueError(f"steps={steps} and contexts={list(contexts)} must be at least 1 step and 2 tokens.")
    chosen = {
        peer_label(name) if name in PEERS else cache_label(name, options): (name, options) for name, options in caches
    }
    chosen = {"dynamic": ("dynamic", {})} | chosen
    rows: list[DecodeRow] = []
    for context in contexts:
        if progress:
            progress(f"{context:,} tokens: filling {len(chosen)} caches")
        rows += _bench_context(model, chosen, context, steps)
        gc.collect()
    return DecodeBench(
        model=model_label(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        threads=torch.get_num_threads(),
        steps=steps,
        rows=tuple(rows),
    )


@torch.no_grad()
def _bench_context(
    model: PreTrainedModel, chosen: dict[str, tuple[str, dict[str, Any]]], context: int, steps: int
) -> list[DecodeRow]:
    total = steps + WARM_UP_STEPS + 1
    token = torch.full((1, 1), 5, device=model.device)
    built, peaks, stored = {}, {}, 0
    _step(model, DynamicCache(), token)  # what the first forward of a process allocates for good is nobody's peak
    for label, (name, options) in chosen.items():
        built[label] = _fill(model, _build(model, name, options, context + total), context)
        held = measure(built[label])
        if name == "dynamic":
            stored = held
        grown = peak_growth(lambda cache=built[label]: _step(model, cache, token), model.device)
        peaks[label] = None if grown is None else held + grown
    times: dict[str, list[float]] = {label: [] for label in chosen}
    for _ in range(steps + WARM_UP_STEPS):
        for label, cache in built.items():
            times[label].append(_timed(lambda cache=cache: _step(model, cache, token), model.device))
    medians = {label: statistics.median(values[WARM_UP_STEPS:]) for label, values in times.items()}
    return [
        DecodeRow(
            cache=label,
            context=context,
            step_s=medians[label],
            worst_step_s=max(times[label][WARM_UP_STEPS:]),
            vs_dynamic=medians[label] / medians["dynamic"],
            vs_static=medians[label] / medians["static"] if "static" in medians else None,
            held_bytes=measure(built[label]),
            peak_bytes=peaks[label],
            stored_bytes=stored,
        )
        for label in chosen
    ]


def _build(model: PreTrainedModel, name: str, options: dict[str, Any], length: int) -> Cache:
    return build_peer(model, name, length) if name in PEERS else make_cache(model, name, **options)


def _fill(model: PreTrainedModel, cache: Cache, context: int) -> Cache:
    """Random states in two parts, so that a cache which reserves 1/16 ahead has to grow in the first measured step."""
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(0)
    first = context * 16 // 17
    for length in (first, context - first):
        shape = (1, config.num_key_value_heads, length, head_dim)
        for layer in range(config.num_hidden_layers):
            keys, values = (torch.randn(shape, generator=generator).to(model.device, model.dtype) for _ in range(2))
            if isinstance(cache, KVCache):
                cache.layers[layer].fill(keys, values)
            else:
                cache.update(keys, values, layer)
    if isinstance(cache, KVCache) and cache.evicts:
        cache.compress(torch.randint(config.vocab_size, (1, context), generator=generator).to(model.device))
    return cache


def _step(model: PreTrainedModel, cache: Cache, token: torch.Tensor) -> None:
    model(input_ids=token, use_cache=True, **{CACHE_ARG: cache})


def _timed(run: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
