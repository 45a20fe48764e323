"""Bits for each layer's keys and values, where they lower the error of the model's predictions most.

One forward and one backward pass, then the attention of each layer again with each width. The error of a width is the
Fisher information of what it does to the attention output (`probed_layer`). It is summed over layers as if they erred
independently, and the budget is spent greedily, a step of most error a bit at a time.
Papers: Amari 1998 (Fisher information); Hooper et al. 2024, KVQuant, https://arxiv.org/abs/2401.18079 (section 3.3).
Differs from KVQuant: the information says which layers need bits, not which values.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..codecs import build_codecs
from ..codecs.base import Codec, Shape
from ..registry import resolve
from .observation import MAX_BACKWARD_TOKENS, cache_with, token_ids
from .observed_layer import NUM_SKIPPED
from .probed_layer import ProbedLayer, backward


class Choice(NamedTuple):
    """One width for the keys or values of one layer: what it costs (bits a value) and its error."""

    nbits: int
    cost: float
    error: float


@torch.inference_mode(False)  # a backward pass is not possible in it
@torch.no_grad()
def choose_bits(
    model: PreTrainedModel,
    tokenizer_or_ids: Any,
    name: str,
    *,
    bits_per_value: float,
    per_head: bool = False,
    text: str | None = None,
    **options: Any,
) -> list[tuple]:
    """What `bits="auto"` uses: `(key_bits, value_bits)` of each full-attention layer, to be given as `bits=`.

    Args:
        model: a decoder-only model in eval mode.
        tokenizer_or_ids: the model's tokenizer, or token ids `[1, T]`. At most 1,024 tokens are used.
        name: "int8", "int4", "int2" (which all choose from 2, 4 and 8 bits) or "turboquant" (2, 3, 4).
        bits_per_value: to spend on average, scales and all overhead included.
        per_head: whether each KV head gets widths of its own; then `key_bits` and `value_bits` are lists. Closer at the
            same bytes, but each run of neighbouring heads of the same widths is a call of the kernel in each step.
        text: what to tokenize; by default a text of many kinds that comes with the library.
        options: the technique's other options, such as `q_group_size`.

    Raises:
        ValueError: if the technique has no mixed bits, or fewer bits than `bits_per_value` are not possible.
    """
    recipe = resolve(name, options | {"bits": "auto", "bits_per_value": bits_per_value})
    widths = (2, 3, 4) if name == "turboquant" else (2, 4, 8)
    ids = token_ids(tokenizer_or_ids, text).to(model.device)[:, :MAX_BACKWARD_TOKENS]
    cache, probed = cache_with(model, ProbedLayer)
    half = ids.shape[1] // 2
    begin = half + ids.shape[1] // 8
    gradients = backward(model, ids, cache, list(probed.values()), begin)
    entries = []
    for layer, gradient in zip(probed.values(), gradients, strict=True):
        dim = layer.states[0].shape[-1]
        pairs = {w: build_codecs(name, recipe.options | {"key_bits": w, "value_bits": w}, dim) for w in widths}
        for kind in (0, 1):
            measured = [_measure(layer, gradient, kind, w, pairs[w][kind], half, begin, per_head) for w in widths]
            entries.append(list(zip(*measured, strict=True)))  # for each head, or for all at once, a choice a width
    chosen = iter(spend([options for entry in entries for options in entry], bits_per_value))
    bits = [[next(chosen) for _ in entry] for entry in entries]
    parts = bits if per_head else [entry[0] for entry in bits]
    return list(zip(parts[::2], parts[1::2], strict=True))


def _measure(
    layer: ProbedLayer,
    gradient: torch.Tensor,
    kind: int,
    nbits: int,
    codec: Codec,
    half: int,
    begin: int,
    per_head: bool,
) -> list[Choice]:
    """The error of `codec` on the keys (`kind` 0) or values (1) of the first half of the text: one, or one a head."""
    states = list(layer.states)
    shape = Shape(states[kind].shape[1], states[kind].shape[-1], states[kind].dtype)
    stop = max(1, half // codec.group_length) * codec.group_length
    exact = states[kind][:, :, :stop]
    states[kind] = states[kind].clone()
    states[kind][:, :, NUM_SKIPPED:stop] = codec.decode(codec.encode(exact), shape)[:, :, NUM_SKIPPED:]
    effect = layer.effect(states, gradient, begin).unflatten(1, (shape.num_heads if per_head else 1, -1)).sum(-1)
    stored = sum(plane.num_heads * plane.dim * plane.dtype.itemsize for plane in codec.planes(shape))
    cost = 8 * stored / (codec.group_length * shape.num_heads * shape.dim)
    return [Choice(nbits, cost, error) for error in effect.square().sum(0).tolist()]


def spend(choices: Sequence[Sequence[Choice]], bits_per_value: float) -> list[int]:
    """One width for each entry of `choices`, of `bits_per_value` on average at most.

    Raises:
        ValueError: if even the smallest widths cost more.
    """
    taken = [0] * len(choices)
    left = bits_per_value * len(choices) - sum(options[0].cost for options in choices)
    if left < -1e-9:
        least = sum(options[0].cost for options in choices) / len(choices)
        raise ValueError(f"bits_per_value={bits_per_value} is too little: the smallest widths take {least:.2f}.")
    while True:
        best = None
        for index, options in enumerate(choices):
            now = options[taken[index]]
            for step, option in enumerate(options[taken[index] + 1 :], start=taken[index] + 1):
                gain = (now.error - option.error) / (option.cost - now.cost)
                if gain > 0 and option.cost - now.cost <= left + 1e-9 and (best is None or gain > best[0]):
                    best = gain, index, step
        if best is None:
            return [options[step].nbits for options, step in zip(choices, taken, strict=True)]
        _, index, step = best
        left -= choices[index][step].cost - choices[index][taken[index]].cost
        taken[index] = step
