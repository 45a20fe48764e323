"""The layer contract: what every storage of one attention layer is and answers, whatever it keeps."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from ..blocks import Arena, BlockPool, BlockTable, load_table, table_state
from ..blocks.arena import Plane
from .layer_sizes import LayerSizes
from .layer_state import LayerState


@dataclass
class LayerContext:
    """What a layer is built from: where its blocks come from, and what its model does with them.

    `takes_over` says whether the model hands what `update` returns unchanged to its attention function, so that the
    layer may return less and attend itself; `needs_packed` whether the model takes nothing but contiguous tensors.
    """

    layer_idx: int
    layer_type: str
    block_size: int
    pools: dict[torch.device, BlockPool] = field(default_factory=dict)
    max_bytes: int | None = None
    takes_over: bool = False
    needs_packed: bool = False

    def pool(self, device: torch.device) -> BlockPool:
        """The pool of `device`, shared by all layers there."""
        if device not in self.pools:
            self.pools[device] = BlockPool(device, max_bytes=self.max_bytes)
        return self.pools[device]


class KVLayer(LayerSizes, CacheLayerMixin):
    """Storage of one attention layer. Everything `generate()` calls on a layer is here or raises with the reason.

    Subclasses store in `update`, say what they return in `get_mask_sizes`, and set `read_bytes` to what the last
    attention read. `seen` counts all tokens, also those no longer stored: it drives positions and masks.
    """

    is_sliding = False
    is_croppable = True
    grows = True  # whether one more token takes more memory, however many came before
    shares_values = False  # whether values are the keys, and are stored once

    def __init__(self, context: LayerContext):
        # The parent's `keys` and `values` are attributes; here they are views of the blocks.
        self.context = context
        self.is_initialized = False
        self.seen = 0
        self.read_bytes = 0
        self.record_past = False
        self.table: BlockTable | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seen={self.seen}, stored_length={self.stored_length})"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        states = (key_states,) if self.shares_values else (key_states, value_states)
        planes = tuple(Plane(s.shape[1], s.shape[-1], s.dtype) for s in states)
        arena = Arena(self.context.pool(self.device), planes, block_size=self.context.block_size)
        self.table = BlockTable(arena, key_states.shape[0])
        self.is_initialized = True

    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store new tokens `[B, Hkv, T, D]` that no query attends to: a cache filled from elsewhere."""
        self.update(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        count = check_crop(self, tokens_to_remove)
        if self.table is not None:
            self._take_back(count)
            self._give_back_memory()

    def _take_back(self, count: int) -> None:
        """Forget the newest `count` tokens, as `can_crop` allows."""
        self.table.crop(count)
        self.seen -= count

    def can_crop(self, count: int) -> bool:
        """Whether the newest `count` tokens can be forgotten without a trace."""
        return count <= self.seen

    @property
    def batch_size(self) -> int:
        if self.table is None:
            raise AttributeError("batch_size is not known before the first update")
        return self.table.num_rows

    @property
    def stored_length(self) -> int:
        """Tokens a row held now."""
        return 0 if self.table is None else self.table.length

    @property
    def tables(self) -> list[BlockTable]:
        """All block tables of this layer, for the report and to give memory back."""
        return [] if self.table is None else [self.table]

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys held, `[B, Hkv, n, D]`, for looking at: decoded if encoded, filled up where heads differ."""
        return None if self.table is None else self._states()[0]

    @property
    def values(self) -> torch.Tensor | None:
        return None if self.table is None else self._states()[-1]

    def _states(self) -> Sequence[torch.Tensor]:
        """Keys and values held: views where they lie in one run, else copies."""
        return self.table.materialize()

    def comparable_keys(self) -> tuple[int, torch.Tensor]:
        """A slot, and the keys `[B, Hkv, n, D]` from it on that are stored exactly: what tells two texts apart."""
        return self.table.start, self.table.materialize()[0]

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Masks have a column for each token ever seen, of which a layer takes its own.
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def select_rows(self, rows: np.ndarray) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        if self.table is not None:
            self.table.select_rows(rows)
            self._give_back_memory()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        # Block tables live on the host; `KVCache` converts once for all layers.
        self.select_rows(beam_idx.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.table is not None:
            self.select_rows(np.repeat(np.arange(self.batch_size), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.table is not None:
            self.select_rows(np.arange(self.batch_size)[indices.cpu().numpy()])

    def activate_past_recording(self) -> None:
        self.record_past = True

    def stop_past_recording(self) -> None:
        self.record_past = False

    def fork(self) -> "KVLayer":
        """A second layer over the same tokens that shares every block until one of the two writes."""
        forked = copy.copy(self)
        forked.table = None if self.table is None else self.table.fork()
        return forked

    def to(self, device: torch.device, pools: dict[torch.device, BlockPool]) -> None:
        """Move the blocks to `device`; `pools` collects the new pools of all layers."""
        self.context = replace(self.context, pools=pools)
        if self.table is not None:
            self.device = device
            self.table = self.table.to(self.context.pool(device))

    def state(self) -> LayerState:
        """Everything this layer holds, in its stored form and without copies where it can be: what a file gets.

        A subclass adds what it stores outside `table`, and reads it in `load_state`.
        """
        state = LayerState(numbers={"seen": self.seen, "record_past": int(self.record_past)})
        if self.table is not None:
            state.put("tokens", table_state(self.table))
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        """Become, from new, the layer that gave `state`, on `device`; the tensors of `state` are on the CPU."""
        self.seen, self.record_past = state.numbers["seen"], bool(state.numbers["record_past"])
        tokens = state.part("tokens")
        if not tokens.tensors:
            return
        rows = tokens.tensors["block_ids"].shape[0]
        planes = [tokens.tensors[f"plane_{index}"] for index in range(len(tokens.tensors) - 1)]
        empty = [plane.new_empty(rows, plane.shape[0], 0, plane.shape[2], device=device) for plane in planes]
        self.lazy_initialization(empty[0], empty[-1])
        load_table(self.table, tokens)
        self._give_back_memory()

    def reset(self) -> None:
        """Forget everything and give the memory back; the next batch may have another size, dtype or device."""
        self.table = None
        self.seen = self.read_bytes = 0
        self.is_initialized = False

    def offload(self) -> None:
        raise NotImplementedError("blocks do not move between devices in this version: use KVCache.to(device).")

    prefetch = offload

    def _give_back_memory(self) -> None:
        for table in self.tables:
            if table.arena.num_used_blocks * 2 < table.arena.num_blocks:
                table.compact()

    def _prepare(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Check the new states against what is stored, and cut them from the autograd graph."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, heads = key_states.shape[0], key_states.shape[1]
        stored = self.table.arena.specs[0]
        if rows != self.table.num_rows:
            raise ValueError(
                f"the cache holds {self.batch_size} sequences and was given {rows}: call batch_repeat_interleave or "
                "batch_select_indices to match them, or reset() to start anew."
            )
        if (heads, key_states.dtype) != (stored.num_heads, stored.dtype):
            raise ValueError(
                f"layer {self.context.layer_idx} stores {stored.num_heads} heads of {stored.dtype} and was given "
                f"{heads} of {key_states.dtype}: this cache belongs to another model or dtype. Use a new cache."
            )
        if key_states.requires_grad:
            warnings.warn(
                "hf_kvcache stores keys and values without gradients: wrap the call in torch.no_grad(), or use "
                "transformers' DynamicCache to train through the cache.",
                stacklevel=4,
            )
            return key_states.detach(), value_states.detach()
        return key_states, value_states


def check_crop(layer: KVLayer, tokens_to_remove: int) -> int:
    """The number of tokens to forget, from transformers' negative count.

    Raises:
        ValueError: for a positive count, or more tokens than were seen.
        RuntimeError: if the layer has already let go of tokens that it would need.
    """
    if tokens_to_remove > 0:
        raise ValueError(f"crop({tokens_to_remove}) is not possible: pass a negative number, the tokens to remove.")
    count = -tokens_to_remove
    if count > layer.seen:
        raise ValueError(f"crop({tokens_to_remove}) is not possible: the cache has seen {layer.seen} tokens.")
    if not layer.can_crop(count):
        raise RuntimeError(
            f"{type(layer).__name__} cannot take back {count} tokens: older ones that the window would need again were "
            "dropped. Call activate_past_recording() before the tokens are added, or start from a new cache."
        )
    return count
