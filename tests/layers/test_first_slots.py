"""Where rows begin: what is kept of a step may be used again only while they begin there."""

import numpy as np
import pytest
import torch

from hf_kvcache.layers.first_slots import FirstSlots

pytestmark = pytest.mark.core


def mask_of(*starts: int, length: int) -> torch.Tensor:
    return (torch.arange(length) >= torch.tensor(starts)[:, None])[:, None, None]


def test_the_version_changes_with_the_slots_alone():
    first = FirstSlots(2, torch.device("cpu"))
    first.note(mask_of(5, 4, length=8), 8)
    assert first.slots.tolist() == [5, 4]
    version = first.version
    first.note(mask_of(5, 4, length=9), 9)
    first.take_back(7)
    assert first.version == version
    # Both rows have nothing but padding left, and then begin elsewhere: the last one where the last one did before.
    first.take_back(3)
    first.note(mask_of(4, 5, length=8), 8)
    assert (first.slots.tolist(), first.last) == ([4, 5], 5)
    assert first.version != version


@pytest.mark.parametrize(
    "change",
    [
        lambda first: first.select_rows(np.array([1, 0])),
        lambda first: first.load_state(first.state(), torch.device("cpu")),
        lambda first: first.take_back(5),
    ],
    ids=["select_rows", "load_state", "take_back"],
)
def test_no_two_states_have_the_same_version(change):
    first = FirstSlots(2, torch.device("cpu"))
    first.note(mask_of(5, 4, length=8), 8)
    version = first.version
    change(first)
    assert first.version != version
