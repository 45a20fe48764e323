"""Query-aware sparse reads (technique 7): all tokens stay stored, and a decode step reads those its query needs.

Cuts reads, not memory: the cache is complete and summaries come on top. Approximate. A prompt, and every forward of
several tokens, reads everything. Which tokens a query needs is estimated from summaries of closed blocks by a reader
(`hf_kvcache.readers`); sinks, recent tokens and the open block are always read.
Not for short contexts: choosing costs more than it saves below a few thousand tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from ..attention import can_merge
from ..blocks import Arena, BlockTable
from ..blocks.gather import gather_units
from ..kernels import decode, native
from ..kernels.choose import ChosenCall
from ..layers.layer import LayerContext
from ..masks import as_additive, as_float32, as_mask_for, restrict_mask, visible
from ..readers import ReadBudget, Reader
from ..readers.base import mean_state
from ..readers.selection import Selection
from .reading_layer import ReadingLayer
from .sparse_kernel import chosen_call


class SparseReadLayer(ReadingLayer):
    """All tokens in blocks, and the reader's summaries of closed blocks, one slot a block.

    Args:
        context: where the blocks come from.
        name: of the technique, in messages.
        reader: estimates what a query attends to.
        budget: how much a query reads.
    """

    def __init__(self, context: LayerContext, *, name: str, reader: Reader, budget: ReadBudget):
        super().__init__(context, name=name, budget=budget)
        self.reader = reader

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if planes := self.reader.planes(*self.table.arena.specs[0]):
            arena = Arena(self.context.pool(self.device), planes, block_size=1)
            self.sides["summaries"] = BlockTable(arena, key_states.shape[0])

    @property
    def summaries(self) -> BlockTable | None:
        """The reader's summaries, or None if it has none."""
        return self.sides.get("summaries")

    @property
    def mean_value(self) -> torch.Tensor:
        """The mean value of the first tokens, `[B, H, 1, Dv]`, float32, where it stands for what is not read."""
        return self.fitted[-1]

    @property
    def marginal_bits(self) -> float:
        extra = 0 if self.summaries is None else self.summaries.arena.block_bytes
        return super().marginal_bits + 8 * extra / (self.context.block_size * self.values_per_token)

    def _summarise(self, mask: torch.Tensor | None) -> None:
        if self.summaries is None:
            return
        size, done = self.context.block_size, self.summaries.length
        closed = self.seen // size
        if closed == done or (not done and self.seen < self.reader.fit_length):
            return
        keys = self.table.materialize(done * size)[0][:, :, : (closed - done) * size]
        if not done:
            slots = torch.arange(keys.shape[2], device=self.device)
            is_token = slots >= self.first.slots[:, None]
            self.fitted = self.reader.fit(keys, is_token)
            if self.reader.unread:
                values = self.table.materialize()[1][:, :, : keys.shape[2]]
                self.fitted.append(mean_state(values, is_token))
        self.summaries.append(self.reader.summarise(keys, self.fitted))

    def _crop_sides(self) -> None:
        if self.summaries is not None:
            self.summaries.crop(max(0, self.summaries.length - self.seen // self.context.block_size))

    def _num_candidates(self) -> int:
        """Tokens a row that are chosen from: those of closed blocks before the recent tokens."""
        size = self.context.block_size
        closed = max(0, self.seen - self.budget.num_recent_tokens) // size
        return size * (closed if self.summaries is None else min(closed, self.summaries.length))

    def _reads_all(self) -> bool:
        return self.budget.reads_all(self._num_candidates(), self.reader.unit)

    def _attend_selected(self, base: Callable, module: nn.Module, query, mask, args: tuple, kwargs: dict):
        scaling, call = kwargs.get("scaling"), None
        if (
            can_merge(base, kwargs)
            and decode.can_serve(query, mask, [spec.dim for spec in self.table.arena.specs])
            and native.library()
        ):
            call = self._chosen_call(query.shape[1])
        if call is not None:
            return self._attend_in_place(call, query, scaling, mask), None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        packed = query.view(query.shape[0], self.table.arena.specs[0].num_heads, -1, query.shape[-1])
        selection = self._select(packed * scale, mask)
        states = [
            state[:, :, : selection.length] for state in gather_units(self.table, selection.units, self.reader.unit)
        ]
        own = self._own_mask(module, mask, selection, query.dtype)
        if selection.rest is not None:
            states, own = self._with_rest(states, own, selection.rest)
        return self._attend_gathered(base, module, query, states, own, args, kwargs)

    @property
    def estimated(self) -> BlockTable:
        """Where the reader's estimates come from."""
        return self.table if self.reader.reads_keys else self.summaries

    # --- a step by the decode kernel, which reads everything where it lies

    def _attend_in_place(self, call: ChosenCall, query, scaling, mask) -> torch.Tensor:
        output, _ = call.attend(query, scaling, None if mask is None else as_float32(mask))
        per_token, scored = self._call[2]
        self.read_bytes = per_token * call.read_length + scored
        return output

    def _chosen_call(self, num_heads: int) -> ChosenCall | None:
        """The call of this step: that of the last one, while what it points to is where it was."""
        candidates = self._num_candidates()
        key = (candidates, num_heads, self.table.version, self.estimated.version, self.first.version)
        if self._call is None or self._call[0] != key:
            sink_units = min(self._num_sink_units, candidates // self.reader.unit)
            call = chosen_call(self, candidates, self._num_chosen(candidates), sink_units, num_heads)
            self._call = (key, call, self._costs())
        elif self._call[1] is not None:
            self._call[1].extend(1, self.seen - candidates)
        return self._call[1]

    def _select(self, query: torch.Tensor, mask: torch.Tensor | None) -> Selection:
        """What `query` `[B, Hkv, G, D]` (scaled) reads."""
        unit, candidates = self.reader.unit, self._num_candidates()
        always, is_sink = self._always(candidates // unit)
        # What sinks and recent tokens have of the attention is left for no other token.
        keys = gather_units(self.table, always.units, unit, num_planes=1)[0][:, :, : always.length]
        anyway = torch.matmul(query, keys.transpose(2, 3)).float()
        if (seen := always.seen(mask)) is not None:
            anyway.masked_fill_(~seen.unsqueeze(2), -math.inf)
        if self.reader.reads_keys:
            summaries = [self.table.materialize()[0][:, :, :candidates]]
        else:
            blocks = candidates // self.context.block_size
            summaries = [plane[:, :, :blocks] for plane in self.summaries.materialize()]
        scores = self.reader.scores(query, summaries, self.fitted)
        if is_sink is None:
            scores[..., : self._num_sink_units] = -math.inf
        else:
            scores.masked_fill_(is_sink[:, None, None], -math.inf)
        if mask is not None:
            hidden = ~visible(mask[..., :candidates]).unflatten(3, (-1, unit)).any(dim=4)
            scores.masked_fill_(hidden, -math.inf)
        chosen, is_read = self.budget.choose(scores, anyway.logsumexp(dim=-1), self._num_chosen(candidates))
        units = torch.cat([chosen, always.units], dim=2)
        rest = self._log_rest(scores, chosen, is_read)
        length = chosen.shape[2] * unit + always.length
        per_token, scored = self._costs()
        self.read_bytes = per_token * length + scored
        if mask is None and not self.first.is_padded and self.budget.top_p is None:
            is_read = None  # every row has `count` units to choose from
        else:
            others = torch.ones_like(always.units, dtype=torch.bool) if always.is_read is None else always.is_read
            is_read = torch.cat([is_read, others], dim=2)
        return Selection(units, is_read, unit, length, rest)

    def _log_rest(self, scores: torch.Tensor, chosen: torch.Tensor, is_read: torch.Tensor) -> torch.Tensor | None:
        """Log mass `[B, H, G]` that the mean value gets for the units that are not read."""
        if not self.reader.unread:
            return None
        taken = torch.zeros_like(scores[:, :, 0], dtype=torch.bool).scatter_(2, chosen, is_read)
        return scores.masked_fill(taken.unsqueeze(2), -math.inf).logsumexp(dim=-1) + math.log(self.reader.unread)

    def _with_rest(self, states: list[torch.Tensor], mask: torch.Tensor | None, rest: torch.Tensor):
        """The mean value as one more token, and an additive mask `[B, Hq, 1, n + 1]` that has its scores."""
        keys, values = states
        keys = torch.cat([keys, torch.zeros_like(keys[:, :, :1])], dim=2)
        values = torch.cat([values, self.mean_value.to(values.dtype)], dim=2)
        rest = rest.flatten(1, 2)[..., None, None].to(keys.dtype).clamp(min=torch.finfo(keys.dtype).min)
        if mask is None:
            own = rest.new_zeros(*rest.shape[:3], keys.shape[2] - 1)
        else:
            own = as_additive(mask, keys.dtype).repeat_interleave(rest.shape[1] // mask.shape[1], dim=1)
        return [keys, values], torch.cat([own, rest], dim=3)

    def _num_chosen(self, candidates: int) -> int:
        """Units that are chosen, at most."""
        unit = self.reader.unit
        return max(0, min(self.budget.num_units(candidates, unit), candidates // unit - self._num_sink_units))

    def _costs(self) -> tuple[int, int]:
        """Bytes of a token of all rows and heads, and of all that candidates are scored by."""
        arena, size = self.table.arena, self.context.block_size
        scored = self.reader.read_bytes(self.estimated.arena.specs, self._num_candidates() // size)
        return self.batch_size * (arena.block_bytes // size), self.batch_size * scored

    @property
    def _num_sink_units(self) -> int:
        """Units that the sinks of a row lie in, at most."""
        sinks, unit = self.budget.num_sink_tokens, self.reader.unit
        return 0 if not sinks else (sinks - 1 + (unit - 1 if self.first.is_padded else 0)) // unit + 1

    def _always(self, candidates: int) -> tuple[Selection, torch.Tensor | None]:
        """The units of sinks and recent tokens, and which of the `candidates` units have sinks, `[B, candidates]`.

        Without padding these are the first ones of every row, and there is nothing to say.
        """
        rows, heads = self.batch_size, self.table.arena.specs[0].num_heads
        unit, length = self.reader.unit, self.seen - candidates * self.reader.unit
        units = torch.arange(-(-self.seen // unit), device=self.device)
        recent = units[candidates:].expand(rows, -1)
        if not self.first.is_padded:
            own = units[: min(self._num_sink_units, candidates)].expand(rows, -1)
            together = torch.cat([own, recent], dim=1).unsqueeze(1).expand(-1, heads, -1)
            return Selection(together, None, unit, own.shape[1] * unit + length), None
        begin = (self.first.slots // unit)[:, None]
        end = -(-(self.first.slots + self.budget.num_sink_tokens) // unit)[:, None]
        is_sink = (units[:candidates] >= begin) & (units[:candidates] < end)
        own = begin + units[: self._num_sink_units]
        is_read = (own < end) & (own < candidates)
        together = [
            torch.cat(pair, dim=1).unsqueeze(1).expand(-1, heads, -1)
            for pair in ((own * is_read, recent), (is_read, torch.ones_like(recent, dtype=torch.bool)))
        ]
        return Selection(*together, unit, own.shape[1] * unit + length), is_sink

    def _own_mask(self, module, mask, selection: Selection, dtype) -> torch.Tensor | None:
        """The mask of the tokens gathered, `[B, H, 1, length]`, in the model's own form, or None if all are seen."""
        own = None if mask is None else selection.columns(mask).unsqueeze(2)
        if selection.is_read is None:
            return own
        is_read = selection.seen(None).unsqueeze(2)
        return as_mask_for(module, is_read, dtype) if own is None else restrict_mask(module, own, is_read, dtype)
