"""Token eviction (technique 9): a layer that lets go of the tokens a policy finds least important, for good.

Cuts tokens retained. Approximate: a query cannot see what was evicted. Which tokens go is the policy's business
(`hf_kvcache.policies`); when, and how many, the plan's. Each head of each row keeps its own tokens, stored compactly:
what is evicted is really freed. Everything happens after attention: no query misses what it should have seen.
Not for tasks that come back to details which did not matter before, unless the policy was made for that (`kvzip`).
"""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from ..codecs.by_head import HeadCodecs
from ..layers.layer import LayerContext
from ..layers.layer_state import LayerState
from ..masks import as_mask_for
from ..policies.base import Held, Policy, Queries
from ..policies.merging import merge_evicted
from ..policies.query_log import QueryLog
from ..policies.reconstruction import Reconstruction
from ..policies.selection import smooth
from ..rotary import Rotary
from .eviction_plan import EvictionPlan
from .kept_layer import KeptLayer


class EvictingLayer(KeptLayer):
    """Keeps what `policy` chooses, when `plan` says so; stored as a `KeptLayer`.

    Args:
        context: where the blocks come from.
        name: of the technique, in messages.
        policy: scores tokens.
        plan: how many stay, and when the others go.
        rotary: given for `positions="cache"`: kept keys are turned to stand right before the newer tokens, as if what
            was evicted had never been there.
        codecs: of each head's kept keys and values; None for none.
        residual_length: newest tokens that are not encoded.
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        name: str,
        policy: Policy,
        plan: EvictionPlan,
        rotary: Rotary | None = None,
        codecs: HeadCodecs | None = None,
        residual_length: int = 0,
    ):
        self.name = name
        self.policy = policy
        self.plan = plan
        super().__init__(
            context,
            rotary=rotary,
            codecs=codecs,
            residual_length=residual_length,
            num_sink_tokens=plan.num_sink_tokens,
        )

    def _clear(self) -> None:
        super()._clear()
        self.reconstruction: Reconstruction | None = None
        observer = self.policy.new_observer()
        self._log = None if observer is None else QueryLog(observer)
        self._prompt_end: int | None = None
        self._last_eviction = 0

    @property
    def evicts_together(self) -> bool:
        """Whether the tokens of all layers share one budget, so that a prompt's go from all of them at once."""
        return self.policy.needs_reconstruction

    @property
    def grows(self) -> bool:
        return self.plan.interval is None or self.plan.budget.keep_ratio is not None

    # --- forward

    def begin_prompt(self, end: int) -> None:
        """The tokens up to slot `end` are a prompt: evict when they are in."""
        if self.plan.at_prompt_end and not self.record_past:
            self._prompt_end = end

    def end_prompt(self) -> None:
        self._prompt_end = None

    def _attend_and_store(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        self.scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        end, before = self.seen, self.seen - states[0].shape[2]
        if self._prompt_end is None or not before < self._prompt_end < end:
            return self._step(base, module, query, states, mask, args, kwargs)
        # Draft tokens follow the prompt (assisted decoding): they must see what it leaves, not all of it.
        outputs = []
        for begin, stop in ((before, self._prompt_end), (self._prompt_end, end)):
            self.seen = stop
            at = slice(begin - before, stop - before)
            if mask is None and begin:
                slots = torch.arange(stop, device=query.device)
                own = as_mask_for(module, (slots <= slots[begin:, None])[None, None], query.dtype)
            else:
                own = None if mask is None else mask[:, :, at, :stop]
            part = [state[:, :, at] for state in states]
            outputs.append(self._step(base, module, query[:, :, at], part, own, args, kwargs)[0])
        return torch.cat(outputs, dim=1), None

    def _step(self, base, module, query, states, mask, args: tuple, kwargs: dict):
        before = self.seen - states[0].shape[2]
        self.first_slots.note(mask, self.seen)
        if self.reconstruction is not None:
            held, self.seen = self.held(), before
            return self.reconstruction.attend(Queries(query, before), states, held), None
        # A prompt is not stored before it is known what stays of it.
        is_stored = self.table.length > 0 or not self._is_due()
        if is_stored:
            self.table.append(states)
        tail = self.table.materialize() if is_stored else states
        output = self._attend(base, module, query, tail, mask, args, kwargs)
        self._remember(Queries(query, before), tail)
        has_moved = self._is_due() and self.evict(tail=tail)
        if not (is_stored or has_moved):
            self.table.append(states)
        self.settle()
        return output

    # --- what the policy sees

    def note_reading(self, read: Reconstruction) -> None:
        """A second reading of the prompt is over; its scores decide what stays."""

    def _remember(self, queries: Queries, tail: Sequence[torch.Tensor]) -> None:
        is_prompt = self._prompt_end is not None or (queries.states.shape[2] > 1 and not self.record_past)
        if self._log is not None and (is_prompt or self.plan.interval is not None):
            self._log.add(queries, self.first_slot, lambda: self.held_parts(tail), may_be_taken_back=self.record_past)

    # --- eviction

    def _is_due(self) -> bool:
        if self.evicts_together:
            return False  # the cache evicts from all layers at once, when the prompt has been read again
        if self._prompt_end is not None:
            return self.seen >= self._prompt_end or self.policy.is_incremental
        is_over = self.plan.interval is not None and self.seen - self._last_eviction >= self.plan.interval
        return is_over and not self.record_past

    def budget(self) -> torch.Tensor:
        """Tokens a head of each row that stay now, `[B]`."""
        seen = max(self.seen, self._prompt_end or 0) - self.first_slot
        return self.plan.budget.of(seen.clamp(min=0), self.token_bytes)

    def finish(self, scores: torch.Tensor, held: Held) -> torch.Tensor:
        """A policy's scores, pooled; infinity for what must stay, and minus infinity for columns without a token."""
        sinks = held.are_sinks(self.plan.num_sink_tokens)
        # Sinks have the highest scores by far, which their neighbours should not get a share of.
        scores = smooth(scores, held.is_held & ~sinks, self.plan.kernel_size, pooling=self.plan.pooling)
        if self.plan.is_layerwise:
            scores = scores.mean(dim=1, keepdim=True).expand(scores.shape)
        scores = scores.masked_fill(sinks, torch.inf)
        scores[..., self._first_recent(held) :] = torch.inf
        return scores.masked_fill_(~held.is_held, -torch.inf)

    def _first_recent(self, held: Held) -> int:
        return max(0, held.keys.shape[2] - self.plan.num_recent_tokens)

    def evict(self, keep: torch.Tensor | None = None, tail: Sequence[torch.Tensor] | None = None) -> bool:
        """Let go of tokens now: all but `keep` `[B, Hkv, n]` of what is held, by default as the policy chooses.

        Returns:
            Whether there was anything to let go of.
        """
        if self._log is not None:
            self._log.flush(self.first_slot, lambda: self.held_parts(tail))
        held = self.held(tail)
        budget = self.budget()
        self._last_eviction = self.seen
        if self._prompt_end is not None and self.seen >= self._prompt_end:
            self._prompt_end = None
        if keep is None:
            limit = held.is_held.sum(dim=-1).amax(dim=-1)
            budget = self.policy.layer_budget(budget, limit, self.plan.budget.minimum)
            if bool((limit <= budget).all()):
                return False
            scores = self.policy.scores(held, self._log and self._log.observer)
            keep = self.policy.select(self.finish(scores, held), budget, self.seen - self.first_slot)
        split = self._first_recent(held)
        if self.plan.merge is not None:
            targets = keep & ~held.are_sinks(self.plan.num_sink_tokens)
            targets[..., split:] = False
            held = merge_evicted(held, keep, targets, self.plan.merge)
        self.keep(held, keep, split)
        if self._log is not None:
            self._log.observer.move(held.slots, self.slots(), self.seen)
            self._log.observer.end_round()
        return True

    def _settle(self, count: int) -> None:
        old_slots = None if self._log is None else self.slots()
        super()._settle(count)
        if self._log is not None:
            self._log.observer.move(old_slots, self.slots(), self.seen)

    # --- contract

    def _take_back(self, count: int) -> None:
        super()._take_back(count)
        if self._log is not None:
            self._log.forget(self.seen)

    def select_rows(self, rows: np.ndarray) -> None:
        if self.table is not None and self._log is not None:
            with torch.inference_mode(False):
                self._log.select_rows(torch.from_numpy(rows).to(self.device))
        super().select_rows(rows)

    def fork(self) -> "EvictingLayer":
        forked = super().fork()
        forked._log = copy.deepcopy(self._log)
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        if self._log is not None:
            self._log.to(device)

    def state(self) -> LayerState:
        state = super().state()
        state.numbers["last_eviction"] = self._last_eviction
        if self._log is not None:
            state.put("log", self._log.state())
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        self._last_eviction = state.numbers["last_eviction"]
        if self._log is not None:
            self._log.load_state(state.part("log"))
            self._log.to(device)
