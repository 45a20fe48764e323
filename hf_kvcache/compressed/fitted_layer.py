"""Compressed attention that saves memory (technique 6, `keep="selected"`): the tokens that stay stand for all others.

Cuts tokens retained, as eviction does, and stores what eviction does: keys and values of some tokens, other ones and
other numbers of them for each head. But their keys and values are fitted, so that attention to them is for the queries
so far what attention to all tokens was (`hf_kvcache.compressed.matching`). Approximate.
When `generate()` has run a prompt, or on `cache.compress()`, all heads of all layers share one budget. Newer
tokens stay exact until the next turn, or the next call: segments of a few hundred, fitted alone, lost far more.
Costs, once a prompt, 1.7 times the CPU time of its prefill (SmolLM2-135M, 1,536 tokens), up to 1,024 queries a head in
memory until it is in.
Not for details that must be quoted: give `fit="reading"`, which reads the prompt twice.
"""

import torch

from ..eviction.evicting_layer import EvictingLayer
from ..eviction.eviction_plan import Budget, EvictionPlan
from ..layers.layer import LayerContext
from ..policies.attention_matching import AttentionMatching, ReadAgain
from ..policies.base import Held
from ..readers import ReadBudget
from .matching import SEGMENT_LENGTH, match_attention


class FittedLayer(EvictingLayer):
    """Sinks, fitted tokens, and all newer tokens in blocks.

    Args:
        context: where the blocks come from.
        policy: says which tokens stay, and remembers queries.
        budget: sinks, recent tokens, and `keep_ratio`: the share of old tokens that stay.
    """

    def __init__(self, context: LayerContext, *, policy: AttentionMatching, budget: ReadBudget):
        self.keep_ratio = budget.keep_ratio
        sinks, recent = budget.num_sink_tokens, budget.num_recent_tokens
        plan = EvictionPlan(
            budget=Budget(None, budget.keep_ratio, None, 1, sinks + recent),
            at_prompt_end=True,
            interval=None,
            num_sink_tokens=sinks,
            num_recent_tokens=recent,
            kernel_size=1,
            pooling="mean",
            is_layerwise=False,
            merge=None,
        )
        super().__init__(context, name="compressed with keep='selected'", policy=policy, plan=plan)

    def note_reading(self, read: ReadAgain) -> None:
        self._log.observer.read = read.queries

    @property
    def evicts_together(self) -> bool:
        return True

    def budget(self) -> torch.Tensor:
        exact = self.plan.budget.minimum
        old = (self.seen - self.first_slot - exact).clamp(min=0)
        return exact + (old.double() * self.keep_ratio - 1e-6).ceil().long()

    def scored(self) -> tuple[Held, torch.Tensor]:
        """What is held, and its scores."""
        held = self.held()
        self._log.flush(self.first_slot, self.held_parts)
        return held, self.policy.scores(held, self._log.observer)

    def keep(self, held: Held, keep: torch.Tensor, split: int) -> None:
        """Hold on to fitted keys and values of the columns `keep` `[B, H, n]`, and to all from `split` on."""
        if self._log.observer.states is not None:
            held = self._fitted(held, keep, split)
        super().keep(held, keep, split)

    def _fitted(self, held: Held, keep: torch.Tensor, split: int) -> Held:
        queries, is_real = self._log.observer.expected(held)
        is_old = held.is_held & ~held.are_sinks(self.plan.num_sink_tokens)
        is_old[..., split:] = False
        keys, values = held.keys.clone(), held.values.clone()
        for row in range(len(keys)):
            real = is_real[row]
            for head in range(keys.shape[1]):
                own = queries[row, head][:, real].flatten(0, 1)  # [M, D]
                at = held.is_held[row, head]
                states = [state[row, head, at] for state in (held.keys, held.values)]
                flags = [flag[row, head, at] for flag in (is_old, keep)]
                for state, new in zip((keys, values), self._fit_head(own, states, *flags), strict=True):
                    state[row, head, at] = new.to(state.dtype)
        return held._replace(keys=keys, values=values)

    def _fit_head(self, queries, states, is_old, keep) -> list[torch.Tensor]:
        """Keys and values of a head's tokens, those that stay fitted, a segment at a time."""
        states = [state.float() for state in states]
        fitted = [state.clone() for state in states]
        for places in is_old.nonzero().squeeze(1).split(SEGMENT_LENGTH):
            segment = torch.zeros_like(is_old)
            segment[places] = True
            kept = segment & keep
            if not len(queries) or not bool(kept.any()) or bool(keep[places].all()):
                continue
            for state, new in zip(fitted, match_attention(queries, *states, segment, kept, self.scaling), strict=True):
                state[kept] = new
        return fitted
