"""The block table against plain tensors: any sequence of operations, checked by one invariant after each step."""

import copy
import gc
import math

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.multiprocessing.reductions import StorageWeakRef

from hf_kvcache.blocks import Arena, BlockPool, BlockTable
from hf_kvcache.blocks.arena import BLOCKS_PER_SPARE, Plane

pytestmark = pytest.mark.core

PLANES = (Plane(2, 4, torch.float32), Plane(1, 3, torch.float32))
MAX_TABLES = 4


def random_states(rows: int, length: int) -> list[torch.Tensor]:
    return [torch.randn(rows, plane.num_heads, length, plane.dim) for plane in PLANES]


def check(pairs: list[tuple[BlockTable, list[torch.Tensor]]]) -> None:
    """The invariant: each table holds its oracle's tokens, and blocks are counted exactly as they are referred to."""
    by_arena: dict[int, list[BlockTable]] = {}
    for table, oracle in pairs:
        by_arena.setdefault(id(table.arena), []).append(table)
        parts = table.parts()
        for plane, (stored, expected) in enumerate(zip(table.materialize(), oracle, strict=True)):
            assert torch.equal(stored, expected)
            joined = [part.joined(plane) for part in parts]
            assert torch.equal(torch.cat(joined, dim=2) if joined else expected[:, :, :0], expected)
        assert table.length == oracle[0].shape[2]
        size = table.arena.block_size
        # Only the open ends at the front and the back are not tokens.
        assert table.block_ids.shape[1] * size < table.length + 2 * size
    for tables in by_arena.values():
        arena = tables[0].arena
        assert {id(table) for table in arena.tables} == {id(table) for table in tables}
        counted = np.zeros_like(arena.ref_count)
        for table in tables:
            np.add.at(counted, table.block_ids.ravel(), 1)
        assert (counted == arena.ref_count).all()
        free = np.flatnonzero(arena.ref_count == 0)
        assert len(free) + arena.num_used_blocks == arena.num_blocks
        assert all(plane.shape[1] == arena.num_blocks * arena.block_size for plane in arena.planes)


