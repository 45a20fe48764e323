"""Layers of models that choose the tokens they attend to by keys of their own (techniques 6 and 7, native).

DeepSeek Sparse Attention scores every token by an indexer and attends to the best: DeepSeek-V3.2, GLM-MoE-DSA and their
like, and MiniMax-M3, which chooses blocks. The model does the choosing and the masking. The cache stores the indexer's
keys beside keys and values (or latents), in blocks of their own, and gives both back whole.

Exact, or in a codec's few bits. Paper: DeepSeek-AI 2025, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.
"""

from typing import Any

import numpy as np
import torch

from ..layers.block_layer import BlockLayer
from ..layers.layer import KVLayer, LayerContext
from ..layers.layer_state import LayerState
from ..quantization.decoded_layer import DecodedLayer
from .stream import Stream


class IndexedLayer(KVLayer):
    """Adds indexer keys to a layer, and the positions that some models keep with them.

    A layer that reads another one's keys and values may have nothing but its indexer keys.

    Args:
        context: where the blocks come from.
        index: what stores the indexer keys, `[B, 1, T, D]`.
        storage: the arguments of the layer that stores keys and values.
    """

    def __init__(self, context: LayerContext, *, index: Stream, **storage: Any):
        super().__init__(context, **storage)
        self.index = index
        self.positions = Stream(context)

    @torch.compiler.disable
    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store new indexer keys `[B, n, D]`; returns those of all tokens, `[B, T, D]`."""
        return self.update_index(indexer_key_states[:, None])[:, 0]

    @torch.compiler.disable
    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """The same for keys `[B, 1, n, D]`, as MiniMax-M3 calls it."""
        is_first = self.index.stop == 0
        self.index.append([idx_k])
        return idx_k if is_first else self.index.read()[0]

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions of all tokens, `[dims, B, T]`, of models that store them on their first indexed layer."""
        if self.positions.table is None:
            return None
        return self.positions.read()[0][:, 0].permute(2, 0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: torch.Tensor) -> None:
        new = position_ids[..., self.positions.stop :]
        self.positions.append([new.permute(1, 2, 0)[:, None]])

    @property
    def streams(self) -> tuple[Stream, Stream]:
        return self.index, self.positions

    @property
    def read_bytes(self) -> int:
        """What the last attention read: the indexer scores every key that it has."""
        return self._read_bytes + self.index.held_bytes

    @read_bytes.setter
    def read_bytes(self, size: int) -> None:
        self._read_bytes = size

    # --- report

    @property
    def tables(self) -> list:
        return [*super().tables, *(table for stream in self.streams for table in stream.tables)]

    @property
    def values_per_token(self) -> int:
        return super().values_per_token + self.index.values_per_token

    @property
    def marginal_bits(self) -> float:
        return super().marginal_bits + 8 * self.index.bytes_per_token / self.values_per_token

    @property
    def num_values(self) -> int:
        return self.index.num_values if self.table is None else super().num_values

    @property
    def dynamic_bytes(self) -> int:
        return super().dynamic_bytes + sum(
            stream.table.num_rows * stream.stop * stream.exact_bytes for stream in self.streams if stream.stop
        )

    # --- contract

    def can_crop(self, count: int) -> bool:
        return super().can_crop(count) if self.table is not None else count <= self.index.stop

    def crop(self, tokens_to_remove: int) -> None:
        if self.table is not None:
            super().crop(tokens_to_remove)
        for stream in self.streams:
            stream.crop(-tokens_to_remove)
        self._give_back_memory()

    def select_rows(self, rows: np.ndarray) -> None:
        for stream in self.streams:
            stream.select_rows(rows)
        super().select_rows(rows)

    def fork(self) -> "IndexedLayer":
        forked = super().fork()
        forked.index, forked.positions = (stream.fork() for stream in self.streams)
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        for stream in self.streams:
            stream.to(device, self.context)

    def state(self) -> LayerState:
        state = super().state()
        state.put("index", self.index.state())
        state.put("positions", self.positions.state())
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        self.index.load_state(state.part("index"), device)
        self.positions.load_state(state.part("positions"), device)
        self._give_back_memory()

    def reset(self) -> None:
        super().reset()
        for stream in self.streams:
            stream.reset()


class IndexedBlockLayer(IndexedLayer, BlockLayer):
    """Everything exact: keys and values `[B, Hkv, seen, D]`, indexer keys `[B, 1, seen, D]`."""


class IndexedDecodedLayer(IndexedLayer, DecodedLayer):
    """Old keys, values and indexer keys encoded, and decoded as a whole for each step."""
