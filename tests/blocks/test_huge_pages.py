"""Large pages of memory are a hint: asked for where they help, and harmless where there are none."""

import mmap
from pathlib import Path

import pytest
import torch

from hf_kvcache.blocks import huge_pages
from hf_kvcache.blocks.huge_pages import MIN_BYTES, advise_huge_pages
from hf_kvcache.blocks.pool import BlockPool

pytestmark = pytest.mark.core

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, int, int]]:
    """What the operating system is asked, which answers that it cannot."""
    calls = []

    def refuse(*arguments: int) -> int:
        calls.append(arguments)
        return -1

    monkeypatch.setattr(huge_pages, "_madvise", lambda: refuse)
    return calls


@pytest.mark.parametrize("lead", [0, 1, 1000])
def test_memory_asked_for_reads_back(lead):
    memory = torch.empty(lead + MIN_BYTES // 4, dtype=torch.int32)[lead:]
    advise_huge_pages(memory)
    memory.copy_(torch.arange(len(memory)))
    advise_huge_pages(memory)
    assert torch.equal(memory, torch.arange(len(memory), dtype=torch.int32))


@pytest.mark.parametrize("lead", [0, 1, 1000])
def test_whole_pages_of_large_tensors_are_asked_for(asked, lead):
    memory = torch.empty(lead + MIN_BYTES, dtype=torch.uint8)[lead:]
    advise_huge_pages(memory)
    [(begin, length, _)] = asked
    assert begin % mmap.PAGESIZE == 0
    assert 0 <= begin - memory.data_ptr() < mmap.PAGESIZE
    assert begin + length == memory.data_ptr() + memory.nbytes


def test_small_tensors_are_left_alone(asked):
    advise_huge_pages(torch.empty(MIN_BYTES - 1, dtype=torch.uint8))
    assert not asked


def test_an_operating_system_that_refuses_is_no_error(asked):
    memory = BlockPool(torch.device("cpu")).reserve((MIN_BYTES,), torch.uint8)
    assert len(asked) == 1
    assert memory.fill_(7).eq(7).all()


def test_elsewhere_than_on_linux_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(huge_pages.sys, "platform", "win32")
    huge_pages._madvise.cache_clear()
    try:
        assert huge_pages._madvise() is None
        memory = torch.empty(MIN_BYTES, dtype=torch.uint8)
        advise_huge_pages(memory)
        assert memory.fill_(7).eq(7).all()
    finally:
        huge_pages._madvise.cache_clear()


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no large pages")
def test_linux_knows_that_large_pages_are_wanted():
    memory = torch.empty(2 * MIN_BYTES, dtype=torch.uint8)
    advise_huge_pages(memory)
    assert "hg" in _flags(memory.data_ptr() + MIN_BYTES)


def _flags(address: int) -> list[str]:
    """What Linux notes of the mapping that an address lies in (`VmFlags` of proc_pid_smaps)."""
    is_in = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            is_in = begin <= address < end
        elif is_in and name == "VmFlags:":
            return rest
    raise AssertionError(f"no mapping has the address {address:#x}")
