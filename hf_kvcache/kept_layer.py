"""A layer that holds some of its older tokens, other ones for each head, and all newer ones: what eviction leaves."""

from collections.abc import Sequence

import numpy as np
import torch

from .attending_layer import AttendingLayer
from .attention import Piece, attend_packed, attend_piece, can_merge, merge
from .kept_tokens import KeptTokens, join_kept
from .layer import LayerContext, check_crop
from .masks import first_visible
from .policies.base import Held
from .rotary import Rotary

# From so many query tokens on, one dense copy of a layer's tokens costs less than attending to them in their groups.
_MANY_QUERIES = 32
_NO_TOKEN = 1 << 40  # first slot of a row that has had only padding so far


class KeptLayer(AttendingLayer):
    """What is kept of older tokens (`kept`, a head at a time), then all newer tokens in blocks (`table`).

    Args:
        context: where the blocks come from.
        rotary: of kept keys that were turned to stand right before the newer tokens; None if they keep their positions.
    """

    def __init__(self, context: LayerContext, *, rotary: Rotary | None):
        super().__init__(context)
        self.rotary = rotary
        self._clear()

    def _clear(self) -> None:
        self.scaling = 1.0
        self.kept: KeptTokens | None = None
        self.kept_rows = np.zeros(0, dtype=np.int64)  # the row of `kept` that each row reads
        self.first_slot: torch.Tensor | None = None

    @property
    def stored_length(self) -> float:
        """Tokens a head of a row held now, on average."""
        if self.kept is None:
            return super().stored_length
        return float(self.kept.counts[self.kept_rows].mean()) + super().stored_length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        with torch.inference_mode(False):
            self.first_slot = torch.full((key_states.shape[0],), _NO_TOKEN, device=self.device)
        self._has_padding_only = True

    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        states = self._prepare(key_states, value_states)
        self.seen += key_states.shape[2]
        self._note_padding(None)
        self.table.append(states)

    def _note_padding(self, mask: torch.Tensor | None) -> None:
        if self._has_padding_only:
            first = first_visible(mask, self.seen, _NO_TOKEN)
            self.first_slot.copy_(self.first_slot.clamp(max=first))
            # A sync, in the first forwards only.
            self._has_padding_only = bool((self.first_slot == _NO_TOKEN).any())

    def _attend(self, base, module, query, tail, mask, args: tuple, kwargs: dict):
        self.read_bytes = sum(state.nbytes for state in tail)
        own = None if mask is None else mask[..., self.seen - tail[0].shape[2] : self.seen]
        is_mergeable = can_merge(base, kwargs)
        if self.kept is None:
            if query.shape[2] == 1 and is_mergeable:
                return attend_packed(query, *tail, own, self.scaling), None
            return base(module, query, *tail, own, *args, **kwargs)
        self.read_bytes += self.kept.nbytes
        if not is_mergeable or query.shape[2] >= _MANY_QUERIES:
            states, joined = join_kept(self.name, module, query, self.kept.padded(self.kept_rows), tail, mask)
            return base(module, query, *states, joined, *args, **kwargs)
        parts = (
            self.kept.attend(query, mask, self.scaling, self.kept_rows),
            attend_piece(query, Piece(*tail, own), self.scaling),
        )
        return merge(*zip(*parts, strict=True)), None

    def held(self, tail: Sequence[torch.Tensor] | None = None) -> Held:
        """All tokens held: what is kept of older ones, then the newer ones. A copy if both are there."""
        tail = self.table.materialize() if tail is None else tail
        start = self.table.start if self.table.length else self.seen - tail[0].shape[2]
        slots = torch.arange(start, start + tail[0].shape[2], device=self.device).expand(*tail[0].shape[:2], -1)
        parts = (*tail, slots, slots)
        if self.kept is not None:
            keys, values, kept_slots = self.kept.padded(self.kept_rows)
            positions = kept_slots
            if self.rotary is not None:
                counts = torch.from_numpy(self.kept.counts[self.kept_rows]).to(self.device).unsqueeze(-1)
                positions = start - counts + torch.arange(kept_slots.shape[-1], device=self.device)
            kept = (keys, values, kept_slots, positions)
            parts = [torch.cat(pair, dim=2) for pair in zip(kept, parts, strict=True)]
        return Held(*parts, self.first_slot, start + tail[0].shape[2], self.scaling)

    # --- contract

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys of the tokens held, `[B, Hkv, n, D]`: a copy, for looking at; shorter heads are filled up."""
        return None if self.table is None else self.held().keys

    @property
    def values(self) -> torch.Tensor | None:
        return None if self.table is None else self.held().values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def can_crop(self, count: int) -> bool:
        held = 0 if self.table is None else self.table.length
        return count <= held

    def crop(self, tokens_to_remove: int) -> None:
        count = check_crop(self, tokens_to_remove)
        if self.table is None:
            return
        self.table.crop(count)
        self.seen -= count
        if self.seen <= int(self.first_slot.max()):
            self.first_slot[self.first_slot >= self.seen] = _NO_TOKEN
            self._has_padding_only = True
        self._give_back_memory()

    def select_rows(self, rows: np.ndarray) -> None:
        if self.table is not None:
            # Outside inference mode, or a later turn could not write the result.
            with torch.inference_mode(False):
                index = torch.from_numpy(rows).to(self.device)
                self.first_slot = self.first_slot.index_select(0, index)
            if self.kept is not None:
                self._select_kept(self.kept_rows[rows])
        super().select_rows(rows)

    def _select_kept(self, rows: np.ndarray) -> None:
        """Rows share what they keep of their common past, until fewer than half of the stored rows are read."""
        self.kept_rows = rows
        used, renumbered = np.unique(rows, return_inverse=True)
        if 2 * len(used) <= self.kept.num_rows:
            self.kept = self.kept.take(self.context.pool(self.device), used)
            self.kept_rows = renumbered

    def fork(self) -> "KeptLayer":
        forked = super().fork()
        forked.first_slot = None if self.first_slot is None else self.first_slot.clone()
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        if self.table is not None:
            self.first_slot = self.first_slot.to(device)
            self.kept = None if self.kept is None else self.kept.to(self.context.pool(device))

    def reset(self) -> None:
        super().reset()
        self._clear()
