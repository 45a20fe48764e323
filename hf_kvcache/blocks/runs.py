"""From block tables to a few strided views: finds the rectangles of a table whose blocks lie at a constant stride."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

# Below this many tokens of all rows a run, one gather is cheaper than one attention call for each run.
MIN_TOKENS_PER_RUN = 256


class Run(NamedTuple):
    """Rows `[row_start, row_stop)`: row `r` reads the blocks from `block_id + (r - row_start) * row_step` upwards."""

    row_start: int
    row_stop: int
    block_id: int
    row_step: int


class Span(NamedTuple):
    """Columns `[column_start, column_stop)` of a table, as runs; `runs` is empty when the span must be gathered."""

    column_start: int
    column_stop: int
    runs: tuple[Run, ...]


def find_spans(block_ids: np.ndarray, block_size: int) -> list[Span]:
    """Cut a block table `[B, N]` into spans of columns, each read as few strided runs or as one gather.

    A sequence whose blocks are contiguous, a batch of such sequences at equal distances, and a prefix that all rows
    share are each one run. Fragmented columns (beams that crossed over) are merged into spans to gather.
    """
    num_rows, num_columns = block_ids.shape
    if num_columns == 0:
        return []
    breaks = np.flatnonzero((np.diff(block_ids, axis=1) != 1).any(axis=0)) + 1
    edges = [0, *breaks.tolist(), num_columns]
    spans: list[Span] = []
    for start, stop in pairwise(edges):
        runs = _row_runs(block_ids[:, start])
        if len(edges) > 2 and (stop - start) * block_size * num_rows < MIN_TOKENS_PER_RUN * len(runs):
            if spans and not spans[-1].runs:
                start = spans.pop().column_start
            spans.append(Span(start, stop, ()))
        else:
            spans.append(Span(start, stop, tuple(runs)))
    return spans


def _row_runs(first_ids: np.ndarray) -> list[Run]:
    """Group consecutive rows whose first block ids are equally spaced."""
    ids = first_ids.tolist()
    runs, row = [], 0
    while row < len(ids):
        step = ids[row + 1] - ids[row] if row + 1 < len(ids) else 0
        stop = row + 1
        while stop < len(ids) and ids[stop] - ids[stop - 1] == step and step >= 0:
            stop += 1
        runs.append(Run(row, stop, ids[row], step if stop > row + 1 else 0))
        row = stop
    return runs


def copy_runs(source: np.ndarray, target: np.ndarray) -> list[tuple[int, int, int]]:
    """`(source start, target start, length)` of the maximal runs in which both ids rise together, in blocks."""
    if len(source) == 0:
        return []
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    edges = [0, *breaks.tolist(), len(source)]
    return [(int(source[start]), int(target[start]), stop - start) for start, stop in pairwise(edges)]
