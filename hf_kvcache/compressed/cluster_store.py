"""The clusters of a layer as they are stored: mean keys and values in bytes, or exact, and who belongs to them.

In bytes, each mean key and mean value has a scale; keys are rounded less the mean of all, which moves all scores of a
query alike. Channels that are large for every key cost no precision then.
"""

import torch

from ..blocks import Arena, BlockTable
from ..blocks.arena import Plane
from ..kernels.clusters import ClusterColumns
from ..layers.layer import LayerContext
from ..readers.base import to_float16
from .clusters import Clusters

_LARGEST_CODE = 127
_SMALLEST_SCALE = 2.0**-14


class ClusterStore:
    """Two tables of a layer: a slot for each cluster, and the members, cluster by cluster.

    Args:
        specs: of the layer's keys and values.
        is_rounded: whether mean keys and values are stored in bytes.
    """

    def __init__(self, specs: tuple[Plane, Plane], *, is_rounded: bool):
        self.specs = specs
        self.is_rounded = is_rounded

    def tables(self, context: LayerContext, device: torch.device, num_rows: int) -> dict[str, BlockTable]:
        """New, empty ones: "clusters" and "members"."""
        pool = context.pool(device)
        arenas = {name: Arena(pool, planes, block_size=context.block_size) for name, planes in self._planes().items()}
        return {name: BlockTable(arena, num_rows) for name, arena in arenas.items()}

    def _planes(self) -> dict[str, tuple[Plane, ...]]:
        heads = self.specs[0].num_heads
        number, real = Plane(heads, 1, torch.int32), Plane(heads, 1, torch.float32)
        means = self.specs
        if self.is_rounded:
            scale = Plane(heads, 1, torch.float16)
            means = tuple(part for spec in self.specs for part in (spec._replace(dtype=torch.int8), scale))
        return {"clusters": (*means, number, number, real, real), "members": (number,)}

    def append(self, tables: dict[str, BlockTable], clusters: Clusters, mean: torch.Tensor | None) -> None:
        """Store the clusters of a segment, whose members and spans are those of all.

        Args:
            mean: `[B, H, 1, D]`, float32, taken from keys before they are rounded; not used for exact ones.
        """
        means = [clusters.keys, clusters.values]
        if self.is_rounded:
            means = [part for state in (clusters.keys.float() - mean, clusters.values) for part in _to_bytes(state)]
        begins, sizes = clusters.spans.unsqueeze(-1).unbind(dim=-2)
        masses = sizes.float().log()  # -inf for an empty cluster
        tables["clusters"].append([*means, begins, sizes, masses, clusters.radii.unsqueeze(-1)])
        tables["members"].append([clusters.members.unsqueeze(-1)])

    def states(self, planes: list[torch.Tensor], mean: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean keys and values `[B, H, C, *]`, in the layer's dtypes."""
        if not self.is_rounded:
            return planes[0], planes[1]
        keys, values = (codes.float() * scale.float() for codes, scale in (planes[:2], planes[2:4]))
        return (keys + mean).to(self.specs[0].dtype), values.to(self.specs[1].dtype)

    def columns(self, planes: list[torch.Tensor], members: torch.Tensor) -> ClusterColumns:
        """What else the planes of "clusters" and of "members" have, views."""
        return ClusterColumns(*planes[-4:], members)


def _to_bytes(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8, `[..., D]`) and a scale (float16, `[..., 1]`)."""
    scale = to_float16((states.float().abs().amax(dim=-1, keepdim=True) / _LARGEST_CODE).clamp(min=_SMALLEST_SCALE))
    codes = (states.float() / scale.float()).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    return codes.to(torch.int8), scale
