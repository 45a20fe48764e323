"""Encoded tokens for models that change what their cache returns (technique 8): decoded as a whole for each step.

Multi-head latent attention stores a latent and expands it to keys and values; a model with an indexer masks by what it
reads. Neither lets its cache attend in its place. So old tokens are stored in a codec's few bits as in `CodedLayer`, and a
step decodes all of one layer, which costs time and, for that step, the memory of one layer.
"""

import torch

from .coded_layer import CodedLayer


class DecodedLayer(CodedLayer):
    """Encoded groups and an exact tail, returned as plain keys and values.

    The first `num_sink_tokens` tokens of a row stay exact, padding included: the mask is not known here.
    """

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = self._prepare(key_states, value_states)
        is_first = self.seen == 0
        self.seen += states[0].shape[2]
        keys, values = self._advance(states, None, self._join)
        self.read_bytes = keys.nbytes + values.nbytes if is_first else self._stored_bytes
        return (key_states, value_states) if is_first else (keys, values)

    def _join(self, tail: list[torch.Tensor]) -> list[torch.Tensor]:
        """All tokens, before what leaves the tail is encoded."""
        self._stored_bytes = sum(state.nbytes for state in tail)
        if not self.coded_length:
            return tail
        self._stored_bytes += self.coded.length * self.coded.arena.block_bytes * self.batch_size + self.sinks.nbytes
        joined = [torch.cat(pair, dim=2) for pair in zip(self._decode(0, self.coded.stop), tail, strict=True)]
        for whole, sink in zip(joined, self.sinks.states, strict=True):
            count = min(self.num_sink_tokens, self.coded_length)
            whole[:, :, :count] = sink[:, :, :count]
        return joined
