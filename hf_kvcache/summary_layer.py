"""Compressed attention that saves memory (technique 6, `keep="selected"`): few old tokens stay, clusters for the rest.

Stores `keep_ratio` of the old tokens and a cluster for each `cluster_size` of the others, whose keys and values go. A
token that stays is a cluster of one: all are entries of one table, with the logarithm of their size as mask. What stays
are the tokens that the last queries before a segment closed attended to most, and their neighbours (SnapKV's rule).
Approximate. Not for details that no query had asked for by then: those are blurred, though not ignored.
Papers: see `hf_kvcache.clusters`; Li et al. 2024, SnapKV, https://arxiv.org/abs/2404.14469.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from .attention import Piece, attend_merged, attend_with_logsumexp, can_merge
from .blocks import Arena, BlockTable
from .blocks.arena import Plane
from .clusters import cluster_tokens
from .compressed_layer import MAX_SEGMENT_LENGTH
from .layer import LayerContext
from .layer_state import LayerState
from .masks import visible
from .policies.selection import smooth
from .readers import ReadBudget
from .reading_layer import ReadingLayer

_OBSERVATION_WINDOW = 32  # queries that vote
_KERNEL_SIZE = 13  # neighbouring tokens that share their scores


class SummaryLayer(ReadingLayer):
    """Entries of closed segments (key, value, log of the number of tokens), then newer tokens in blocks.

    Args:
        context: where the blocks come from.
        budget: sinks, recent tokens, and `keep_ratio`: the share of old tokens that stay.
        cluster_size: tokens a cluster, on average.
        segment_length: tokens that are compressed together, at least.
    """

    def __init__(self, context: LayerContext, *, budget: ReadBudget, cluster_size: int, segment_length: int):
        super().__init__(context, name="compressed with keep='selected'", budget=budget)
        self.cluster_size = cluster_size
        self.segment_length = segment_length

    def _clear(self) -> None:
        super()._clear()
        self.queries: torch.Tensor | None = None  # the last ones, scaled, [B, Hq, n, D]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        key, value = self.table.arena.specs
        planes = (key, value, Plane(key.num_heads, 1, torch.float32))
        arena = Arena(self.context.pool(self.device), planes, block_size=self.context.block_size)
        self.sides["entries"] = BlockTable(arena, key_states.shape[0])

    @property
    def entries(self) -> BlockTable:
        return self.sides["entries"]

    @property
    def stored_length(self) -> int:
        return super().stored_length + (self.entries.length if self.sides else 0)

    @property
    def marginal_bits(self) -> float:
        entries = self.budget.keep_ratio + (1 - self.budget.keep_ratio) / self.cluster_size
        return entries * 8 * self.entries.arena.block_bytes / (self.context.block_size * self.values_per_token)

    # --- compressing

    def _attend_and_store(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        scaling = kwargs.get("scaling")
        new = query[:, :, -_OBSERVATION_WINDOW:].detach() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        known = [] if self.queries is None else [self.queries]
        self.queries = torch.cat([*known, new], dim=2)[:, :, -_OBSERVATION_WINDOW:].contiguous()
        return super()._attend_and_store(base, module, query, states, mask, args, kwargs)

    def _summarise(self, mask: torch.Tensor | None) -> None:
        if self.record_past:
            return  # drafted tokens may be taken back
        while (length := self.table.length - self.budget.num_recent_tokens) >= self.segment_length:
            self._close_segment(min(length, MAX_SEGMENT_LENGTH), mask)

    def _close_segment(self, length: int, mask: torch.Tensor | None) -> None:
        begin = self.table.start
        keys, values = (state[:, :, :length] for state in self.table.materialize())
        slots = torch.arange(begin, begin + length, device=self.device)
        is_token = slots >= self.first.slots[:, None]
        is_sink = is_token & (slots < self.first.slots[:, None] + self.budget.num_sink_tokens)
        if mask is not None:
            is_token = is_token & visible(mask[:, 0, -1, begin : begin + length])
        heads = keys.shape[1]
        is_token = is_token[:, None].expand(-1, heads, -1)
        scores = self._scores(keys, is_token).masked_fill(is_sink[:, None], torch.inf)
        scores.masked_fill_(~is_token, -torch.inf)
        count = min(length, max(round(self.budget.keep_ratio * length), self.budget.num_sink_tokens))
        kept = scores.topk(count).indices.sort().values
        index = kept.unsqueeze(-1)
        rest = is_token.scatter(2, kept, False)
        entries = [state.gather(2, index.expand(-1, -1, -1, state.shape[-1])) for state in (keys, values)]
        sizes = torch.zeros(kept.shape, device=self.device).masked_fill_(~is_token.gather(2, kept), -math.inf)
        if count < length:
            clusters = cluster_tokens(keys, values, rest, max(1, (length - count) // self.cluster_size))
            entries = [torch.cat(pair, dim=2) for pair in zip(entries, clusters[:2], strict=True)]
            sizes = torch.cat([sizes, clusters.spans[..., 1].float().log()], dim=2)
        self.entries.append([*entries, sizes.unsqueeze(-1)])
        self.table.drop_front(begin + length)
        self._give_back_memory()

    def _scores(self, keys: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        """What the last queries attend to in these tokens, shared with neighbours: `[B, H, n]`."""
        if self.queries is None or not self.queries.shape[2]:  # filled from elsewhere, or taken back
            return torch.arange(keys.shape[2], device=self.device).float().expand(is_token.shape)
        packed = self.queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        logits = torch.matmul(packed, keys.transpose(2, 3)).float()
        weights = logits.masked_fill_(~is_token.unsqueeze(2), -math.inf).softmax(dim=-1).nan_to_num(0.0)
        return smooth(weights.mean(dim=2), is_token, _KERNEL_SIZE)

    # --- attention

    def _reads_all(self) -> bool:
        return not self.entries.length

    def _attend_all(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        if self._reads_all():
            return super()._attend_all(base, module, query, states, mask, args, kwargs)
        return self._attend_selected(base, module, query, mask, args, kwargs)

    def _attend_selected(self, base: Callable, module: nn.Module, query, mask, args: tuple, kwargs: dict):
        keys, values, sizes = self.entries.materialize()
        tail, bias = self.table.materialize(), sizes.transpose(2, 3)  # [B, H, 1, n]
        self.read_bytes = sum(state.nbytes for state in (keys, values, sizes, *tail))
        own = None if mask is None else mask[..., self.table.start : self.seen]
        scaling = kwargs.get("scaling")
        rows, heads, length, dim = query.shape
        if can_merge(base, kwargs):
            packed = query.reshape(rows, keys.shape[1], -1, dim)
            scale = dim**-0.5 if scaling is None else scaling
            output, logsumexp = attend_with_logsumexp(packed, keys, values, bias, scale)
            attended = output.reshape(rows, heads, length, -1), logsumexp.reshape(rows, heads, length)
            return attend_merged(query, [[Piece(*tail, own)]], scaling, [attended]), None
        states = [torch.cat(pair, dim=2) for pair in zip((keys, values), tail, strict=True)]
        least = torch.finfo(query.dtype).min
        if own is None:
            own = query.new_zeros(1, 1, 1, tail[0].shape[2])
        elif own.dtype == torch.bool:
            own = torch.zeros_like(own, dtype=query.dtype).masked_fill_(~own, least)
        shape = (rows, keys.shape[1], length, -1)
        bias = bias.to(query.dtype).clamp(min=least)
        joined = torch.cat([bias.expand(shape), own.expand(shape)], dim=-1)
        return self._attend_gathered(base, module, query, states, joined, args, kwargs)

    # --- contract

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys of all entries and newer tokens, `[B, H, n, D]`: a copy, for looking at."""
        return self._whole(0)

    @property
    def values(self) -> torch.Tensor | None:
        return self._whole(1)

    def _whole(self, index: int) -> torch.Tensor | None:
        if self.table is None:
            return None
        return torch.cat([self.entries.materialize()[index], self.table.materialize()[index]], dim=2)

    def can_crop(self, count: int) -> bool:
        return count <= (0 if self.table is None else self.table.length)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.queries is not None:
            self.queries = self.queries[:, :, : max(0, self.queries.shape[2] + tokens_to_remove)]

    def _crop_sides(self) -> None:
        """Only newer tokens are ever taken back."""

    def select_rows(self, rows) -> None:
        if self.queries is not None:
            with torch.inference_mode(False):
                self.queries = self.queries.index_select(0, torch.from_numpy(rows).to(self.device))
        super().select_rows(rows)

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        self.queries = None if self.queries is None else self.queries.to(device)

    def state(self) -> LayerState:
        state = super().state()
        if self.queries is not None:
            state.tensors["queries"] = self.queries
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        if "queries" in state.tensors:
            self.queries = state.tensors["queries"].to(device)