def check_waste(arena: Arena) -> None:
    """Right after growth, what is free is the room that the growth policy left behind each row."""
    room = sum(table.num_rows * (table.block_ids.shape[1] // BLOCKS_PER_SPARE) for table in arena.tables)
    assert arena.num_blocks - arena.num_used_blocks <= room


class BlockTableMachine(RuleBasedStateMachine):
    """Several tables on one arena (and copies of it), each beside the plain tensors it should hold."""

    @initialize(block_size=st.sampled_from([1, 3, 16]), rows=st.integers(1, 3))
    def start(self, block_size, rows):
        torch.manual_seed(0)
        self.arena = Arena(BlockPool("cpu"), PLANES, block_size=block_size)
        self.pairs = [(BlockTable(self.arena, rows), random_states(rows, 0))]

    def pick(self, data) -> int:
        return data.draw(st.integers(0, len(self.pairs) - 1), label="table")

    def replace(self, index: int, oracle: list[torch.Tensor]) -> None:
        self.pairs[index] = (self.pairs[index][0], oracle)

    @rule(data=st.data(), count=st.one_of(st.integers(0, 3), st.integers(4, 40)))
    def append(self, data, count):
        index = self.pick(data)
        table, oracle = self.pairs[index]
        states, before = random_states(table.num_rows, count), table.arena.planes[0]
        table.append(states)
        if table.arena.planes[0] is not before:
            check_waste(table.arena)
        self.replace(index, [torch.cat(pair, dim=2) for pair in zip(oracle, states, strict=True)])

    @rule(data=st.data())
    def crop(self, data):
        index = self.pick(data)
        table, oracle = self.pairs[index]
        count = data.draw(st.integers(0, table.length), label="count")
        table.crop(count)
        self.replace(index, [o[:, :, : o.shape[2] - count] for o in oracle])

    @rule(data=st.data())
    def drop_front(self, data):
        index = self.pick(data)
        table, oracle = self.pairs[index]
        count = data.draw(st.integers(0, table.length), label="count")
        table.drop_front(table.start + count)
        self.replace(index, [o[:, :, count:] for o in oracle])

    @rule(data=st.data(), position=st.integers(0, 50))
    def restart(self, data, position):
        index = self.pick(data)
        table, oracle = self.pairs[index]
        table.restart(position)
        assert (table.start, table.stop) == (position, position)
        self.replace(index, [o[:, :, :0] for o in oracle])

    @rule(data=st.data())
    def select_rows(self, data):
        index = self.pick(data)
        table, oracle = self.pairs[index]
        rows = np.array(data.draw(st.lists(st.integers(0, table.num_rows - 1), min_size=1, max_size=4), label="rows"))
        table.select_rows(rows)
        self.replace(index, [o[rows] for o in oracle])

    @precondition(lambda self: len(self.pairs) < MAX_TABLES)
    @rule(data=st.data())
    def fork(self, data):
        table, oracle = self.pairs[self.pick(data)]
        used = table.arena.num_used_blocks
        self.pairs.append((table.fork(), oracle))
        assert table.arena.num_used_blocks == used, "a fork copied a block"

    @precondition(lambda self: len(self.pairs) < MAX_TABLES)
    @rule(data=st.data())
    def deepcopy(self, data):
        table, oracle = self.pairs[self.pick(data)]
        self.pairs.append((copy.deepcopy(table), oracle))
        assert self.pairs[-1][0].arena is not table.arena

    @precondition(lambda self: len(self.pairs) < MAX_TABLES)
    @rule(data=st.data())
    def to(self, data):
        table, oracle = self.pairs[self.pick(data)]
        moved = table.to(BlockPool("cpu"))
        assert (moved.start, moved.stop) == (table.start, table.stop)
        self.pairs.append((moved, oracle))

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(data=st.data())
    def free(self, data):
        del self.pairs[self.pick(data)]

    @rule(data=st.data())
    def compact(self, data):
        table, _ = self.pairs[self.pick(data)]
        table.compact()
        check_waste(table.arena)

    @invariant()
    def holds(self):
        check(getattr(self, "pairs", []))

    def teardown(self):
        pairs = getattr(self, "pairs", [])
        arenas = {id(table.arena): table.arena for table, _ in pairs}.values()
        pairs.clear()
        gc.collect(0)
        assert all(arena.num_used_blocks == 0 for arena in arenas), "blocks leaked"


TestBlockTable = BlockTableMachine.TestCase
TestBlockTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def make_table(*, rows: int = 2, length: int = 0, block_size: int = 4, max_bytes: int | None = None):
    """A table with `length` random tokens, and those tokens."""
    torch.manual_seed(0)
    table = BlockTable(Arena(BlockPool("cpu", max_bytes=max_bytes), PLANES, block_size=block_size), rows)
    states = random_states(rows, length)
    table.append(states)
    return table, states


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_decoding_keeps_to_the_growth_policy(block_size):
    table, _ = make_table(rows=3, length=63, block_size=block_size)
    moved, planes, first = 0, table.arena.planes[0], table.block_ids.shape[1]
    for _ in range(400):
        columns = table.block_ids.shape[1]
        table.append(random_states(3, 1))
        check_waste(table.arena)
        moved += columns * (table.arena.planes[0] is not planes)
        planes = table.arena.planes[0]
        columns = math.ceil(table.length / block_size)
        assert table.arena.num_blocks <= 3 * (columns + columns // BLOCKS_PER_SPARE)
    # Amortised O(1): a move of n blocks comes after at least n / 16 new ones.
    assert 0 < moved <= BLOCKS_PER_SPARE * (table.block_ids.shape[1] - first) + first


def test_one_sequence_and_a_batch_stay_one_run_while_decoding():
    table, _ = make_table(rows=3, length=17)
    for _ in range(100):
        table.append(random_states(3, 1))
        assert table.one_run is not None
        assert table.materialize()[0].data_ptr() == table.arena.planes[0].data_ptr(), "the context was copied"


def test_growing_holds_one_extra_plane_at_a_time(monkeypatch):
    table, _ = make_table(rows=1, length=64)
    old = [StorageWeakRef(plane.untyped_storage()) for plane in table.arena.planes]
    reserve, alive = BlockPool.reserve, []

    def watch(self, *args):
        alive.append([not storage.expired() for storage in old])
        return reserve(self, *args)

    monkeypatch.setattr(BlockPool, "reserve", watch)
    table.append(random_states(1, 64))
    assert alive == [[True, True], [False, True]]


def test_a_full_pool_refuses_and_leaves_the_table_as_it_was():
    token_bytes = sum(plane.num_heads * plane.dim * 4 for plane in PLANES)
    refusals = []
    # Every cap, so that each plane in turn is the one that no longer fits.
    for max_blocks in np.arange(10, 24, 0.25):
        table, states = make_table(rows=2, length=13, max_bytes=int(max_blocks * 4 * token_bytes))
        more = random_states(2, 24)
        try:
            table.append(more)
        except RuntimeError as error:
            refusals.append(str(error))
        else:
            states = [torch.cat(pair, dim=2) for pair in zip(states, more, strict=True)]
        check([(table, states)])
        # And it goes on once there is room.
        table.crop(table.length - 1)
        table.append([m[:, :, :2] for m in more])
        states = [torch.cat([s[:, :, :1], m[:, :, :2]], dim=2) for s, m in zip(states, more, strict=True)]
        check([(table, states)])
    assert 0 < len(refusals) < 56
    assert all("the block pool on cpu is empty" in error and "raise max_bytes" in error for error in refusals)


def test_a_copy_on_write_that_finds_the_pool_full_leaves_both_tables_as_they_were():
    table, states = make_table(rows=2, length=13)
    table.arena.pool.max_bytes = table.arena.pool.reserved_bytes
    forks = [table.fork() for _ in range(3)]
    for fork in forks[:2]:
        try:
            fork.append(random_states(2, 1))
        except RuntimeError:
            continue
        fork.crop(1)
    with pytest.raises(RuntimeError, match="is empty"):
        forks[2].append(random_states(2, 9))
    check([(fork, states) for fork in [table, *forks]])


def test_blocks_released_twice_are_noticed():
    table, _ = make_table(length=5)
    block_ids = table.block_ids.copy()
    table.restart(0)
    with pytest.raises(AssertionError, match="released twice"):
        table.arena.release(block_ids)
    table.arena.ref_count[:] = 0


def test_crop_of_more_than_is_held_is_refused():
    table, states = make_table(length=5)
    table.drop_front(2)
    with pytest.raises(ValueError, match=r"crop\(4\) is not possible: the table holds 3 tokens"):
        table.crop(4)
    check([(table, [state[:, :, 2:] for state in states])])


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="block_size=0"):
        Arena(BlockPool("cpu"), PLANES, block_size=0)
    with pytest.raises(ValueError, match="max_bytes=0"):
        BlockPool("cpu", max_bytes=0)


def test_the_pool_counts_every_arena_that_is_alive():
    pool = BlockPool("cpu")
    tables = [BlockTable(Arena(pool, PLANES, block_size=4), 1) for _ in range(2)]
    for table in tables:
        table.append(random_states(1, 9))
    assert pool.reserved_bytes == sum(p.untyped_storage().nbytes() for t in tables for p in t.arena.planes) > 0
    assert pool.used_bytes == 2 * 3 * tables[0].arena.block_bytes
    del table, tables[0]
    assert pool.reserved_bytes == tables[0].arena.reserved_bytes
