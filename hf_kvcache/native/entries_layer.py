"""Layers of models that compress their own past (technique 6, native): DeepSeek-V4's two kinds.

`heavily_compressed_attention` makes one entry of every 128 tokens, `compressed_sparse_attention` one of every 4, of
which an indexer chooses the best; both attend to entries beside a window of exact tokens. The model compresses, chooses
and masks. The cache stores in blocks: the window, once, since it is key and value; the entries; the projections of
tokens that no entry stands for yet; and what one entry leaves to the next.

Exact, or with entries in a codec's few bits. Differs from transformers' layers: the projections of one entry more are
kept, so that the newest token can always be taken back, and all of them while the past is recorded.
Source: `DeepseekV4HCACache` and `DeepseekV4CSACache` in transformers.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ..layers.layer import LayerContext
from ..layers.layer_state import LayerState
from ..layers.sliding_layer import SlidingBlockLayer
from .stream import Stream


class Compressor:
    """What one compressor of a layer stores: entries, and the projections that the next ones are made of.

    Attributes:
        entries: `[B, 1, T // rate, D]`.
        tokens: projections (kv, gate) of the newest tokens, `[B, 1, n, D]` each.
        windows: what the newest entries leave to the next (kv, gate), `[B, 1, n, rate * D]` each; of CSA only.
    """

    def __init__(self, context: LayerContext, *, rate: int, entries: Stream):
        self.rate = rate
        self.entries = entries
        # Few are held at a time: small blocks.
        self.tokens = Stream(replace(context, block_size=min(rate, context.block_size)))
        self.windows = Stream(replace(context, block_size=1))

    @property
    def streams(self) -> dict[str, Stream]:
        return {"entries": self.entries, "tokens": self.tokens, "windows": self.windows}

    def add_tokens(self, states: list[torch.Tensor], keep: int | None) -> list[torch.Tensor]:
        """Store projections `[B, 1, n, D]`; returns those of the tokens that fill entries now."""
        begin, pending = self.entries.stop * self.rate, states
        if self.tokens.stop > begin:
            pending = [torch.cat(pair, dim=2) for pair in zip(self.tokens.read(begin), states, strict=True)]
        self.tokens.append(states, keep=keep)
        usable = pending[0].shape[2] // self.rate * self.rate
        return [state[:, :, :usable] for state in pending]

    def can_crop(self, count: int) -> bool:
        entries = (self.tokens.stop - count) // self.rate
        has_window = not entries or not self.windows.stop or self.windows.start < entries
        return has_window and self.tokens.start <= entries * self.rate

    def crop(self, count: int) -> None:
        self.tokens.crop(count)
        entries = self.tokens.stop // self.rate
        if self.windows.stop:
            self.windows.crop(self.windows.stop - entries)
        self.entries.crop(self.entries.stop - entries)
        # A crop commits what was recorded.
        self.tokens.drop_front(self.tokens.stop - self.rate)
        self.windows.drop_front(entries - 2)

    @property
    def dynamic_bytes(self) -> int:
        """What transformers' layer would hold for as many tokens."""
        if not self.tokens.stop:
            return 0
        pending = self.tokens.stop % self.rate
        a_row = self.entries.stop * self.entries.exact_bytes + pending * self.tokens.exact_bytes
        return self.tokens.table.num_rows * (a_row + min(1, self.windows.stop) * self.windows.exact_bytes)


