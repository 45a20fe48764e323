"""Paged allocation (technique 10): every token of a layer in fixed-size blocks, allocated on demand, read in place.

Cuts waste: a sequence reserves what it stores, its open block and 1/16 of room to grow. Exact. Costs no copy of the
context a step: appending is amortised O(1) and attention reads views.
Paper: Kwon et al. 2023, PagedAttention, https://arxiv.org/abs/2309.06180.
Differs from the paper: blocks of a sequence are kept in contiguous runs, so that no block table is needed to read them.
"""

from collections.abc import Callable

import torch
from torch import nn

from .. import compat
from ..attention import Piece, attend_merged, attend_packed, can_merge
from ..blocks.table import Part
from ..kernels import decode, native
from .layer import KVLayer

# From this many tokens on the decode kernel takes less time than torch's attention, whose products are of few rows.
MIN_KERNEL_LENGTH = 512
# Measured on x86 only, and without AVX2 the kernel's vectors are too short to win.
HAS_WIDE_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class BlockLayer(KVLayer):
    """Every token in blocks. Stores `[B, Hkv, seen, D]` keys and values in runs of blocks, read in place.

    Exact. While the sequences lie in one run, attention reads views of it. When they are fragmented (beams), a decode
    step attends run by run and merges the softmaxes.
    """

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new_keys, new_values = self._prepare(key_states, value_states)
        is_first = self.seen == 0
        self.table.append((new_keys, new_values))
        self.seen += new_keys.shape[2]
        if is_first:
            self.read_bytes = new_keys.nbytes + new_values.nbytes
            return key_states, value_states
        if self.context.takes_over and key_states.shape[2] == 1 and compat.hand_over(self, kwargs, key_states):
            return key_states, value_states
        keys, values = self.table.materialize()
        self.read_bytes = keys.nbytes + values.nbytes
        return (keys.contiguous(), values.contiguous()) if self.context.needs_packed else (keys, values)

    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        states = self._prepare(key_states, value_states)
        self.table.append(states)
        self.seen += key_states.shape[2]

    @torch.compiler.disable
    def attend(self, base: Callable, module: nn.Module, query, key, value, mask, *args, **kwargs):
        """Attention of one new token a row: in place over one run, or run by run."""
        is_mergeable = can_merge(base, kwargs)
        if self.table.one_run is None and is_mergeable:
            parts = self.table.parts()
            self.read_bytes = bytes_of(parts)
            groups = [[_piece(part, i, mask) for i in range(len(part.planes[0]))] for part in parts]
            return attend_merged(query, groups, kwargs.get("scaling")), None
        keys, values = self.table.materialize()
        self.read_bytes = keys.nbytes + values.nbytes
        if not is_mergeable:
            return base(module, query, keys, values, mask, *args, **kwargs)
        scaling = kwargs.get("scaling")
        gains = HAS_WIDE_VECTORS and self.seen >= MIN_KERNEL_LENGTH
        if gains and decode.can_serve(query, mask, (keys.shape[-1], values.shape[-1])) and native.library():
            return decode.attend(query, [decode.dense_segment((keys, values))], scaling=scaling, mask=mask), None
        return attend_packed(query, keys, values, mask, scaling), None


def bytes_of(parts: list[Part]) -> int:
    """Bytes that attention reads of `parts`; a prefix shared by all rows counts once."""
    tensors = [tensor for part in parts for plane in part.planes for _, tensor in plane]
    return sum(t.nbytes // t.shape[0] if t.shape[0] > 1 and t.stride(0) == 0 else t.nbytes for t in tensors)


def _piece(part: Part, index: int, mask: torch.Tensor | None) -> Piece:
    (row, key), (_, value) = part.planes[0][index], part.planes[1][index]
    if mask is not None:
        mask = mask[row : row + key.shape[0], :, :, part.start : part.stop]
    return Piece(key, value, mask, row)
