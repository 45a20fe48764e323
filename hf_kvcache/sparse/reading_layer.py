"""Layers that store everything, or say what became of it, and read some of it in a decode step.

A prompt, and every forward of several tokens, reads everything. After that, what has closed is summarised once.
"""

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from ..attention import attend_packed, can_merge
from ..blocks import BlockTable, load_table, table_state
from ..layers.attending_layer import AttendingLayer
from ..layers.first_slots import FirstSlots
from ..layers.layer import LayerContext
from ..layers.layer_state import LayerState
from ..readers import ReadBudget


class ReadingLayer(AttendingLayer):
    """All tokens in blocks (`table`), and summaries of closed ones in tables of their own (`sides`).

    Subclasses make the side tables in `lazy_initialization`, fill them in `_summarise`, and read in `_attend_selected`.

    Args:
        context: where the blocks come from.
        name: of the technique, in messages.
        budget: how much a query reads.
    """

    def __init__(self, context: LayerContext, *, name: str, budget: ReadBudget):
        super().__init__(context)
        self.name = name
        self.budget = budget
        self._clear()

    def _clear(self) -> None:
        self.sides: dict[str, BlockTable] = {}
        self.fitted: list[torch.Tensor] = []  # constants of each row, [B, ...]
        self.first: FirstSlots | None = None
        self._call: tuple | None = None  # of the last step by the decode kernel: what it depends on, the call, and more

    def __getstate__(self) -> dict:
        # A call points into this layer's own tensors: copies make their own.
        return self.__dict__ | {"_call": None}

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.first = FirstSlots(key_states.shape[0], self.device)

    @property
    def tables(self) -> list[BlockTable]:
        return [] if self.table is None else [self.table, *self.sides.values()]

    # --- forward

    def _attend_and_store(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        is_first = self.table.length == 0
        self._store(states)
        self.first.note(mask, self.seen)
        if query.shape[2] == 1 and not self._reads_all():
            output = self._attend_selected(base, module, query, mask, args, kwargs)
        else:
            tail = states if is_first else self.table.materialize()
            output = self._attend_all(base, module, query, tail, mask, args, kwargs)
        self._summarise(mask)
        return output

    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        states = self._prepare(key_states, value_states)
        self.seen += states[0].shape[2]
        self._store(states)
        self.first.note(None, self.seen)
        self._summarise(None)

    def _store(self, states: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.table.append(states)

    def _attend_all(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        self.read_bytes = sum(state.nbytes for state in states)
        if query.shape[2] == 1 and can_merge(base, kwargs):
            return attend_packed(query, *states, mask, kwargs.get("scaling")), None
        return base(module, query, *states, mask, *args, **kwargs)

    @abstractmethod
    def _reads_all(self) -> bool:
        """Whether a decode step would choose everything."""

    @abstractmethod
    def _summarise(self, mask: torch.Tensor | None) -> None:
        """Summarise what has closed since the last time, each part once; `mask` is that of the last forward."""

    @abstractmethod
    def _attend_selected(self, base: Callable, module: nn.Module, query, mask, args: tuple, kwargs: dict): ...

    @abstractmethod
    def _crop_sides(self) -> None:
        """Forget summaries of what is no longer there: `seen` tokens are left."""

    # --- contract

    def _take_back(self, count: int) -> None:
        super()._take_back(count)
        self.first.take_back(self.seen)
        self._crop_sides()

    def select_rows(self, rows: np.ndarray) -> None:
        if self.table is not None:
            self.first.select_rows(rows)
            for side in self.sides.values():
                side.select_rows(rows)
            # Outside inference mode, or a later turn could not use the result.
            with torch.inference_mode(False):
                index = torch.from_numpy(rows).to(self.device)
                self.fitted = [constant.index_select(0, index) for constant in self.fitted]
        super().select_rows(rows)

    def fork(self) -> "ReadingLayer":
        forked = super().fork()
        if self.table is not None:
            forked.first = self.first.fork()
            forked.sides = {name: side.fork() for name, side in self.sides.items()}
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        if self.table is not None:
            self.first.to(device)
            self.fitted = [constant.to(device) for constant in self.fitted]
            self.sides = {name: side.to(self.context.pool(device)) for name, side in self.sides.items()}

    def state(self) -> LayerState:
        state = super().state()
        if self.table is not None:
            state.put("first", self.first.state())
            for name, side in self.sides.items():
                state.put(name, table_state(side))
            state.put("fitted", LayerState({str(index): constant for index, constant in enumerate(self.fitted)}))
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        if self.table is not None:
            self.first.load_state(state.part("first"), device)
            for name, side in self.sides.items():
                load_table(side, state.part(name))
            fitted = state.part("fitted").tensors
            self.fitted = [fitted[str(index)].to(device) for index in range(len(fitted))]
            self._give_back_memory()

    def reset(self) -> None:
        super().reset()
        self._clear()
