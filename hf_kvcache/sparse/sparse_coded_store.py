"""Encoded tokens with summaries of their pages: what sparse reads over a quantized cache hold."""

import numpy as np
import torch

from ..blocks import Arena, BlockTable, load_table, table_state
from ..blocks.arena import Plane
from ..layers.layer import LayerContext
from ..layers.layer_state import LayerState
from ..quantization.coded_layer import CodedLayer
from ..readers import ReadBudget, Reader


class SparseCodedStore(CodedLayer):
    """Encoded tokens, and the reader's summaries of their pages, a slot a group.

    Args:
        context: where the blocks come from.
        name: of the technique, in messages.
        reader: estimates what a query attends to; with `reads_keys`, by the encoded keys.
        budget: how much a query reads; the exact tail stands for the recent tokens.
        arguments: as for `CodedStore`.
    """

    def __init__(self, context: LayerContext, *, name: str, reader: Reader, budget: ReadBudget, **arguments):
        super().__init__(context, **arguments)
        self.name, self.reader, self.budget = name, reader, budget
        if self.group_length % reader.unit:
            raise ValueError(
                f"{name} reads pages of block_size={reader.unit} tokens, and this codec encodes groups of "
                f"{self.group_length}: give a block_size that divides {self.group_length}."
            )
        if self.residual_length < budget.num_recent_tokens:
            raise ValueError(
                f"{name} always reads num_recent_tokens={budget.num_recent_tokens}, and residual_length="
                f"{self.residual_length} of them are exact: give a residual_length that is not less."
            )

    def _clear(self) -> None:
        super()._clear()
        self.summaries: BlockTable | None = None
        self.fitted: list[torch.Tensor] = []  # constants of each row, [B, ...]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        blocks = self.group_length // self.reader.block_size
        if planes := self.reader.planes(*self.shapes[0]):
            planes = tuple(Plane(plane.num_heads, plane.dim * blocks, plane.dtype) for plane in planes)
            arena = Arena(self.context.pool(self.device), planes, block_size=1)
            self.summaries = BlockTable(arena, key_states.shape[0])

    @property
    def tables(self) -> list[BlockTable]:
        return super().tables + ([] if self.summaries is None else [self.summaries])

    @property
    def marginal_bits(self) -> float:
        extra = 0 if self.summaries is None else self.summaries.arena.block_bytes
        return super().marginal_bits + 8 * extra / (self.group_length * self.values_per_token)

    def _encode(self, tail: list[torch.Tensor], groups: int) -> None:
        if groups and self.summaries is not None:
            keys = self.sinks.covered([tail[0][:, :, : groups * self.group_length]], self.coded_length)[0]
            if not self.summaries.length:
                slots = torch.arange(keys.shape[2], device=self.device)
                self.fitted = self.reader.fit(keys, slots >= self.sinks.first_slot[:, None])
            pages = self.reader.summarise(keys, self.fitted)
            self.summaries.append([plane.unflatten(2, (groups, -1)).flatten(3) for plane in pages])
        super()._encode(tail, groups)

    # --- contract

    def _take_back(self, count: int) -> None:
        super()._take_back(count)
        if self.summaries is not None:
            self.summaries.crop(self.summaries.length - self.coded.stop)

    def select_rows(self, rows: np.ndarray) -> None:
        if self.summaries is not None:
            self.summaries.select_rows(rows)
            # Outside inference mode, or a later turn could not use the result.
            with torch.inference_mode(False):
                index = torch.from_numpy(rows).to(self.device)
                self.fitted = [constant.index_select(0, index) for constant in self.fitted]
        super().select_rows(rows)

    def fork(self) -> "SparseCodedStore":
        forked = super().fork()
        forked.summaries = None if self.summaries is None else self.summaries.fork()
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        if self.summaries is not None:
            self.fitted = [constant.to(device) for constant in self.fitted]
            self.summaries = self.summaries.to(self.context.pool(device))

    def state(self) -> LayerState:
        state = super().state()
        if self.summaries is not None:
            state.put("summaries", table_state(self.summaries))
            state.put("fitted", LayerState({str(index): constant for index, constant in enumerate(self.fitted)}))
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        if self.summaries is not None:
            load_table(self.summaries, state.part("summaries"))
            fitted = state.part("fitted").tensors
            self.fitted = [fitted[str(index)].to(device) for index in range(len(fitted))]
            self._give_back_memory()
