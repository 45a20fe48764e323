"""Which rectangles of a block table are read in place, and which are gathered."""

import numpy as np
import pytest

from hf_kvcache.blocks.runs import MIN_TOKENS_PER_RUN, Run, Span, copy_runs, find_spans

pytestmark = pytest.mark.core

LONG = MIN_TOKENS_PER_RUN // 16  # blocks of 16 tokens that are worth a run of their own


def rising(*first_ids: int, length: int) -> np.ndarray:
    return np.array(first_ids)[:, None] + np.arange(length)


def test_contiguous_blocks_are_one_run():
    assert find_spans(rising(5, length=7), 16) == [Span(0, 7, (Run(0, 1, 5, 0),))]


def test_a_batch_at_equal_distances_is_one_run():
    assert find_spans(rising(0, 9, 18, length=7), 16) == [Span(0, 7, (Run(0, 3, 0, 9),))]


def test_a_prefix_that_all_rows_share_is_one_run_of_step_0():
    table = np.concatenate([rising(0, 0, 0, length=LONG), rising(40, 60, 80, length=LONG)], axis=1)
    assert find_spans(table, 16) == [
        Span(0, LONG, (Run(0, 3, 0, 0),)),
        Span(LONG, 2 * LONG, (Run(0, 3, 40, 20),)),
    ]


def test_rows_at_falling_or_unequal_distances_are_runs_of_their_own():
    assert find_spans(rising(20, 0, length=LONG), 16)[0].runs == (Run(0, 1, 20, 0), Run(1, 2, 0, 0))
    assert find_spans(rising(0, 10, 30, length=LONG), 16)[0].runs == (Run(0, 2, 0, 10), Run(2, 3, 30, 0))


def test_short_fragments_are_gathered_together():
    fragmented = np.array([[9, 3, 7, 1], [8, 2, 6, 0]])
    assert find_spans(fragmented, 16) == [Span(0, 4, ())]


def test_a_long_run_beside_fragments_is_still_read_in_place():
    table = np.concatenate([rising(0, length=LONG), np.array([[90, 80, 70]])], axis=1)
    spans = find_spans(table, 16)
    assert spans[0] == Span(0, LONG, (Run(0, 1, 0, 0),))
    assert spans[1:] == [Span(LONG, LONG + 3, ())]


def test_spans_cover_every_column_once():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows, columns = rng.integers(1, 4), rng.integers(1, 30)
        steps = np.where(rng.random((rows, columns)) < 0.8, 1, rng.integers(2, 9, (rows, columns)))
        table = rng.integers(0, 50, (rows, 1)) + steps.cumsum(axis=1)
        spans = find_spans(table, int(rng.choice([3, 16, 64])))
        assert [span.column_start for span in spans] == [0, *(span.column_stop for span in spans[:-1])]
        assert spans[-1].column_stop == columns
        for span in spans:
            for run in span.runs:
                for row in range(run.row_start, run.row_stop):
                    first = run.block_id + (row - run.row_start) * run.row_step
                    expected = first + np.arange(span.column_stop - span.column_start)
                    assert (table[row, span.column_start : span.column_stop] == expected).all()
            if span.runs:
                assert sum(run.row_stop - run.row_start for run in span.runs) == rows


def test_an_empty_table_has_no_spans():
    assert find_spans(np.zeros((2, 0), dtype=np.int64), 16) == []


def test_copies_are_as_long_as_both_sides_rise_together():
    source, target = np.array([4, 5, 6, 8, 9]), np.array([0, 1, 5, 6, 7])
    assert copy_runs(source, target) == [(4, 0, 2), (6, 5, 1), (8, 6, 2)]
    assert copy_runs(source[:0], target[:0]) == []
