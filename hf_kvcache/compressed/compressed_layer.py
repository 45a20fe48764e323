"""Compressed attention (technique 6): old tokens have summaries, and what a step does not read counts by them.

Cuts reads, not memory: the cache is complete, summaries come on top (a mean key and value in bytes for each cluster,
and 4 bytes for each token and head). Approximate, yet nothing is ignored: old tokens are clustered by their keys, once,
a segment at a time. A step reads the members of the clusters that its query attends to most, a token; every other
cluster is one pseudo-token: its mean key, mean value and the logarithm of its size. Sinks, recent tokens and those not
clustered yet are exact. A token that is unlike the others of its cluster is hard to find by their mean: clusters are
chosen as if their mean key were nearer to the query, by a share (`spread`) of the distance of the farthest member.
Papers: see `hf_kvcache.compressed.clusters`; Yuan et al. 2025, NSA, https://arxiv.org/abs/2502.11089, trains it.
Differs from RetroInfer: no tuned zones; what is read is chosen for all query heads of a KV head together.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..attention import can_merge, few_products
from ..blocks.gather import gather_units
from ..kernels import decode, native
from ..kernels.clusters import ClusterCall
from ..layers.layer import LayerContext
from ..layers.layer_state import LayerState
from ..masks import as_float32, visible
from ..readers import ReadBudget
from ..readers.base import mean_state
from ..sparse.reading_layer import ReadingLayer
from .cluster_store import ClusterStore
from .clusters import cluster_tokens, default_spread
from .compressed_kernel import cluster_call

# Longest segment: k-means takes tokens x clusters distances at once.
MAX_SEGMENT_LENGTH = 4096


class CompressedLayer(ReadingLayer):
    """All tokens in blocks; a slot for each cluster, and the members in order (`compressed.cluster_store`).

    Args:
        context: where the blocks come from.
        budget: how much a query reads.
        cluster_size: tokens a cluster, on average.
        segment_length: tokens that are clustered together, at least.
        spread: share of a cluster's radius by which it counts as nearer when clusters are chosen, in [0, 1]. With 1 no
            member's score is above the one that the cluster is chosen by, but for the rounding of mean keys. None:
            `default_spread` of the keys' channels.
        is_rounded: whether mean keys and values are stored in bytes; else as the layer's own.
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        budget: ReadBudget,
        cluster_size: int,
        segment_length: int,
        spread: float | None,
        is_rounded: bool,
    ):
        super().__init__(context, name="compressed", budget=budget)
        self.cluster_size = cluster_size
        self.segment_length = segment_length
        self.spread = spread
        self.is_rounded = is_rounded

    def _clear(self) -> None:
        super()._clear()
        self.segments: tuple[tuple[int, int], ...] = ()  # of each, one past its last token and its last cluster

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if self.spread is None:
            self.spread = default_spread(self.table.arena.specs[0].dim)
        self.store = ClusterStore(self.table.arena.specs, is_rounded=self.is_rounded)
        self.sides = self.store.tables(self.context, self.device, key_states.shape[0])

    @property
    def clustered_length(self) -> int:
        """Tokens a row that lie in segments."""
        return self.segments[-1][0] if self.segments else 0

    @property
    def border(self) -> int:
        """The first block border behind the clustered tokens, or the newest token."""
        size = self.context.block_size
        return min(self.seen, -(-self.clustered_length // size) * size)

    @property
    def mean_key(self) -> torch.Tensor | None:
        """What mean keys are stored less than, `[B, H, 1, D]`, float32; None: they are exact."""
        return self.fitted[0] if self.fitted else None

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
        if not begin and self.is_rounded:
            self.fitted = [mean_state(keys, is_member)]
        clusters = cluster_tokens(keys, values, is_member, max(1, length // self.cluster_size))
        clusters.spans[..., 0] += begin
        clusters.members.add_(begin)
        self.store.append(self.sides, clusters, self.mean_key)
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
        if (
            can_merge(base, kwargs)
            and decode.can_serve(query, mask, [spec.dim for spec in self.table.arena.specs])
            and native.library()
        ):
            return self._attend_in_place(query, kwargs.get("scaling"), mask), None
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        packed = query.view(query.shape[0], self.table.arena.specs[0].num_heads, -1, query.shape[-1]) * scale
        exact, exact_bias = self._exact(mask)
        anyway = few_products(packed, exact[0]).add_(exact_bias.unsqueeze(2))
        planes = self.sides["clusters"].materialize()
        keys, values = self.store.states(planes, self.mean_key)
        begins, sizes, masses, radii = (plane.squeeze(-1) for plane in planes[-4:])
        scores = few_products(packed, keys).add_(masses.unsqueeze(2))
        reach = self.spread * packed.float().norm(dim=-1, keepdim=True) * radii.unsqueeze(2)
        chosen, tokens, is_read = self._choose(scores, reach, anyway.logsumexp(dim=-1), begins.long(), sizes.long())
        members = gather_units(self.table, tokens, 1)
        self._count_reads(exact[0].shape[2] + tokens.shape[2], tokens.shape[2])
        if can_merge(base, kwargs):
            of_members = few_products(packed, members[0]).masked_fill_(~is_read.unsqueeze(2), -math.inf)
            scores = [of_members, anyway, scores.masked_fill_(chosen.unsqueeze(2), -math.inf)]
            return _attend_parts(scores, (members[1], exact[1], values)), None
        states = [torch.cat(parts, dim=2) for parts in zip(members, exact, (keys, values), strict=True)]
        no_token = torch.zeros(is_read.shape, device=self.device).masked_fill_(~is_read, -math.inf)
        bias = torch.cat([no_token, exact_bias, masses.masked_fill(chosen, -math.inf)], dim=2)
        bias = bias.to(query.dtype).clamp(min=torch.finfo(query.dtype).min).unsqueeze(2)
        return self._attend_gathered(base, module, query, states, bias, args, kwargs)

    def _attend_in_place(self, query: torch.Tensor, scaling: float | None, mask: torch.Tensor | None) -> torch.Tensor:
        """By the decode kernel, which reads everything where it lies."""
        call = self._cluster_call(query.shape[1])
        output = call.attend(query, scaling, None if mask is None else as_float32(mask))
        exact = self.seen - self.clustered_length + self.budget.num_sink_tokens
        read = call.read_length / (self.batch_size * self.table.arena.specs[0].num_heads)
        self._count_reads(exact + read, read)
        return output

    def _cluster_call(self, num_heads: int) -> ClusterCall:
        """The call of this step: that of the last one, while what it points to is where it was."""
        versions = (self.table.version, *(side.version for side in self.sides.values()))
        key = (self.segments, self.border, num_heads, versions, self.first.version)
        if self._call is None or self._call[0] != key:
            self._call = (key, cluster_call(self, num_heads))
        else:
            self._call[1].extend(1, self.seen - self.border)
        return self._call[1]

    def _count_reads(self, tokens: float, members: float) -> None:
        """A row and head reads `tokens`, of which `members` are members of clusters, and all clusters."""
        per_token, per_member = (t.arena.block_bytes // t.arena.block_size for t in (self.table, self.sides["members"]))
        clusters = self.sides["clusters"]
        all_clusters = clusters.length * clusters.arena.block_bytes // clusters.arena.block_size
        self.read_bytes = self.batch_size * round(tokens * per_token + members * per_member + all_clusters)

    def _exact(self, mask: torch.Tensor | None) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Sinks and the tokens that are not clustered: keys and values `[B, H, n, D]`, and 0 or -inf, `[B, H, n]`."""
        sinks, states = self.budget.num_sink_tokens, self.table.materialize(self.clustered_length)
        slots, is_read = self.exact_slots(self.seen)
        if mask is not None:
            is_read = is_read & visible(mask[:, 0, 0]).expand(len(slots), -1).gather(1, slots)
        heads = states[0].shape[1]
        first = gather_units(self.table, slots[:, None, :sinks].expand(-1, heads, -1), 1)
        states = [torch.cat(pair, dim=2) for pair in zip(first, states, strict=True)]
        bias = torch.zeros(slots.shape, device=self.device).masked_fill_(~is_read, -math.inf)
        return states, bias.unsqueeze(1).expand(-1, heads, -1)

    def exact_slots(self, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots `[B, n]` of sinks and of what is not clustered, before `stop`; which count: the others are 0."""
        begin = self.clustered_length
        first = self.first.slots[:, None] + torch.arange(self.budget.num_sink_tokens, device=self.device)
        is_read = first < begin  # the others are among the newer ones
        newer = torch.arange(begin, stop, device=self.device).expand(len(first), -1)
        counts = torch.cat([is_read, torch.ones_like(newer, dtype=torch.bool)], dim=1)
        return torch.cat([first * is_read, newer], dim=1), counts

    def _choose(
        self,
        scores: torch.Tensor,
        reach: torch.Tensor,
        anyway: torch.Tensor,
        begins: torch.Tensor,
        sizes: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The clusters to read (bool `[B, H, C]`), their members `[B, H, n]`, and which of these count."""
        order, is_chosen, total = self.budget.choose_sized(scores, anyway, sizes, self.clustered_length, reach)
        begin, size = begins.gather(2, order), sizes.gather(2, order)
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
