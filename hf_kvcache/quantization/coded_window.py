"""Sinks and a window of encoded tokens: `"sliding_window+int4"` and its like (techniques 3 and 8).

Stores `num_sink_tokens` and the newest `residual_length` tokens exactly, and the rest of the window in a codec's bits.
Approximate twice: a query cannot see the middle, and sees old tokens as they were encoded. Not for tasks that look
something up in a long prompt.
Papers: Xiao et al. 2024, StreamingLLM, https://arxiv.org/abs/2309.17453; Liu et al. 2024, KIVI,
https://arxiv.org/abs/2402.02750.
Differs from both: a group is dropped when all of its tokens have left the window. Which tokens a query sees is decided
by slot, so that it depends neither on how they lie in groups nor on the chunks of a prompt.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..layers.layer import LayerContext
from ..masks import restrict_mask
from .coded_layer import CodedLayer


class CodedWindowLayer(CodedLayer):
    """The first real tokens of each row exactly, and the newest `sliding_window`, encoded but for an exact tail.

    Args:
        context: where the blocks come from.
        sliding_window: most recent tokens a query may see, itself included. Tokens, more than `residual_length`.
        coding: the arguments of `CodedLayer`.
    """

    grows = False
    name = "a quantized window"

    def __init__(self, context: LayerContext, *, sliding_window: int, **coding: Any):
        super().__init__(context, **coding)
        if sliding_window <= self.residual_length:
            raise ValueError(
                f"sliding_window={sliding_window} holds no more than the residual_length={self.residual_length} tokens "
                "that stay exact, so nothing would be encoded: widen the window, or use 'sliding_window' alone."
            )
        self.sliding_window = sliding_window

    @property
    def stored_length(self) -> int:
        """Tokens a row held now: the groups that reach into the window, the tail, and the sinks before them."""
        if self.table is None:
            return 0
        apart = self._first_slot - self.sinks.end + self.num_sink_tokens
        return super().stored_length + min(self.num_sink_tokens, max(0, apart))

    @property
    def _first_slot(self) -> int:
        """The oldest slot that is stored, sinks aside."""
        return self.coded.start * self.group_length if self.coded.length else self.table.start

    def _attend_and_store(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        if "flash" in (implementation := module.config._attn_implementation):
            raise NotImplementedError(
                f"a quantized window cannot mask with attn_implementation={implementation!r}: load the model with "
                "attn_implementation='sdpa' or 'eager'."
            )
        return super()._attend_and_store(base, module, query, states, mask, args, kwargs)

    def _encode(self, tail: list[torch.Tensor], groups: int) -> None:
        """Encode what has left the tail and not yet the window, and drop the groups that have left the window."""
        if self.record_past:
            return
        # Of a prompt longer than the window, what comes before it is never encoded.
        if (skipped := min(groups, self._oldest_group - self.coded.stop)) > 0:
            self.coded.restart(self.coded.stop + skipped)
            tail, groups = [state[:, :, skipped * self.group_length :] for state in tail], groups - skipped
        super()._encode(tail, groups)
        self.coded.drop_front(self._oldest_group)

    @property
    def _oldest_group(self) -> int:
        """The first group with a token in the window; one token more is kept, so that the newest can be taken back."""
        return max(0, self.seen - self.sliding_window) // self.group_length

    def _own_mask(self, module, query, mask, start: int, stop: int) -> torch.Tensor | None:
        own = super()._own_mask(module, query, mask, start, stop)
        if self.seen - self.sliding_window <= start:
            return own  # every query's window holds all of them
        slots = torch.arange(start, stop, device=self.device)
        queries = torch.arange(self.seen - query.shape[2], self.seen, device=self.device)[:, None]
        after_first = slots - self.sinks.first_slot[:, None]
        is_sink = (after_first >= 0) & (after_first < self.num_sink_tokens)  # [B, slots]
        allowed = (slots <= queries) & ((slots > queries - self.sliding_window) | is_sink[:, None])  # [B, Tq, slots]
        return restrict_mask(module, own, allowed[:, None], query.dtype)

    # --- contract

    def can_crop(self, count: int) -> bool:
        left = self.seen - count
        return left >= 0 and (self.table is None or self._first_slot <= max(0, left - self.sliding_window + 1))

    def _take_back(self, count: int) -> None:
        super()._take_back(count)
        # A crop commits what was recorded: only the window is needed from here on.
        self.coded.drop_front(self._oldest_group)
