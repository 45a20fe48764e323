"""Compressed attention (technique 6): old tokens have summaries, and what a step does not read counts by them.

Cuts reads, not memory: the cache is complete, summaries come on top (1 / `cluster_size` of its bytes, and 4 bytes for
each token and head). Approximate, yet nothing is ignored: old tokens are clustered by their keys, once, a segment at a
time. A step reads the members of the clusters that its query attends to most, a token; every other cluster is one
pseudo-token: its mean key, mean value and the logarithm of its size. Sinks, recent tokens and those not clustered yet
are exact. A token that is unlike the others of its cluster is hard to find by their mean: clusters are chosen as if
their mean key were nearer to the query, by a share (`spread`) of the distance of the farthest member.
Papers: see `hf_kvcache.compressed.clusters`; Yuan et al. 2025, NSA, https://arxiv.org/abs/2502.11089, trains it.
Differs from RetroInfer: no tuned zones; what is read is chosen for all query heads of a KV head together.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..attention import can_merge, few_products
from ..blocks import Arena, BlockTable
from ..blocks.arena import Plane
from ..blocks.gather import gather_units
from ..layers.layer import LayerContext
from ..layers.layer_state import LayerState
from ..masks import visible
from ..readers import ReadBudget
from ..sparse.reading_layer import ReadingLayer
from .clusters import cluster_tokens, default_spread

# Longest segment: k-means takes tokens x clusters distances at once.
MAX_SEGMENT_LENGTH = 4096


class CompressedLayer(ReadingLayer):
    """All tokens in blocks; a slot for each cluster (mean key, mean value, span, radius), and the members in order.

    Args:
        context: where the blocks come from.
        budget: how much a query reads.
        cluster_size: tokens a cluster, on average.
        segment_length: tokens that are clustered together, at least.
        spread: share of a cluster's radius by which it counts as nearer when clusters are chosen, in [0, 1]. With 1 no
            member's score is above the one that the cluster is chosen by. None: `default_spread` of the keys' channels.
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        budget: ReadBudget,
        cluster_size: int,
        segment_length: int,
        spread: float | None,
    ):
        super().__init__(context, name="compressed", budget=budget)
        self.cluster_size = cluster_size
        self.segment_length = segment_length
        self.spread = spread

    def _clear(self) -> None:
        super()._clear()
        self.segments: tuple[tuple[int, int], ...] = ()  # of each, one past its last token and its last cluster

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        key, value = self.table.arena.specs
        if self.spread is None:
            self.spread = default_spread(key.dim)
        planes = {
            "clusters": (key, value, Plane(key.num_heads, 2, torch.int32), Plane(key.num_heads, 1, torch.float32)),
            "members": (Plane(key.num_heads, 1, torch.int32),),
        }
        for name, specs in planes.items():
            arena = Arena(self.context.pool(self.device), specs, block_size=self.context.block_size)
            self.sides[name] = BlockTable(arena, key_states.shape[0])

    @property
    def clustered_length(self) -> int:
        """Tokens a row that lie in segments."""
        return self.segments[-1][0] if self.segments else 0

    @property
    def marginal_bits(self) -> float:
        clusters, members = (self.sides[name].arena.block_bytes for name in ("clusters", "members"))
        extra = clusters / self.cluster_size + members
        return super().marginal_bits + 8 * extra / (self.context.block_size * self.values_per_token)

    # --- summaries

    def _summarise(self, mask: torch.Tensor | None) -> None:
        while (length := self.seen - self.budget.num_recent_tokens - self.clustered_length) >= self.segment_length:
            self._close_segment(min(length, MAX_SEGMENT_LENGTH), mask)

    def _close_segment(self, length: int, mask: torch.Tensor | None) -> None:
        begin = self.clustered_length
        keys, values = (state[:, :, :length] for state in self.table.materialize(begin))
        slots = torch.arange(begin, begin + length, device=self.device)
        is_member = slots >= self.first.slots[:, None] + self.budget.num_sink_tokens
        if mask is not None:
            is_member = is_member & visible(mask[:, 0, -1, begin : begin + length])
        clusters = cluster_tokens(keys, values, is_member, max(1, length // self.cluster_size))
        clusters.spans[..., 0] += begin
        clusters.members.add_(begin)
        self.sides["clusters"].append([*clusters[:3], clusters.radii.unsqueeze(-1)])
        self.sides["members"].append([clusters.members.unsqueeze(-1)])
        self.segments += ((begin + length, self.sides["clusters"].length),)

    def _crop_sides(self) -> None:
        self.segments = tuple(segment for segment in self.segments if segment[0] <= self.seen)
        tokens, clusters = self.segments[-1] if self.segments else (0, 0)
        self.sides["members"].crop(self.sides["members"].length - tokens)
        self.sides["clusters"].crop(self.sides["clusters"].length - clusters)

    def state(self) -> LayerState:
        state = super().state()
        ends = torch.tensor(self.segments, dtype=torch.int64).view(-1, 2)
        state.put("segments", LayerState({"ends": ends}))
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        self.segments = tuple(
            (tokens, clusters) for tokens, clusters in state.part("segments").tensors["ends"].tolist()
        )

    # --- a step that reads some of the tokens

    def _reads_all(self) -> bool:
        return self.budget.reads_all(self.clustered_length, 1)

    def _attend_selected(self, base: Callable, module: nn.Module, query, mask, args: tuple, kwargs: dict):
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        packed = query.view(query.shape[0], self.table.arena.specs[0].num_heads, -1, query.shape[-1]) * scale
        exact, exact_bias = self._exact(mask)
        anyway = few_products(packed, exact[0]).add_(exact_bias.unsqueeze(2))
        keys, values, spans, radii = self.sides["clusters"].materialize()
        weight = spans[..., 1].float().log()  # -inf for an empty cluster
        scores = few_products(packed, keys).add_(weight.unsqueeze(2))
        reach = self.spread * packed.float().norm(dim=-1, keepdim=True) * radii.transpose(2, 3)
        chosen, tokens, is_read = self._choose(scores, reach, anyway.logsumexp(dim=-1), spans)
        members = gather_units(self.table, tokens, 1)
        read = (*members, *exact, keys, values, spans, radii)
        self.read_bytes = sum(state.nbytes for state in read) + tokens.numel() * 4
        if can_merge(base, kwargs):
            of_members = few_products(packed, members[0]).masked_fill_(~is_read.unsqueeze(2), -math.inf)
            scores = [of_members, anyway, scores.masked_fill_(chosen.unsqueeze(2), -math.inf)]
            return _attend_parts(scores, (members[1], exact[1], values)), None
        states = [torch.cat(parts, dim=2) for parts in zip(members, exact, (keys, values), strict=True)]
        no_token = torch.zeros(is_read.shape, device=self.device).masked_fill_(~is_read, -math.inf)
        bias = torch.cat([no_token, exact_bias, weight.masked_fill(chosen, -math.inf)], dim=2)
        bias = bias.to(query.dtype).clamp(min=torch.finfo(query.dtype).min).unsqueeze(2)
        return self._attend_gathered(base, module, query, states, bias, args, kwargs)

    def _exact(self, mask: torch.Tensor | None) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Sinks and the tokens that are not clustered: keys and values `[B, H, n, D]`, and 0 or -inf, `[B, H, n]`."""
        begin, sinks = self.clustered_length, self.budget.num_sink_tokens
        states = self.table.materialize(begin)
        slots = self.first.slots[:, None] + torch.arange(sinks, device=self.device)
        is_read = slots < begin  # the others are among the newer ones
        newer = torch.arange(begin, self.seen, device=self.device).expand(len(slots), -1)
        slots = torch.cat([slots * is_read, newer], dim=1)
        is_read = torch.cat([is_read, torch.ones_like(newer, dtype=torch.bool)], dim=1)
        if mask is not None:
            is_read = is_read & visible(mask[:, 0, 0]).expand(len(slots), -1).gather(1, slots)
        heads = states[0].shape[1]
        first = gather_units(self.table, slots[:, None, :sinks].expand(-1, heads, -1), 1)
        states = [torch.cat(pair, dim=2) for pair in zip(first, states, strict=True)]
        bias = torch.zeros(slots.shape, device=self.device).masked_fill_(~is_read, -math.inf)
        return states, bias.unsqueeze(1).expand(-1, heads, -1)

    def _choose(
        self, scores: torch.Tensor, reach: torch.Tensor, anyway: torch.Tensor, spans: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The clusters to read (bool `[B, H, C]`), their members `[B, H, n]`, and which of these count."""
        sizes = spans[..., 1]
        order, is_chosen, total = self.budget.choose_sized(scores, anyway, sizes, self.clustered_length, reach)
        begin, size = spans.long().gather(2, order.unsqueeze(-1).expand(-1, -1, -1, 2)).unbind(dim=-1)
        ends = size.cumsum(dim=-1)
        place = torch.arange(total, device=self.device).expand(*ends.shape[:2], -1).contiguous()
        rank = torch.searchsorted(ends, place, right=True).clamp_(max=ends.shape[-1] - 1)
        place_in = place - (ends - size).gather(2, rank)
        is_read = is_chosen.gather(2, rank) & (place_in < size.gather(2, rank))
        members = self.sides["members"].materialize()[0].squeeze(-1)
        tokens = members.gather(2, (begin.gather(2, rank) + place_in) * is_read)
        chosen = torch.zeros(sizes.shape, dtype=torch.bool, device=self.device).scatter_(2, order, is_chosen)
        return chosen, tokens.long() * is_read, is_read


def _attend_parts(scores: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One softmax over scores `[B, Hkv, G, n]` of several parts, times their values: `[B, 1, Hq, Dv]`."""
    weights = torch.cat(scores, dim=-1).softmax(dim=-1).to(values[0].dtype)
    parts = zip(weights.split([part.shape[-1] for part in scores], dim=-1), values, strict=True)
    return sum(torch.matmul(*part) for part in parts).flatten(1, 2).unsqueeze(1)
