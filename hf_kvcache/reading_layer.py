"""Query-aware sparse reads (technique 7): all tokens stay stored, and a decode step reads those its query needs.

Cuts reads, not memory: the cache is complete and summaries come on top. Approximate. A prompt, and every forward of
several tokens, reads everything. Which tokens a query needs is estimated from summaries of closed blocks by a reader
(`hf_kvcache.readers`); sinks, recent tokens and the open block are always read.
Not for short contexts: choosing costs more than it saves below a few thousand tokens.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from .attending_layer import AttendingLayer
from .attention import attend_packed, can_merge
from .blocks import Arena, BlockTable
from .blocks.gather import gather_units
from .first_slots import FirstSlots
from .layer import LayerContext, check_crop
from .masks import as_mask_for, restrict_mask, visible
from .readers import ReadBudget, Reader
from .readers.selection import Selection


class SparseReadLayer(AttendingLayer):
    """All tokens in blocks (`table`), and the reader's summaries of closed blocks, one slot a block.

    Args:
        context: where the blocks come from.
        name: of the technique, in messages.
        reader: estimates what a query attends to.
        budget: how much a query reads.
    """

    def __init__(self, context: LayerContext, *, name: str, reader: Reader, budget: ReadBudget):
        super().__init__(context)
        self.name = name
        self.reader = reader
        self.budget = budget
        self._clear()

    def _clear(self) -> None:
        self.summaries: BlockTable | None = None
        self.fitted: list[torch.Tensor] = []
        self.first: FirstSlots | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.first = FirstSlots(key_states.shape[0], self.device)
        spec = self.table.arena.specs[0]
        if planes := self.reader.planes(*spec):
            arena = Arena(self.context.pool(self.device), planes, block_size=1)
            self.summaries = BlockTable(arena, key_states.shape[0])

    @property
    def tables(self) -> list[BlockTable]:
        return [table for table in (self.table, self.summaries) if table is not None]

    @property
    def marginal_bits(self) -> float:
        extra = 0 if self.summaries is None else self.summaries.arena.block_bytes
        return super().marginal_bits + 8 * extra / (self.context.block_size * self.values_per_token)

    # --- forward

    def _attend_and_store(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        is_first = self.table.length == 0
        self._store(states, mask)
        if query.shape[2] == 1 and not self.budget.reads_all(self._num_candidates(), self.reader.unit):
            return self._attend_selected(base, module, query, mask, args, kwargs)
        keys, values = states if is_first else self.table.materialize()
        self.read_bytes = keys.nbytes + values.nbytes
        if query.shape[2] == 1 and can_merge(base, kwargs):
            return attend_packed(query, keys, values, mask, kwargs.get("scaling")), None
        return base(module, query, keys, values, mask, *args, **kwargs)

    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        states = self._prepare(key_states, value_states)
        self.seen += states[0].shape[2]
        self._store(states, None)

    def _store(self, states: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None) -> None:
        self.first.note(mask, self.seen)
        self.table.append(states)
        self._summarise()

    def _summarise(self) -> None:
        """Summarise the blocks that were closed since the last time, each once."""
        if self.summaries is None:
            return
        size, done = self.context.block_size, self.summaries.length
        closed = self.seen // size
        if closed == done or (not done and self.seen < self.reader.fit_length):
            return
        keys = self.table.materialize(done * size)[0][:, :, : (closed - done) * size]
        if not done:
            slots = torch.arange(keys.shape[2], device=self.device)
            self.fitted = self.reader.fit(keys, slots >= self.first.slots[:, None])
        self.summaries.append(self.reader.summarise(keys, self.fitted))

    def _num_candidates(self) -> int:
        """Tokens a row that are chosen from: those of closed blocks before the recent tokens."""
        size = self.context.block_size
        closed = max(0, self.seen - self.budget.num_recent_tokens) // size
        return size * (closed if self.summaries is None else min(closed, self.summaries.length))

    # --- a step that reads some of the tokens

    def _attend_selected(self, base: Callable, module: nn.Module, query, mask, args: tuple, kwargs: dict):
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        packed = query.view(query.shape[0], self.table.arena.specs[0].num_heads, -1, query.shape[-1])
        selection, states = self._select(packed * scale, mask)
        own = self._own_mask(module, mask, selection, query.dtype)
        if can_merge(base, kwargs):
            return attend_packed(query, *states, own, scaling), None
        if own is not None:
            implementation = module.config._attn_implementation
            if "flash" in implementation:
                raise NotImplementedError(
                    f"{self.name} reads other tokens for each head, which attn_implementation={implementation!r} "
                    "cannot mask: load the model with attn_implementation='sdpa' or 'eager'."
                )
            own = own.repeat_interleave(packed.shape[2], dim=1)
        return base(module, query, *states, own, *args, **kwargs)

    def _select(self, query: torch.Tensor, mask: torch.Tensor | None) -> tuple[Selection, list[torch.Tensor]]:
        """What `query` `[B, Hkv, G, D]` (scaled) reads, and its keys and values."""
        unit, candidates = self.reader.unit, self._num_candidates()
        always, is_sink = self._always(candidates // unit)
        states = [state[:, :, : always.length] for state in gather_units(self.table, always.units, unit)]
        # What sinks and recent tokens have of the attention is left for no other token.
        anyway = torch.matmul(query, states[0].transpose(2, 3)).float()
        if (seen := always.seen(mask)) is not None:
            anyway.masked_fill_(~seen.unsqueeze(2), -math.inf)
        if self.reader.reads_keys:
            summaries = [self.table.materialize()[0][:, :, :candidates]]
        else:
            blocks = candidates // self.context.block_size
            summaries = [plane[:, :, :blocks] for plane in self.summaries.materialize()]
        scores = self.reader.scores(query, summaries, self.fitted)
        hidden = is_sink[:, None, None]
        if mask is not None:
            hidden = hidden | ~visible(mask[..., :candidates]).unflatten(3, (-1, unit)).any(dim=4)
        scores.masked_fill_(hidden, -math.inf)
        count = max(0, min(self.budget.num_units(candidates, unit), candidates // unit - self._num_sink_units))
        chosen, is_read = self.budget.choose(scores, anyway.logsumexp(dim=-1), count)
        states = [torch.cat(pair, 2) for pair in zip(gather_units(self.table, chosen, unit), states, strict=True)]
        self.read_bytes = sum(state.nbytes for state in states) + self.reader.read_bytes(summaries)
        units = torch.cat([chosen, always.units], dim=2)
        if mask is None and not self.first.is_padded and self.budget.top_p is None:
            is_read = None  # every row has `count` units to choose from
        else:
            rest = torch.ones_like(always.units, dtype=torch.bool) if always.is_read is None else always.is_read
            is_read = torch.cat([is_read, rest], dim=2)
        return Selection(units, is_read, unit, states[0].shape[2]), states

    @property
    def _num_sink_units(self) -> int:
        """Units that the sinks of a row lie in, at most."""
        sinks, unit = self.budget.num_sink_tokens, self.reader.unit
        return 0 if not sinks else (sinks - 1 + (unit - 1 if self.first.is_padded else 0)) // unit + 1

    def _always(self, candidates: int) -> tuple[Selection, torch.Tensor]:
        """The units of sinks and recent tokens, and which of the `candidates` units have sinks, `[B, candidates]`."""
        unit, sinks = self.reader.unit, self.budget.num_sink_tokens
        begin = (self.first.slots // unit)[:, None]
        end = -(-(self.first.slots + sinks) // unit)[:, None]
        units = torch.arange(-(-self.seen // unit), device=self.device)
        is_sink = (units[:candidates] >= begin) & (units[:candidates] < end)
        own = begin + units[: self._num_sink_units]
        is_read = (own < end) & (own < candidates)
        recent = units[candidates:].expand(len(own), -1)
        heads = self.table.arena.specs[0].num_heads
        together = [
            torch.cat(pair, dim=1).unsqueeze(1).expand(-1, heads, -1)
            for pair in ((own * is_read, recent), (is_read, torch.ones_like(recent, dtype=torch.bool)))
        ]
        is_whole = not self.first.is_padded and self._num_sink_units <= candidates
        length = own.shape[1] * unit + self.seen - candidates * unit
        return Selection(together[0], None if is_whole else together[1], unit, length), is_sink

    def _own_mask(self, module, mask, selection: Selection, dtype) -> torch.Tensor | None:
        """The mask of the tokens gathered, `[B, H, 1, length]`, in the model's own form, or None if all are seen."""
        own = None if mask is None else selection.columns(mask).unsqueeze(2)
        if selection.is_read is None:
            return own
        is_read = selection.seen(None).unsqueeze(2)
        return as_mask_for(module, is_read, dtype) if own is None else restrict_mask(module, own, is_read, dtype)

    # --- contract

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        count = check_crop(self, tokens_to_remove)
        if self.table is None:
            return
        self.table.crop(count)
        self.seen -= count
        self.first.take_back(self.seen)
        if self.summaries is not None:
            self.summaries.crop(max(0, self.summaries.length - self.seen // self.context.block_size))
        self._give_back_memory()

    def select_rows(self, rows: np.ndarray) -> None:
        if self.table is not None:
            self.first.select_rows(rows)
            if self.summaries is not None:
                self.summaries.select_rows(rows)
            # Outside inference mode, or a later turn could not use the result.
            with torch.inference_mode(False):
                index = torch.from_numpy(rows).to(self.device)
                self.fitted = [constant.index_select(0, index) for constant in self.fitted]
        super().select_rows(rows)

    def fork(self) -> "SparseReadLayer":
        forked = super().fork()
        if self.table is not None:
            forked.first = self.first.fork()
            forked.summaries = None if self.summaries is None else self.summaries.fork()
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        if self.table is not None:
            self.first.to(device)
            self.fitted = [constant.to(device) for constant in self.fitted]
            self.summaries = None if self.summaries is None else self.summaries.to(self.context.pool(device))

    def reset(self) -> None:
        super().reset()
        self._clear()
