"""A window over generated tokens beside the whole prompt (technique 3, native): reference sliding attention.

Unlimited-OCR reads a page and writes it out: all of the prompt stays, and of what is written only the newest tokens.
Exact. The prompt and the window are block tables of their own and are joined for each step, as transformers does.
Source: `UnlimitedOcrDynamicReferenceSlidingWindowLayer` in transformers.
"""

import numpy as np
import torch

from ..layers.layer import KVLayer, LayerContext
from ..layers.layer_state import LayerState
from .stream import Stream


class ReferenceWindowLayer(KVLayer):
    """The first `prefill_length` tokens, and the newest `sliding_window` of those after them, in `table`.

    What the first update brings is the prompt, unless `generate()` said before how long it is. One token more than the
    next query needs is kept, so that the newest one can always be taken back.

    Args:
        context: where the blocks come from.
        sliding_window: generated tokens a query sees, its own included. Tokens, at least 1.
    """

    is_sliding = True
    grows = False

    def __init__(self, context: LayerContext, *, sliding_window: int):
        super().__init__(context)
        if sliding_window < 1:
            raise ValueError(f"sliding_window={sliding_window} must be at least 1 token.")
        # The model finds its layers by this name. Set on the class, it would enter transformers' own mapping.
        self._layer_type = context.layer_type
        self.sliding_window = sliding_window
        self.prefill_length: int | None = None
        self.prompt = Stream(context)

    def set_prefill_length(self, prefill_length: int) -> None:  # called by the model's `generate`
        """Say how many tokens the prompt has, before the first of them comes."""
        if self.prefill_length is None:
            self.prefill_length = prefill_length

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = self._prepare(key_states, value_states)
        count = states[0].shape[2]
        if self.prefill_length is None:
            self.prefill_length = self.prompt.stop + count
        of_prompt = min(count, self.prefill_length - self.prompt.stop)
        if of_prompt:
            self.prompt.append([state[:, :, :of_prompt] for state in states])
            self.seen += of_prompt
            self.table.restart(self.seen)
        pieces = [self.prompt.read()]
        if count > of_prompt:
            pieces.append(self._slide([state[:, :, of_prompt:] for state in states]))
        keys, values = (torch.cat(pair, dim=2) if len(pair) > 1 else pair[0] for pair in zip(*pieces, strict=True))
        self.read_bytes = keys.nbytes + values.nbytes
        return keys, values

    def _slide(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Store generated tokens; returns those that the oldest of them sees, and all after."""
        begin = self.seen - min(self.sliding_window - 1, self._generated)
        self.table.append(states)
        self.seen += states[0].shape[2]
        visible = [state.clone() for state in self.table.materialize(begin)]
        self._drop_front()
        return visible

    @property
    def _generated(self) -> int:
        """Tokens after the prompt."""
        return self.seen - self.prompt.stop

    def _drop_front(self) -> None:
        if not self.record_past:
            self.table.drop_front(self.seen - self.sliding_window)

    def comparable_keys(self) -> tuple[int, torch.Tensor]:
        return 0, self.prompt.read()[0]

    @property
    def stored_length(self) -> int:
        return super().stored_length + self.prompt.stop

    def _states(self) -> list[torch.Tensor]:
        return [torch.cat(pair, dim=2) for pair in zip(self.prompt.read(), self.table.materialize(), strict=True)]

    @property
    def tables(self) -> list:
        return [*super().tables, *self.prompt.tables]

    @property
    def num_dynamic_tokens(self) -> int:
        return self.prompt.stop + min(self._generated, self.sliding_window - 1)

    # --- contract

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.prefill_length is None or self.prompt.stop < self.prefill_length:
            return self.prompt.stop + query_length, 0
        past = min(self.sliding_window - 1, self._generated)
        return self.prompt.stop + past + query_length, self._generated - past

    def get_max_length(self) -> int:
        return -1 if self.prefill_length is None else self.prefill_length + self.sliding_window

    def can_crop(self, count: int) -> bool:
        left = self._generated - count
        if left <= 0:
            return count <= self.seen
        return self.table.length - count >= min(self.sliding_window - 1, left)

    def _take_back(self, count: int) -> None:
        generated = min(count, self._generated)
        if generated == self._generated:
            self.table.restart(self.seen - count)
            self.prompt.crop(count - generated)
        else:
            self.table.crop(generated)
        self.seen -= count
        # A crop commits what was recorded: only the window is needed from here on.
        self.table.drop_front(self.seen - self.sliding_window)

    def select_rows(self, rows: np.ndarray) -> None:
        self.prompt.select_rows(rows)
        super().select_rows(rows)

    def fork(self) -> "ReferenceWindowLayer":
        forked = super().fork()
        forked.prompt = self.prompt.fork()
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        self.prompt.to(device, self.context)

    def state(self) -> LayerState:
        state = super().state()
        state.put("prompt", self.prompt.state())
        if self.prefill_length is not None:
            state.numbers["prefill_length"] = self.prefill_length
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        self.prompt.load_state(state.part("prompt"), device)
        self.prefill_length = state.numbers.get("prefill_length")
        self._give_back_memory()

    def reset(self) -> None:
        super().reset()
        self.prompt.reset()
        self.prefill_length = None
