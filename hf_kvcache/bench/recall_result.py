"""What the recall benchmark found: scores of answers, their means over contexts, and differences to the full cache."""

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ..report import format_bytes


@dataclass(frozen=True)
class Score:
    """One answer. `nll` is in nats a token, `held_bytes` what the cache held after context (and question, if seen)."""

    exact_match: float
    tokens_right: float
    nll: float
    held_bytes: int


@dataclass(frozen=True)
class Estimate:
    """A mean over contexts and its standard error, which needs two of them.

    Answers about one context are not independent; contexts are. So the error is that of the contexts' own means.
    """

    mean: float
    standard_error: float | None

    def scaled(self, factor: float) -> "Estimate":
        """In another unit, `1 / factor` of this one."""
        error = None if self.standard_error is None else factor * self.standard_error
        return Estimate(factor * self.mean, error)

    def __format__(self, spec: str) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:{spec.lstrip('+')}}"
        return f"{self.mean:{spec}}{error}"


@dataclass(frozen=True)
class RecallRow:
    """One cache on one task. Differences are to the full cache, paired: the same questions about the same contexts."""

    task: str
    protocol: str
    cache: str
    exact_match: Estimate
    exact_match_difference: Estimate
    tokens_right: Estimate
    tokens_right_difference: Estimate
    nll: Estimate
    nll_difference: Estimate
    held_bytes: float
    held_ratio: float

    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        return (
            self.cache,
            f"{100 * self.exact_match.mean:.1f}",
            f"{self.exact_match_difference.scaled(100):+.1f}",
            f"{100 * self.tokens_right.mean:.1f}",
            f"{self.tokens_right_difference.scaled(100):+.1f}",
            f"{self.nll.mean:.2f}",
            f"{self.nll_difference:+.2f}",
            format_bytes(self.held_bytes),
            f"{self.held_ratio:.2f}",
        )


@dataclass(frozen=True)
class RecallBench:
    """All rows of a run, and what they were measured on."""

    model: str
    dtype: str
    contexts: int
    length: int
    questions: int
    seed: int
    rows: tuple[RecallRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        """A rich table: for each task and protocol, one line a cache."""
        title = (
            f"recall: {self.model}, {self.dtype}, {self.contexts} contexts of up to {self.length:,} tokens, "
            f"{self.questions} questions each, seed {self.seed}"
        )
        table = Table(title=title)
        table.add_column("cache")
        for column in ("exact match %", "- full", "tokens right %", "- full", "NLL", "- full", "held", "/ full"):
            table.add_column(column, justify="right")
        for (task, protocol), rows in itertools.groupby(self.rows, key=lambda row: (row.task, row.protocol)):
            table.add_section()
            table.add_row(f"[bold]{task}, {protocol}")
            for row in rows:
                table.add_row(*row.cells())
        return table


def summarize(task: str, protocol: str, cache: str, scores: list[list[Score]], full: list[list[Score]]) -> RecallRow:
    """The row of one cache, from its scores and the full cache's: a list a context, an entry a question."""

    def held(answers: list[list[Score]]) -> float:
        return statistics.fmean(score.held_bytes for context in answers for score in context)

    return RecallRow(
        task=task,
        protocol=protocol,
        cache=cache,
        exact_match=_mean(scores, lambda score: score.exact_match),
        exact_match_difference=_difference(scores, full, lambda score: score.exact_match),
        tokens_right=_mean(scores, lambda score: score.tokens_right),
        tokens_right_difference=_difference(scores, full, lambda score: score.tokens_right),
        nll=_mean(scores, lambda score: score.nll),
        nll_difference=_difference(scores, full, lambda score: score.nll),
        held_bytes=held(scores),
        held_ratio=held(scores) / held(full),
    )


def _mean(scores: list[list[Score]], figure: Callable[[Score], float]) -> Estimate:
    return estimate([statistics.fmean(map(figure, context)) for context in scores])


def _difference(scores: list[list[Score]], full: list[list[Score]], figure: Callable[[Score], float]) -> Estimate:
    pairs = zip(scores, full, strict=True)
    return estimate(
        [statistics.fmean(map(figure, ours)) - statistics.fmean(map(figure, theirs)) for ours, theirs in pairs]
    )


def estimate(values: list[float]) -> Estimate:
    """Mean and standard error of independent `values`, one a context."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error)
