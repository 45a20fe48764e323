"""What a cache holds while a model writes on: bytes at intervals of one long generation, each cache in its own run.

Bytes are those of live storages, between two tokens. Greedy, and forced past any end-of-text token.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import BaseStreamer

from ..build import make_cache
from ..compat import CACHE_ARG
from ..report import format_bytes, measure
from .labels import cache_label, model_label
from .peers import PEERS, build_peer, peer_label

NUM_MARKS = 5  # columns of the table
_NUM_LOOKS = 256  # times that a run's bytes are looked at


class Watch(BaseStreamer):
    """Notes what `cache` holds after the prompt (0 new tokens) and after every `interval` new tokens."""

    def __init__(self, cache: Cache, interval: int):
        self.held: dict[int, int] = {}
        self._cache, self._interval, self._count = cache, interval, -1

    def put(self, value: torch.Tensor) -> None:
        # First the prompt, which is not in the cache yet; then each new token, when those before it are.
        if self._count >= 0 and self._count % self._interval == 0:
            self.held[self._count] = measure(self._cache)
        self._count += 1

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class GrowthRow:
    """One cache in one run: bytes held after each of `GrowthBench.marks`, and the most of all looks."""

    cache: str
    held_bytes: tuple[int, ...]
    most_bytes: int


@dataclass(frozen=True)
class GrowthBench:
    """All rows of a run, and what they were measured on. `marks` are numbers of new tokens."""

    model: str
    dtype: str
    prompt: int
    new_tokens: int
    marks: tuple[int, ...]
    rows: tuple[GrowthRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        """A rich table, one line a cache."""
        title = f"bytes held: {self.model}, {self.dtype}, {self.new_tokens:,} tokens written after {self.prompt:,}"
        table = Table(title=title)
        table.add_column("cache")
        for mark in self.marks:
            table.add_column(f"after {mark:,}", justify="right")
        table.add_column("at most", justify="right")
        for row in self.rows:
            table.add_row(row.cache, *map(format_bytes, row.held_bytes), format_bytes(row.most_bytes))
        return table


def bench_growth(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    caches: Sequence[tuple[str, dict[str, Any]]],
    new_tokens: int = 4096,
    progress: Callable[[str], None] | None = None,
) -> GrowthBench:
    """Generate `new_tokens` after the prompt `input_ids` `[1, T]` with each of `caches`, and look at what they hold.

    Args:
        model: what generates.
        input_ids: the prompt.
        caches: pairs of a name and its options: ours, or one of transformers' (`"dynamic"`, `"static"`, `"quantized"`).
        new_tokens: tokens to write, at least 16.
        progress: called with a line of text before each cache.

    Raises:
        ImportError: if `"quantized"` has none of the packages it needs.
        ValueError: if there are fewer new tokens.
    """
    if new_tokens < 16:
        raise ValueError(f"new_tokens={new_tokens} shows no growth: give at least 16.")
    interval = -(-new_tokens // _NUM_LOOKS)
    last = (new_tokens - 1) // interval
    marks = tuple(interval * (last * i // (NUM_MARKS - 1)) for i in range(NUM_MARKS))
    prompt = input_ids.to(model.device)
    rows = []
    for name, options in caches:
        label = peer_label(name) if name in PEERS else cache_label(name, options)
        if progress:
            progress(label)
        length = prompt.shape[1] + new_tokens
        cache = build_peer(model, name, length) if name in PEERS else make_cache(model, name, **options)
        watch = Watch(cache, interval)
        settings = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
        model.generate(prompt, streamer=watch, **settings, **{CACHE_ARG: cache})
        held = tuple(watch.held[mark] for mark in marks)
        rows.append(GrowthRow(label, held, max(watch.held.values())))
    return GrowthBench(
        model=model_label(model),
        dtype=str(model.dtype).removeprefix("torch."),
        prompt=prompt.shape[1],
        new_tokens=new_tokens,
        marks=marks,
        rows=tuple(rows),
    )
