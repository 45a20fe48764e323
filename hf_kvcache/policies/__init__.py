"""Retention policies: which tokens stay, one file each, and what a technique name builds."""

from collections.abc import Callable, Sequence
from typing import Any

from ..rotary import Rotary
from .adakv import AdaKV
from .base import Policy
from .blend import Blend
from .duo_attention import DuoAttention
from .expected_attention import ExpectedAttention
from .h2o import H2O
from .keydiff import KeyDiff
from .knorm import KeyNorm
from .kvzip import KVzip
from .lagkv import LagKV
from .leverage import Leverage
from .pyramidkv import PyramidKV
from .random import Random
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM
from .tova import Tova

__all__ = ["Policy", "build_policy"]

_WEIGHTS = {"expected_attention": 1.5}  # in a blend; 1 for all others


def build_policy(
    name: str,
    options: dict[str, Any],
    *,
    find_rotary: Callable[[], Rotary],
    head_scores: Callable[[], Sequence[Sequence[float]]],
    layer_idx: int,
    layer: int,
    num_layers: int,
) -> Policy:
    """The policy of one layer.

    Args:
        name: of the technique.
        options: all of its options.
        find_rotary: finds the rotary embedding of the layer.
        head_scores: finds how well each KV head of each evicting layer retrieves.
        layer_idx: of the layer in the model.
        layer: its place among the `num_layers` layers that evict.

    Raises:
        NotImplementedError: if the policy needs a rotary embedding and the model has none that it can turn.
    """
    place = {
        "find_rotary": find_rotary,
        "head_scores": head_scores,
        "layer_idx": layer_idx,
        "layer": layer,
        "num_layers": num_layers,
    }
    sinks = options["num_sink_tokens"]
    match name:
        case "random":
            return Random(seed=options["seed"], layer_idx=layer_idx)
        case "streaming_llm":
            return StreamingLLM()
        case "knorm":
            return KeyNorm()
        case "keydiff":
            return KeyDiff()
        case "leverage":
            return Leverage(rotary=find_rotary())
        case "lagkv":
            return LagKV(lag_length=options["lag_length"], num_sink_tokens=sinks)
        case "tova":
            return Tova()
        case "h2o":
            return H2O(average=options["average"])
        case "snapkv":
            return SnapKV(**{key: options[key] for key in ("observation_window", "window_weights")})
        case "expected_attention":
            chosen = {key: options[key] for key in ("num_future_tokens", "epsilon")}
            return ExpectedAttention(rotary=find_rotary(), num_sink_tokens=sinks, **chosen)
        case "duo_attention":
            pattern = options["pattern"] or head_scores()
            return DuoAttention(pattern, layer=layer, minimum=sinks + options["num_recent_tokens"])
        case "kvzip":
            return KVzip(chunk_length=options["chunk_length"], looks=options["looks"])
        case "pyramidkv":
            scorer = build_policy(options["scorer"], options, **place)
            return PyramidKV(scorer, beta=options["beta"], layer=layer, num_layers=num_layers)
        case "blend":
            scorers = [build_policy(scorer, options, **place) for scorer in options["scorers"]]
            weights = options["weights"] or [_WEIGHTS.get(scorer, 1.0) for scorer in options["scorers"]]
            return Blend(scorers, weights, num_sink_tokens=sinks)
        case "adakv":
            return AdaKV(build_policy(options["scorer"], options, **place), safeguard=options["safeguard"])
    raise ValueError(f"unknown policy {name!r}")
