"""One timed `generate()` with a given cache, and two of them side by side.

Seconds are wall-clock. Time to first token covers the prefill; tokens per second cover only what follows it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from transformers import DynamicCache, TextStreamer

from hf_kvcache.compat import CACHE_ARG
from hf_kvcache.report import format_bytes, measure

DEFAULT_LABEL = "default (DynamicCache)"
_WARM_UP_TOKENS = 8


class TokenClock(TextStreamer):
    """Streams text to `write`, and notes when each token came."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times_s: list[float] = []
        self._write = write

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times_s.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


@dataclass(frozen=True)
class Run:
    """What one generation did: tokens, seconds, the cache it left, and on CUDA by how many bytes memory rose for it."""

    label: str
    token_ids: list[int]
    text: str
    ttft_s: float
    tpot_s: float | None
    cache_bytes: int
    peak_bytes: int | None
    cache: Any

    @property
    def tokens_per_s(self) -> float | None:
        return 1 / self.tpot_s if self.tpot_s else None

    def to_dict(self) -> dict[str, Any]:
        names = "label", "token_ids", "text", "ttft_s", "tpot_s", "tokens_per_s", "cache_bytes", "peak_bytes"
        return {name: getattr(self, name) for name in names}


def default_cache(model: Any) -> DynamicCache:
    """The cache `generate()` builds when it is given none."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@dataclass(frozen=True)
class Job:
    """What the runs of a comparison have in common: `inputs` are `[1, Tq]`, `settings` go to `generate()`."""

    model: Any
    tokenizer: Any
    inputs: Any
    settings: dict[str, Any]
    seed: int

    def run(self, cache: Any, label: str, write: Callable[[str], None]) -> Run:
        """Generate once into a new `cache`, streaming the text to `write`."""
        device = self.model.device
        held_bytes = _start_of_peak(device)
        torch.manual_seed(self.seed)
        clock = TokenClock(self.tokenizer, write)
        start_s = time.perf_counter()
        output = self.model.generate(**self.inputs, **{CACHE_ARG: cache}, streamer=clock, **self.settings)
        token_ids = output[0, self.inputs["input_ids"].shape[1] :].tolist()
        times_s = clock.times_s
        return Run(
            label=label,
            token_ids=token_ids,
            text=self.tokenizer.decode(token_ids, skip_special_tokens=True),
            ttft_s=times_s[0] - start_s,
            tpot_s=(times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None,
            cache_bytes=measure(cache),
            peak_bytes=None if held_bytes is None else torch.cuda.max_memory_allocated(device) - held_bytes,
            cache=cache,
        )

    def warm_up(self, caches: list[Any]) -> None:
        """Generate two tokens into each cache, so that no measured run pays for what happens once a process."""
        start = {name: tensor[:, :_WARM_UP_TOKENS] for name, tensor in self.inputs.items()}
        for cache in caches:
            self.model.generate(**start, **{CACHE_ARG: cache}, max_new_tokens=2, do_sample=False)


def _start_of_peak(device: torch.device) -> int | None:
    """Bytes held now, from where a peak counts; None off CUDA, where one run's leavings hide the next one's peak."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def first_difference(ours: list[int], default: list[int]) -> int | None:
    """Index of the first new token that differs, or None if the two are identical."""
    for index, (one, other) in enumerate(zip(ours, default, strict=False)):
        if one != other:
            return index
    return None if len(ours) == len(default) else min(len(ours), len(default))


def comparison_table(ours: Run, default: Run) -> Table:
    """Both runs side by side: speed, first difference, memory of the cache afterwards, measured."""
    columns = ["cache", "new tokens", "TTFT", "tokens/s", "first difference", "cache memory", "compression"]
    table = Table(*columns, *([] if ours.peak_bytes is None else ["peak memory"]))
    index = first_difference(ours.token_ids, default.token_ids)
    difference = "identical" if index is None else f"new token {index}"
    ratio = f"{ours.cache.report().compression_ratio:.2f}x"
    for one, *remarks in ((ours, difference, ratio), (default, "-", "1.00x")):
        speed = "-" if one.tokens_per_s is None else f"{one.tokens_per_s:.1f}"
        memory = format_bytes(one.cache_bytes)
        cells = [one.label, str(len(one.token_ids)), f"{one.ttft_s:.3f} s", speed, remarks[0], memory, remarks[1]]
        table.add_row(*cells, *([] if one.peak_bytes is None else [format_bytes(one.peak_bytes)]))
    return table
