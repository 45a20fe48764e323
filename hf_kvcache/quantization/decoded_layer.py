"""Encoded tokens for models that change what their cache returns (technique 8): decoded as a whole for each step.

Multi-head latent attention expands a latent to keys and values, Gemma-3n lends its keys to later layers, an indexer
masks by what it has read: their caches cannot attend in the model's place. So old tokens are stored in a codec's few
bits, as in `CodedLayer`, and a step decodes all of one layer. That costs time, and the memory of one layer while it is
read.
"""

from collections.abc import Callable

import torch

from ..codecs.base import Codec
from ..layers.layer import LayerContext
from .coded_layer import CodedLayer


class DecodedLayer(CodedLayer):
    """Encoded groups and an exact tail, returned as plain keys and values.

    The first `num_sink_tokens` tokens of each row stay exact, padding included: no mask is known here.

    Args:
        context: where the blocks come from.
        make_codecs: from the dimensions of keys and of values, known at the first update, to their codecs.
        residual_length: newest tokens that stay exact.
        num_sink_tokens: first tokens that stay exact.
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        make_codecs: Callable[[int, int], tuple[Codec, Codec]],
        residual_length: int,
        num_sink_tokens: int,
    ):
        super().__init__(
            context,
            key_codec=None,
            value_codec=None,
            residual_length=residual_length,
            num_sink_tokens=num_sink_tokens,
        )
        self.make_codecs = make_codecs

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._set_codecs(*self.make_codecs(key_states.shape[-1], value_states.shape[-1]))
        super().lazy_initialization(key_states, value_states)

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = self._prepare(key_states, value_states)
        is_first = self.seen == 0
        self.seen += states[0].shape[2]
        keys, values = self._advance(states, None, self._join)
        return (key_states, value_states) if is_first else (keys, values)

    def _join(self, tail: list[torch.Tensor]) -> list[torch.Tensor]:
        """All tokens, before what leaves the tail is encoded."""
        self.read_bytes = sum(state.nbytes for state in tail)
        if not self.coded_length:
            return tail
        self.read_bytes += self.coded.length * self.coded.arena.block_bytes * self.batch_size + self.sinks.nbytes
        joined = [torch.cat(pair, dim=2) for pair in zip(self._decode(0, self.coded.stop), tail, strict=True)]
        count = min(self.num_sink_tokens, self.coded_length)
        for whole, sink in zip(joined, self.sinks.states, strict=True):
            whole[:, :, :count] = sink[:, :, :count]
        return joined
