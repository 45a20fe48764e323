"""Sink-and-window cache: keep the first tokens and the most recent ones, forget the middle.

Stores `num_sink_tokens + sliding_window` tokens a layer, whatever the sequence length. Approximate on a model that
was trained with full attention: a query cannot see the middle. Equals the full cache while nothing has been dropped.
Not for tasks that look something up in a long prompt.
Paper: Xiao et al. 2024, StreamingLLM, https://arxiv.org/abs/2309.17453 (section 3.2).
Differs from the paper: each query sees its own sinks and window whatever the chunking of the prompt (the paper's code
lets a prompt attend to all of itself), sinks are the first real tokens of each left-padded row, and
`positions="original"` is the default.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from ..attention import Piece, attend_merged, can_merge
from ..masks import join_masks, restrict_mask
from ..rotary import Rotary
from .attending_layer import AttendingLayer
from .layer import LayerContext
from .layer_state import LayerState
from .sinks import Sinks


class SinkWindowLayer(AttendingLayer):
    """The first `num_sink_tokens` real tokens of each row `[B, H, S, D]`, and the newest `sliding_window` in blocks.

    Args:
        context: where the blocks come from.
        sliding_window: most recent tokens a query may see, itself included. Tokens, at least 1.
        num_sink_tokens: first tokens that every query sees. Tokens, at least 0.
        rotary: given for `positions="cache"`: the distance from a query to the sinks is then as if the forgotten
            tokens had never been there, so no distance exceeds `num_sink_tokens + sliding_window`.
    """

    grows = False
    name = "sliding_window"

    def __init__(
        self, context: LayerContext, *, sliding_window: int, num_sink_tokens: int, rotary: Rotary | None = None
    ):
        super().__init__(context)
        if sliding_window < 1:
            raise ValueError(f"sliding_window={sliding_window} must be at least 1 token.")
        if num_sink_tokens < 0:
            raise ValueError(f"num_sink_tokens={num_sink_tokens} must be at least 0 tokens.")
        self.sliding_window = sliding_window
        self.num_sink_tokens = num_sink_tokens
        self.rotary = rotary
        self.sinks: Sinks | None = None

    @property
    def stored_length(self) -> int:
        """Tokens a row held now: the window, and the sinks that it no longer covers."""
        apart = 0 if self.sinks is None else self.table.start - self.sinks.end + self.num_sink_tokens
        return super().stored_length + min(self.num_sink_tokens, max(0, apart))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.sinks = Sinks((key_states, value_states), self.num_sink_tokens)

    def _attend_and_store(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        before = self.seen - states[0].shape[2]
        self._check_mask(module, states[0].shape[2])

        def run(window: list[torch.Tensor], begin: int):
            window_mask = self._window_mask(module, query, mask, before, begin)
            return self._attend(base, module, query, window, window_mask, mask, before, args, kwargs)

        return self._advance(states, mask, run)

    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        states = self._prepare(key_states, value_states)
        self.seen += states[0].shape[2]
        self._advance(states, None, lambda window, begin: None)

    def _advance(self, states: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None, run: Callable):
        """Store the new tokens, `run` on the slots that any query's window holds, and drop what has left it."""
        count = states[0].shape[2]
        before = self.seen - count
        self.sinks.capture(states, before, mask)
        begin = max(self.table.start, before - self.sliding_window + 1)
        if count <= self.sliding_window or self.record_past:
            self.table.append(states)
            window = self.table.materialize(begin)
        else:
            window = [torch.cat(pair, dim=2) for pair in zip(self.table.materialize(begin), states, strict=True)]
            self.table.restart(self.seen - self.sliding_window)
            self.table.append([state[:, :, -self.sliding_window :] for state in states])
        output = run(window, begin)
        if not self.record_past:
            self.table.drop_front(self.seen - self.sliding_window)
        return output

    def _attend(self, base, module, query, window, window_mask, mask, before: int, args: tuple, kwargs: dict):
        """`window` are keys and values of the slots from the oldest that any query's window holds."""
        self.read_bytes = sum(state.nbytes for state in window)
        if not self.num_sink_tokens or self.seen <= self.sliding_window:
            return base(module, query, *window, window_mask, *args, **kwargs)
        self.read_bytes += self.sinks.nbytes
        sink_mask = self._sink_mask(module, query, mask, before)
        if can_merge(base, kwargs) and (query.shape[2] == 1 or self.rotary is not None):
            turned = None if self.rotary is None else self.rotary.turn(query, self._forgotten(before))
            groups = [[Piece(*self.sinks.states, sink_mask, query=turned)], [Piece(*window, window_mask)]]
            return attend_merged(query, groups, kwargs.get("scaling")), None
        if self.rotary is not None:
            raise NotImplementedError(
                "sliding_window with positions='cache' attends to sinks and window apart, which this model's attention "
                f"({module.config._attn_implementation}, or a softcap or sink logits) does not allow: use "
                "attn_implementation='sdpa', or positions='original'."
            )
        lengths = (self.num_sink_tokens, window[0].shape[2])
        joined = join_masks(module, query, (sink_mask, window_mask), lengths)
        states = [torch.cat(pair, dim=2) for pair in zip(self.sinks.states, window, strict=True)]
        return base(module, query, *states, joined, *args, **kwargs)

    def _check_mask(self, module: nn.Module, count: int) -> None:
        implementation = module.config._attn_implementation
        if count > 1 and self.seen > self.sliding_window and "flash" in implementation:
            raise NotImplementedError(
                f"sliding_window cannot mask a prompt with attn_implementation={implementation!r}: load the model with "
                "attn_implementation='sdpa' or 'eager'."
            )

    # --- masks: all from slots, so that left padding and chunks of any size come out the same

    def _query_slots(self, before: int) -> torch.Tensor:
        return torch.arange(before, self.seen, device=self.device)

    def _window_mask(self, module, query, mask, before: int, begin: int) -> torch.Tensor | None:
        """The mask over the slots `[begin, seen)`: the model's own, restricted to each query's window."""
        own = None if mask is None else mask[..., begin : self.seen]
        if self.seen - begin <= self.sliding_window:
            return own
        slots, queries = torch.arange(begin, self.seen, device=self.device), self._query_slots(before)[:, None]
        allowed = (slots > queries - self.sliding_window) & (slots <= queries)
        return restrict_mask(module, own, allowed[None, None], query.dtype)

    def _sink_mask(self, module, query, mask, before: int) -> torch.Tensor | None:
        """Whether each query sees each sink here: only those that its own window does not hold."""
        if mask is None and before - self.sliding_window >= self.sinks.end - 1:
            return None
        outside = self._query_slots(before) - self.sliding_window
        allowed = (self.sinks.slots[:, None, :] <= outside[:, None])[:, None]  # [B, 1, Tq, S]
        own = None if mask is None else self.sinks.own_mask(mask)
        return restrict_mask(module, own, allowed, query.dtype)

    def _forgotten(self, before: int) -> torch.Tensor:
        """Minus the tokens between the last sink and the window of each query, `[B, Tq]`."""
        gap = (
            self._query_slots(before) + 1 - self.sliding_window - self.sinks.first_slot[:, None] - self.num_sink_tokens
        )
        return -gap.clamp(min=0)

    # --- contract

    def can_crop(self, count: int) -> bool:
        left = self.seen - count
        held = 0 if self.table is None else self.table.length
        return left >= 0 and held - count >= min(self.sliding_window - 1, left)

    def _take_back(self, count: int) -> None:
        super()._take_back(count)
        self.table.drop_front(self.seen - self.sliding_window)
        self.sinks.take_back(self.seen)

    def select_rows(self, rows: np.ndarray) -> None:
        if self.table is not None:
            self.sinks.select_rows(rows)
        super().select_rows(rows)

    def fork(self) -> "SinkWindowLayer":
        forked = super().fork()
        forked.sinks = None if self.sinks is None else self.sinks.fork()
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        if self.sinks is not None:
            self.sinks.to(device)

    def state(self) -> LayerState:
        state = super().state()
        if self.sinks is not None:
            state.put("sinks", self.sinks.state())
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        if self.sinks is not None:
            self.sinks.load_state(state.part("sinks"))

    def reset(self) -> None:
        super().reset()
        self.sinks = None
