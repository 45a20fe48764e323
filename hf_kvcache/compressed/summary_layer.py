"""Compressed attention that saves memory (technique 6, `keep="selected"`): few old tokens stay, clusters for the rest.

Stores `keep_ratio` of the old tokens and a cluster for each `cluster_size` of the others, whose keys and values go. A
token that stays is a cluster of one: all are entries of one table, with the logarithm of their size as mask. What stays
are the tokens whose keys, and their neighbours', are least like the mean key (KeyDiff's rule).
Approximate. Not for details that must be quoted: what is summarised is blurred, though not ignored.
Papers: see `hf_kvcache.compressed.clusters`; Park et al. 2025, KeyDiff, https://arxiv.org/abs/2504.15364.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from ..attention import Piece, attend_merged, attend_with_logsumexp, can_merge
from ..blocks import Arena, BlockTable
from ..blocks.arena import Plane
from ..layers.layer import LayerContext
from ..masks import visible
from ..policies.keydiff import unlikeness
from ..policies.selection import smooth
from ..readers import ReadBudget
from ..sparse.reading_layer import ReadingLayer
from .clusters import cluster_tokens
from .compressed_layer import MAX_SEGMENT_LENGTH

_KERNEL_SIZE = 13  # neighbouring tokens that share their scores, as in the policy


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
        is_token, is_sink = (flags[:, None].expand(-1, heads, -1) for flags in (is_token, is_sink))
        scores = smooth(unlikeness(keys, is_token), is_token & ~is_sink, _KERNEL_SIZE)
        scores = scores.masked_fill(is_sink, torch.inf).masked_fill_(~is_token, -torch.inf)
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

    def _states(self) -> list[torch.Tensor]:
        parts = zip(self.entries.materialize()[:2], self.table.materialize(), strict=True)
        return [torch.cat(pair, dim=2) for pair in parts]

    def can_crop(self, count: int) -> bool:
        return count <= (0 if self.table is None else self.table.length)

    def _crop_sides(self) -> None:
        """Only newer tokens are ever taken back."""
