"""The sliding window that a model was trained with (technique 3): its local layers keep their window and no more.

Cuts tokens retained. Exact for layers that the model itself masks to a window (Gemma-3, Mistral, gpt-oss). Costs no
copy of the window a step: whole blocks go as the window moves on.
Paper: Beltagy et al. 2020, Longformer, https://arxiv.org/abs/2004.05150 (section 3.1).
"""

import torch

from .layer import KVLayer, LayerContext


class SlidingBlockLayer(KVLayer):
    """The window of a sliding layer: stores the newest `sliding_window` tokens, and those of the last step besides.

    Exact for layers that the model itself masks to `sliding_window` tokens, the query's own included. One token more
    than the next query needs is kept, so that the newest one can always be taken back.
    """

    is_sliding = True
    grows = False

    def __init__(self, context: LayerContext, *, sliding_window: int):
        super().__init__(context)
        if sliding_window < 1:
            raise ValueError(f"sliding_window={sliding_window} must be at least 1 token.")
        self.sliding_window = sliding_window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.shares_values = key_states is value_states
        super().lazy_initialization(key_states, value_states)

    @property
    def num_dynamic_tokens(self) -> int:
        return min(self.seen, self.sliding_window - 1)

    @property
    def dynamic_bytes(self) -> int:
        # transformers stores shared values twice.
        return super().dynamic_bytes * (2 if self.shares_values else 1)

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = self._prepare(key_states, value_states)[: 1 if self.shares_values else 2]
        count = states[0].shape[2]
        past = min(self.sliding_window - 1, self.seen)
        keep = self.sliding_window
        if self.record_past or count <= keep:
            self._drop_front()
            self.table.append(states)
            self.seen += count
            held = self.table.materialize(self.seen - count - past)
        else:
            # Longer than the window: store only what the window will hold, attend to all of it now.
            old = self.table.materialize(self.seen - past)
            held = [torch.cat(pair, dim=2) if past else pair[1] for pair in zip(old, states, strict=True)]
            self.seen += count
            self.table.restart(self.seen - keep)
            self.table.append([state[:, :, -keep:] for state in states])
        self.read_bytes = sum(state.nbytes for state in held)
        return (held[0], held[-1]) if past else (key_states, value_states)

    def _drop_front(self) -> None:
        if not self.record_past:
            self.table.drop_front(self.seen - self.sliding_window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = min(self.sliding_window - 1, self.seen)
        return past + query_length, self.seen - past

    def get_max_length(self) -> int:
        return self.sliding_window

    def can_crop(self, count: int) -> bool:
        left = self.seen - count
        return left >= 0 and self.stored_length - count >= min(self.sliding_window - 1, left)

    def _take_back(self, count: int) -> None:
        super()._take_back(count)
        # A crop commits what was recorded: only the window is needed from here on.
        self.table.drop_front(self.seen - self.sliding_window)