class EntriesLayer(SlidingBlockLayer):
    """A window of tokens `[B, 1, n, D]`, key and value at once, and the entries and projections of its compressors.

    Args:
        context: where the blocks come from.
        sliding_window: tokens of the exact window, the query's own included.
        rate: tokens an entry.
        make_stream: makes what stores the entries of a compressor, by its name.
    """

    grows = True

    def __init__(self, context: LayerContext, *, sliding_window: int, rate: int, make_stream: Callable[[str], Stream]):
        super().__init__(context, sliding_window=sliding_window)
        self.rate = rate
        self.compressors = {
            name: Compressor(context, rate=rate, entries=make_stream(name)) for name in ("compressor", "indexer")
        }

    # --- what the model's compressors call

    @torch.compiler.disable
    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Store the projections `[B, n, D]` of new tokens in the compressor `name`.

        Returns:
            The projections of all tokens that fill entries now, and the position of the first of them.
        """
        compressor = self.compressors[name]
        begin = compressor.entries.stop * self.rate
        # As many as an entry takes, whatever of them one was made of: the newest token can be taken back.
        keep = None if self.record_past else self.rate
        kv, gate = compressor.add_tokens([kv[:, None], gate[:, None]], keep)
        return kv[:, 0], gate[:, 0], begin

    @torch.compiler.disable
    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Store the first `head_dim` channels of the windows `[B, n, rate, *]` that entries are made of now.

        Returns:
            Those of the last window before them, `[B, rate, head_dim]` each, or None twice.
        """
        windows, prior = self.compressors[name].windows, (None, None)
        if windows.stop:
            # Copies: what they would be views of may move when more comes.
            prior = tuple(state[:, 0, -1].unflatten(-1, (self.rate, head_dim)).clone() for state in windows.read())
        new = [chunk[..., :head_dim].flatten(2)[:, None] for chunk in (chunk_kv, chunk_gate)]
        windows.append(new, keep=None if self.record_past else 2)
        return prior

    @torch.compiler.disable
    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Store new entries `[B, n, D]` of the compressor `name`; returns all of them."""
        entries = self.compressors[name].entries
        is_first = entries.stop == 0
        entries.append([compressed[:, None]])
        self.read_bytes += entries.held_bytes
        return compressed if is_first else entries.read()[0][:, 0]

    # --- report

    @property
    def streams(self) -> dict[str, Stream]:
        """All streams of all compressors, by name."""
        return {
            f"{name}.{part}": stream
            for name, compressor in self.compressors.items()
            for part, stream in compressor.streams.items()
        }

    @property
    def tables(self) -> list:
        return [*super().tables, *(table for stream in self.streams.values() for table in stream.tables)]

    @property
    def num_values(self) -> int:
        return super().num_values + sum(stream.num_values for stream in self.streams.values())

    @property
    def marginal_bits(self) -> float:
        an_entry = sum(compressor.entries.bytes_per_token for compressor in self.compressors.values())
        return 8 * an_entry / self.rate / self.values_per_token

    @property
    def dynamic_bytes(self) -> int:
        window = super().dynamic_bytes // (2 if self.shares_values else 1)  # transformers stores it once here
        return window + sum(compressor.dynamic_bytes for compressor in self.compressors.values())

    # --- contract

    def can_crop(self, count: int) -> bool:
        used = [compressor for compressor in self.compressors.values() if compressor.tokens.stop]
        return super().can_crop(count) and all(compressor.can_crop(count) for compressor in used)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        for compressor in self.compressors.values():
            if compressor.tokens.stop:
                compressor.crop(-tokens_to_remove)
        self._give_back_memory()

    def select_rows(self, rows: np.ndarray) -> None:
        for stream in self.streams.values():
            stream.select_rows(rows)
        super().select_rows(rows)

    def fork(self) -> "EntriesLayer":
        forked = super().fork()
        forked.compressors = {}
        for name, compressor in self.compressors.items():
            twin = Compressor(self.context, rate=self.rate, entries=compressor.entries.fork())
            twin.tokens, twin.windows = compressor.tokens.fork(), compressor.windows.fork()
            forked.compressors[name] = twin
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        for stream in self.streams.values():
            stream.to(device, self.context)

    def state(self) -> LayerState:
        state = super().state()
        for name, stream in self.streams.items():
            state.put(name, stream.state())
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        for name, stream in self.streams.items():
            stream.load_state(state.part(name), device)
        self._give_back_memory()

    def reset(self) -> None:
        super().reset()
        for stream in self.streams.values():
            stream.reset()
