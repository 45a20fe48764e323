"""How far a cache moves the model's next-token distributions: KL divergence from the full cache on forced text.

A prefix is prefilled, then the text goes on in small chunks, so that later tokens attend to what the cache made of
earlier ones; caches that read sparsely are given it a token at a time. Perplexity alone hides what this shows: two
errors may cancel in it, not in a divergence.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..build import make_cache
from ..cache import KVCache
from ..compat import CACHE_ARG
from .forced import step_length
from .labels import cache_label, model_label

CHUNK_LENGTH = 64


@dataclass(frozen=True)
class FidelityRow:
    """One cache on one text: divergences in nats, bits a value from the live storages, reads of the last step."""

    cache: str
    kl: float
    delta_nll: float
    top1_agreement: float
    marginal_bits_per_value: float
    read_ratio: float


@dataclass(frozen=True)
class FidelityBench:
    """All rows of a run, and what they were measured on."""

    model: str
    dtype: str
    prefix: int
    scored: int
    rows: tuple[FidelityRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        """A rich table, one line a cache."""
        title = f"fidelity: {self.model}, {self.dtype}, {self.scored} tokens after {self.prefix}"
        table = Table(title=title)
        for column in ("cache", "KL (nats)", "NLL - full", "top-1 agreement", "marginal bits a value", "read / stored"):
            table.add_column(column, justify="left" if column == "cache" else "right")
        for row in self.rows:
            figures = f"{row.kl:.5f}", f"{row.delta_nll:+.4f}", f"{row.top1_agreement:.3f}"
            table.add_row(row.cache, *figures, f"{row.marginal_bits_per_value:.2f}", f"{row.read_ratio:.2f}")
        return table


@torch.no_grad()
def bench_fidelity(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    caches: Sequence[tuple[str, dict[str, Any]]],
    prefix: int = 1536,
    scored: int = 512,
    progress: Callable[[str], None] | None = None,
) -> FidelityBench:
    """Measure `caches`, pairs of a name and its options, against a DynamicCache on one text.

    Args:
        model: where the caches are used.
        input_ids: `[1, T]` with at least `prefix + scored` tokens.
        caches: what to measure.
        prefix: tokens prefilled in one pass.
        scored: tokens whose distributions are compared, after the prefix.
        progress: called with a line of text before each cache.

    Raises:
        ValueError: if the text is too short.
    """
    if input_ids.shape[1] < prefix + scored:
        raise ValueError(
            f"the text has {input_ids.shape[1]} tokens and prefix={prefix} with scored={scored} needs "
            f"{prefix + scored}: give a longer text or smaller numbers."
        )
    ids = input_ids[:, : prefix + scored].to(model.device)
    targets = ids[0, prefix:, None]
    if progress:
        progress("the full cache")
    full = _log_probs(model, DynamicCache(config=model.config.get_text_config(decoder=True)), ids, prefix)
    rows = []
    for name, options in caches:
        label = cache_label(name, options)
        if progress:
            progress(label)
        cache = make_cache(model, name, **options)
        got = _log_probs(model, cache, ids, prefix)
        report = cache.report()
        rows.append(
            FidelityRow(
                cache=label,
                kl=(full.exp() * (full - got)).sum(-1).mean().item(),
                delta_nll=(full.gather(1, targets) - got.gather(1, targets)).mean().item(),
                top1_agreement=(full.argmax(-1) == got.argmax(-1)).float().mean().item(),
                marginal_bits_per_value=report.marginal_bits_per_value,
                read_ratio=report.read_ratio,
            )
        )
    return FidelityBench(
        model=model_label(model),
        dtype=str(model.dtype).removeprefix("torch."),
        prefix=prefix,
        scored=scored,
        rows=tuple(rows),
    )


def _log_probs(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, prefix: int) -> torch.Tensor:
    """Log-probabilities `[scored, vocabulary]`, float32, of the tokens after the prefix."""
    edges = [0, *range(prefix, ids.shape[1] - 1, step_length(cache, CHUNK_LENGTH)), ids.shape[1] - 1]
    parts = []
    for start, stop in pairwise(edges):
        logits = model(ids[:, start:stop], use_cache=True, **{CACHE_ARG: cache}).logits[0]
        parts.append((logits[-1:] if start == 0 else logits).float().log_softmax(-1))
        if start == 0 and isinstance(cache, KVCache) and cache.evicts:
            cache.compress(ids[:, :prefix])
    return torch.cat(parts)
