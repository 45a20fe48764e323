"""Time of the attention of one decode step in one layer, ours beside a dense cache, interleaved step by step.

A step stores one token in the layer and attends to what the layer reads. The cache is filled with random states: what
is read sparsely lies anywhere. The fastest step of many tells most on a machine that does other things too.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..build import make_cache
from ..layers.layer import KVLayer
from ..model_layers import attention_modules
from .labels import cache_label, model_label

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class AttentionRow:
    """One cache at one context length. Seconds; ratio of the fastest steps against `blocks`; share that is read."""

    cache: str
    context: int
    fastest_s: float
    median_s: float
    vs_blocks: float
    read_ratio: float


@dataclass(frozen=True)
class AttentionBench:
    """All rows of a run, and what they were measured on."""

    model: str
    dtype: str
    threads: int
    steps: int
    rows: tuple[AttentionRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        """A rich table, one line a cache and context."""
        title = (
            f"attention of a step in a layer: {self.model}, {self.dtype}, {self.threads} threads, {self.steps} steps"
        )
        table = Table(title=title)
        for column in ("context", "cache", "fastest", "median", "/ blocks", "read"):
            table.add_column(column, justify="left" if column == "cache" else "right")
        for row in self.rows:
            times = (f"{seconds * 1e3:.2f} ms" for seconds in (row.fastest_s, row.median_s))
            table.add_row(f"{row.context:,}", row.cache, *times, f"{row.vs_blocks:.2f}x", f"{row.read_ratio:.2f}")
        return table


@torch.no_grad()
def bench_attention(
    model: PreTrainedModel,
    *,
    contexts: Sequence[int] = (32768,),
    steps: int = 60,
    caches: Sequence[tuple[str, dict[str, Any]]] = (("quest", {}),),
    progress: Callable[[str], None] | None = None,
) -> AttentionBench:
    """Measure the attention of a step in the first full-attention layer, `blocks` and `caches` in turn, on a CPU.

    Args:
        model: whose heads and attention are taken.
        contexts: tokens in the layer when the measured steps begin.
        steps: measured steps of each cache.
        caches: pairs of a name and its options.
        progress: called with a line of text before each context.
    """
    if steps < 1 or not contexts or min(contexts) < 2:
        raise ValueError(f"steps={steps} and contexts={list(contexts)} must be at least 1 step and 2 tokens.")
    chosen = {"blocks": ("blocks", {})} | {cache_label(name, options): (name, options) for name, options in caches}
    rows: list[AttentionRow] = []
    for context in contexts:
        if progress:
            progress(f"{context:,} tokens: {len(chosen)} caches")
        rows += _bench_context(model, chosen, context, steps)
    dtype = str(model.dtype).removeprefix("torch.")
    return AttentionBench(model_label(model), dtype, torch.get_num_threads(), steps, tuple(rows))


def _bench_context(model: PreTrainedModel, chosen: dict, context: int, steps: int) -> list[AttentionRow]:
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config(decoder=True)
    index = next(i for i, layer in enumerate(DynamicCache(config=config).layers) if not layer.is_sliding)
    module = attention_modules(model)[index]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def random(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, module.head_dim, generator=generator).to(model.dtype)

    states = [random(kv_heads, context) for _ in range(2)]
    layers = {label: make_cache(model, name, **options).layers[index] for label, (name, options) in chosen.items()}
    for layer in layers.values():
        layer.fill(*states)
    times: dict[str, list[float]] = {label: [] for label in chosen}
    for _ in range(steps + WARM_UP_STEPS):
        for label, layer in layers.items():
            times[label].append(_step(layer, module, random(heads, 1), random(kv_heads, 1), random(kv_heads, 1)))
    fastest = {label: min(values[WARM_UP_STEPS:]) for label, values in times.items()}
    stored = 2 * states[0].nbytes
    return [
        AttentionRow(
            cache=label,
            context=context,
            fastest_s=fastest[label],
            median_s=statistics.median(values[WARM_UP_STEPS:]),
            vs_blocks=fastest[label] / fastest["blocks"],
            read_ratio=layers[label].read_bytes / stored,
        )
        for label, values in times.items()
    ]


def _step(layer: KVLayer, module: torch.nn.Module, query, key, value) -> float:
    """Seconds of storing a token and attending, as an attention module of transformers does them."""
    begin, arguments = time.perf_counter(), {}
    keys, values = layer.update(key, value, kwargs=arguments)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, None)
    attend(module, query, keys, values, None, scaling=module.scaling, dropout=0.0, **arguments)
    return time.perf_counter() - begin
