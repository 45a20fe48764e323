"""A step that reads the members of chosen clusters, and the other clusters as one token each, in the C++ kernel."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from . import native, structs
from .decode import Call, Segment


class ClusterColumns(NamedTuple):
    """What is stored of clusters besides mean keys and values.

    Attributes:
        begins: int32 `[H, slots, 1]`: where the members of a cluster begin.
        sizes: int32 `[H, slots, 1]`: how many there are.
        masses: float32 `[H, slots, 1]`: added to the score of the mean key.
        radii: float32 `[H, slots, 1]`: the farthest that a member's key is from the mean key.
        members: int32 `[H, slots, 1]`, of another table: tokens, cluster by cluster.
    """

    begins: torch.Tensor
    sizes: torch.Tensor
    masses: torch.Tensor
    radii: torch.Tensor
    members: torch.Tensor


class ClusterIds(NamedTuple):
    """Where blocks of clusters, of members and of tokens lie, int64 `[B, N]` each, of `block_size` rows."""

    clusters: np.ndarray
    members: np.ndarray
    tokens: np.ndarray
    block_size: int


class ClusterBudget(NamedTuple):
    """How much is read.

    Attributes:
        count: tokens of clusters, at most.
        top_p: read until what is read has this share of the estimated attention; None: read `count` tokens.
        is_mean: query heads agree by the mean of their shares; else by the largest.
        spread: share of its radius by which a cluster is nearer to the query when it is chosen.
    """

    count: int
    top_p: float | None
    is_mean: bool
    spread: float


class ClusterCall:
    """Attention to what is read anyway, to chosen clusters and to summaries, ready for any number of queries.

    It keeps no tensor alive that it points into, but ids.

    Args:
        exact: what is read anyway.
        tokens: where members lie, without ids.
        clusters: mean keys and values.
        mean: float32 `[B, Hkv, 1, D]`, what was taken from mean keys before they were rounded; None: nothing.
        num_clusters: a row.
        columns: what else is stored of clusters.
        ids: where all that lies.
        budget: how much is read.
        rows: of a query, and its heads.
    """

    def __init__(
        self,
        exact: Sequence[Segment],
        tokens: Segment,
        clusters: Segment,
        mean: torch.Tensor | None,
        num_clusters: int,
        columns: ClusterColumns,
        ids: ClusterIds,
        budget: ClusterBudget,
        *,
        rows: int,
        num_heads: int,
    ):
        self.call = Call([*exact, tokens, clusters], rows=rows, num_heads=num_heads)
        self._alive = [part for segment in exact for part in segment.alive if isinstance(part, np.ndarray)] + [*ids[:3]]
        self._members, self._clusters = self.call.segments[len(exact)], self.call.segments[len(exact) + 1]
        self._members.ignores_mask = self._clusters.ignores_mask = 1  # there are no other tokens in clusters
        self._members.ids_row, self._members.ids_head = tokens.num_heads * budget.count, budget.count
        estimate = structs.Estimate(key=self._clusters.key, per_slot=ids.block_size)
        structs.set_ids(estimate, ids.clusters)
        if mean is not None:
            estimate.mean = mean.data_ptr()
        self.struct = choice = structs.ClusterChoice(attention=ctypes.addressof(self.call.struct), estimate=estimate)
        choice.num_clusters = self._clusters.length = num_clusters
        choice.scores_row = self._clusters.scores_row = -(-num_clusters // 16) * 16  # whole vectors
        for name in ("clusters", "members", "tokens"):
            setattr(choice, name, structs.places(getattr(ids, name), ids.block_size))
        for name in ("begins", "sizes", "masses", "radii"):
            setattr(choice, name, getattr(columns, name).data_ptr())
        choice.member = columns.members.data_ptr()
        choice.cluster_head, choice.member_head = columns.sizes.stride(0), columns.members.stride(0)
        choice.spread, choice.count, choice.is_mean = budget.spread, budget.count, budget.is_mean
        choice.top_p = budget.top_p or 0.0

    def extend(self, index: int, length: int) -> None:
        """A segment that is read anyway has become `length` tokens long."""
        self.call.segments[index].length = length

    def attend(self, query: torch.Tensor, scaling: float | None, mask: torch.Tensor | None) -> torch.Tensor:
        """Choose and attend; arguments, result and errors as for `decode.attend`."""
        self.call.take(query, scaling, mask)
        choice, struct = self.struct, self.call.struct
        found = torch.empty(struct.rows, struct.heads, choice.count, dtype=torch.int64)
        lengths = torch.empty(struct.rows, struct.heads, dtype=torch.int64)
        scores = torch.empty(struct.rows, struct.heads, struct.queries, choice.scores_row)
        choice.ids = self._members.ids = found.data_ptr()
        choice.lengths = self._members.lengths = lengths.data_ptr()
        choice.scores = self._clusters.scores = scores.data_ptr()
        native.library().hf_kvcache_read_clusters(ctypes.byref(choice))
        output = self.call.output.to(query.dtype)
        self.call.query = self.call.mask = self.call.output = None  # of this step only
        self.read_length = int(lengths.sum())
        return output
