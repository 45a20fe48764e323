"""The block pool of one device: it owns every arena's memory and keeps the count, so that a cap can be enforced."""

import weakref

import torch

from .huge_pages import advise_huge_pages


class BlockPool:
    """Memory of all blocks on one device, shared by the layers (and, when passed on, by the caches) that use it.

    Each layer keeps its blocks in one `Arena`; an arena gets its memory here and gives it back here, one tensor at a
    time, so that growing the cache never holds more than one extra tensor of one layer.

    Args:
        device: where the blocks live.
        max_bytes: the most bytes all arenas together may reserve; None for no limit.
    """

    def __init__(self, device: torch.device | str, *, max_bytes: int | None = None):
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes} must be at least 1: leave it out for a pool without a limit.")
        self.device = torch.device(device)
        self.max_bytes = max_bytes
        self._arenas: weakref.WeakSet = weakref.WeakSet()

    def __deepcopy__(self, memo: dict) -> "BlockPool":
        copied = memo[id(self)] = BlockPool(self.device, max_bytes=self.max_bytes)
        return copied

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the arenas hold now."""
        return sum(arena.reserved_bytes for arena in self._arenas)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that at least one sequence refers to."""
        return sum(arena.used_bytes for arena in self._arenas)

    def register(self, arena: object) -> None:
        """Count `arena` in this pool for as long as it is alive."""
        self._arenas.add(arena)

    def check_room(self, added_bytes: int) -> None:
        """Refuse to grow by `added_bytes` beyond the limit, before anything has moved.

        Raises:
            RuntimeError: if the pool has a limit and would exceed it.
        """
        if self.max_bytes is not None and (total := self.reserved_bytes + added_bytes) > self.max_bytes:
            raise RuntimeError(
                f"the block pool on {self.device} is empty: {total} bytes are needed and max_bytes={self.max_bytes}: "
                "raise max_bytes, free a sequence, or shorten the context."
            )

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        # A tensor born in inference mode could never be written outside it, in a later turn.
        with torch.inference_mode(False):
            memory = torch.empty(shape, dtype=dtype, device=self.device)
        if self.device.type == "cpu":
            advise_huge_pages(memory)
        return memory
