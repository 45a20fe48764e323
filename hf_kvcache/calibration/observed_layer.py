"""A layer that measures the keys and queries of one forward pass, and keeps none of them."""

from collections.abc import Callable

import torch
from torch import nn

from ..codecs.statistics import LayerStatistics
from ..layers.attending_layer import AttendingLayer
from ..layers.layer import LayerContext
from ..rotary import Rotary

# First tokens that are left out: attention sinks, whose keys are like no others and are kept exactly.
NUM_SKIPPED = 4
# Added to how much each direction of a key matters, in parts of the mean over directions: no direction is worthless.
_FLOOR = 1e-3
# Smallest variance of a coefficient, in parts of the largest: a short text leaves some directions empty.
_SMALLEST = 1e-9


class ObservedLayer(AttendingLayer):
    """Attends as the model does over the new tokens alone, and leaves what it saw in `statistics`.

    Args:
        context: of the layer that it stands for.
        rotary: takes the rotary embedding away from keys and queries.
    """

    name = "calibration"

    def __init__(self, context: LayerContext, rotary: Rotary):
        super().__init__(context)
        self.rotary = rotary
        self.statistics: LayerStatistics | None = None

    def _attend_and_store(self, base: Callable, module: nn.Module, query, states, mask, args: tuple, kwargs: dict):
        back = -torch.arange(query.shape[2], device=query.device)[None]
        plain = [self.rotary.turn(s.detach().float(), back)[0, :, NUM_SKIPPED:] for s in (query, states[0])]
        if not all(bool(torch.isfinite(state).all()) for state in plain):
            raise ValueError(
                f"keys or queries of layer {self.context.layer_idx} are not finite in {query.dtype}: load the model in "
                "another dtype."
            )
        self.statistics = measure_statistics(*plain, self.rotary)
        return base(module, query, *states, mask, *args, **kwargs)

    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError("calibration needs the queries: run the model.")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("calibration keeps no tokens.")


def measure_statistics(queries: torch.Tensor, keys: torch.Tensor, rotary: Rotary) -> LayerStatistics:
    """Mean, basis and variances of `keys` `[H, T, D]` that `queries` `[Hq, T, D]` look at, both without rotation."""
    importance = _importance(queries, keys.shape[0], rotary).double().cpu().sqrt()  # [H, D]
    samples = keys.double().cpu()
    mean = samples.mean(1)
    weighted = (samples - mean[:, None]) * importance[:, None]
    variance, directions = torch.linalg.eigh(weighted.mT @ weighted / samples.shape[1])
    variance, directions = variance.flip(-1), directions.flip(-1)
    variance = variance.clamp(min=variance[:, :1].clamp(min=1e-30) * _SMALLEST)
    basis = importance[..., None] * directions
    return LayerStatistics(mean.float(), basis.float(), variance.float(), importance=torch.ones(len(mean)))


def _importance(queries: torch.Tensor, kv_heads: int, rotary: Rotary) -> torch.Tensor:
    """Mean square of the queries of each KV head in each dimension, `[H, D]`.

    A query meets keys at all distances, so the two dimensions that a rotation mixes matter alike.
    """
    squares = queries.square().unflatten(0, (kv_heads, -1)).mean((1, 2))
    partner = _partners(queries.shape[-1], rotary, queries.device)
    squares = (squares + squares[:, partner]) / 2
    return squares + _FLOOR * squares.mean(-1, keepdim=True) + 1e-30


def _partners(dim: int, rotary: Rotary, device: torch.device) -> torch.Tensor:
    """The dimension that each is mixed with by a rotation, itself where it is not rotated, `[D]`."""
    unit = torch.eye(dim, device=device)
    position = torch.full((1, dim), 11, device=device)
    turned = rotary.turn(unit[None, None], position)[0, 0]
    off_diagonal = (turned - turned.diagonal().diag()).abs()
    mixed, partner = off_diagonal.max(-1)
    return torch.where(mixed > 0, partner, torch.arange(dim, device=device))
