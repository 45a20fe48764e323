"""A layer that holds some of its older tokens, other ones for each head, and all newer ones: what eviction leaves."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ..attention import Piece, attend_merged, attend_packed, can_merge
from ..codecs.base import Shape
from ..codecs.by_head import HeadCodecs
from ..layers.attending_layer import AttendingLayer
from ..layers.first_slots import FirstSlots
from ..layers.layer import LayerContext
from ..layers.layer_state import LayerState
from ..policies.base import Held
from ..rotary import Rotary
from . import kept_kernel
from .kept import Kept, packed_positions
from .kept_attention import join_kept

# From so many query tokens on, one dense copy of a layer's tokens costs less than attending to them in their groups.
_MANY_QUERIES = 32
# Newer tokens are encoded at least so many at a time: the older ones are copied, in their encoded form, to join them.
_SETTLES_AT_A_TIME = 128


class KeptLayer(AttendingLayer):
    """What is kept of older tokens (`kept`, a head at a time), then all newer tokens in blocks (`table`).

    With codecs, kept tokens are encoded, but for sinks and those of the newest `residual_length`, and so are newer
    tokens when they have become older.

    Args:
        context: where the blocks come from.
        rotary: of kept keys that were turned to stand right before the newer tokens; None if they keep their positions.
        codecs: of each head's kept keys and values; None for none.
        residual_length: newest tokens that are not encoded.
        num_sink_tokens: first real tokens of each row that are not encoded.
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        rotary: Rotary | None,
        codecs: HeadCodecs | None,
        residual_length: int,
        num_sink_tokens: int,
    ):
        super().__init__(context)
        self.rotary = rotary
        self.codecs = codecs
        self.residual_length = residual_length
        self.num_sink_tokens = num_sink_tokens
        self._clear()

    def _clear(self) -> None:
        self.scaling = 1.0
        self.kept = Kept(self.codecs, self.num_sink_tokens)
        self.first_slots: FirstSlots | None = None

    @property
    def first_slot(self) -> torch.Tensor:
        """First real token of each row, int64 `[B]`."""
        return self.first_slots.slots

    @property
    def token_bytes(self) -> float:
        """Bytes that a kept token takes, in its stored form."""
        if self.codecs is None:
            return self.table.arena.block_bytes / self.table.arena.block_size
        specs = self.table.arena.specs
        return self.codecs.token_bytes(specs[0].num_heads, [Shape(1, spec.dim, spec.dtype) for spec in specs])

    @property
    def marginal_bits(self) -> float:
        if self.codecs is None:
            return super().marginal_bits
        slot_bytes = 4 * self.table.arena.specs[0].num_heads
        return 8 * (self.token_bytes + slot_bytes) / self.values_per_token

    @property
    def stored_length(self) -> float:
        """Tokens a head of a row held now, on average."""
        return self.kept.length + super().stored_length if self.kept else super().stored_length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.first_slots = FirstSlots(key_states.shape[0], self.device)

    def fill(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        states = self._prepare(key_states, value_states)
        self.seen += key_states.shape[2]
        self.first_slots.note(None, self.seen)
        self.table.append(states)

    def _attend(self, base, module, query, tail, mask, args: tuple, kwargs: dict):
        self.read_bytes = sum(state.nbytes for state in tail)
        own = None if mask is None else mask[..., self.seen - tail[0].shape[2] : self.seen]
        is_mergeable = can_merge(base, kwargs)
        if not self.kept:
            if query.shape[2] == 1 and is_mergeable:
                return attend_packed(query, *tail, own, self.scaling), None
            return base(module, query, *tail, own, *args, **kwargs)
        self.read_bytes += self.kept.nbytes
        if not is_mergeable or query.shape[2] >= _MANY_QUERIES:
            states, joined = join_kept(self.name, module, query, self.kept.padded(), self.kept.log_mass(), tail, mask)
            return base(module, query, *states, joined, *args, **kwargs)
        if query.shape[2] == 1 and kept_kernel.can_serve(query, self.kept, self.table):
            return kept_kernel.attend(query, mask, self.scaling, self.kept, self.table), None
        attended = self.kept.attend(query, mask, self.scaling)
        return attend_merged(query, [[Piece(*tail, own)]], self.scaling, attended), None

    def held(self, tail: Sequence[torch.Tensor] | None = None) -> Held:
        """All tokens held: what is kept of older ones, then the newer ones. A copy if both are there."""
        parts = self.held_parts(tail)
        if len(parts) == 1:
            return parts[0]
        joined = (torch.cat(pair, dim=2) for pair in zip(*(part[:4] for part in parts), strict=True))
        log_mass = parts[0].log_mass
        if log_mass is not None:
            log_mass = nn.functional.pad(log_mass, (0, parts[1].slots.shape[-1]))
        return Held(*joined, *parts[0][4:7], log_mass)

    def held_parts(self, tail: Sequence[torch.Tensor] | None = None) -> list[Held]:
        """What is kept of older tokens, if anything is, and the newer ones: views where they can be."""
        tail = self.table.materialize() if tail is None else tail
        start = self.table.start if self.table.length else self.seen - tail[0].shape[2]
        slots = torch.arange(start, start + tail[0].shape[2], device=self.device).expand(*tail[0].shape[:2], -1)
        whole = (self.first_slot, start + tail[0].shape[2], self.scaling)
        parts = [Held(*tail, slots, slots, *whole)]
        if self.kept:
            keys, values, kept_slots = self.kept.padded()
            positions = kept_slots
            if self.rotary is not None:
                positions = packed_positions(kept_slots >= 0, start)
            parts.insert(0, Held(keys, values, kept_slots, positions, *whole, self.kept.log_mass()))
        return parts

    def slots(self) -> torch.Tensor:
        """Slots of all tokens held, as in `held`."""
        tail = torch.arange(self.table.start, self.table.stop, device=self.device)
        return torch.cat(
            [*self.kept.slots(), tail.expand(self.batch_size, self.table.arena.specs[0].num_heads, -1)], dim=2
        )

    # --- storing

    def keep(self, held: Held, keep: torch.Tensor, split: int) -> None:
        """Hold on to the columns of `held` that `keep` `[B, H, n]` says, and to all from `split` on, in blocks."""
        newer = [state[:, :, split:].clone() for state in held[:2]]
        begin = self.seen - newer[0].shape[2]
        older = held.columns(slice(split))
        keep = keep[..., :split]
        if self.rotary is not None:
            positions = packed_positions(keep, begin)
            distance = (positions - older.positions).flatten(0, 1)
            flat = self.rotary.turn(older.keys.flatten(0, 1).unsqueeze(1), distance)
            keys = flat.squeeze(1).unflatten(0, older.keys.shape[:2])
            older = older._replace(keys=keys, positions=positions)
        # Whole blocks from the first on: the decode kernel reads them whole, and may not find garbage there.
        gap = begin % self.table.arena.block_size
        self.table.restart(begin - gap)
        self.kept.replace(self.context.pool(self.device), older, keep, self.seen - self.residual_length)
        self.table.append([nn.functional.pad(state, (0, 0, gap, 0)) for state in newer])
        self.table.drop_front(begin)
        self._give_back_memory()

    def settle(self) -> None:
        """Encode newer tokens that have become older, many at a time."""
        if self.codecs is None or self.record_past:
            return
        size = self.codecs.group_length
        count = (self.table.length - self.residual_length) // size * size
        if count >= max(size, _SETTLES_AT_A_TIME):
            self._settle(count)

    def _settle(self, count: int) -> None:
        start = self.table.start
        newer = [state[:, :, :count] for state in self.table.materialize()]
        slots = torch.arange(start, start + count, device=self.device).expand(*newer[0].shape[:2], -1)
        held = Held(*newer, slots, slots, self.first_slot, self.seen, self.scaling)
        self.kept.add(self.context.pool(self.device), held)
        self.table.drop_front(start + count)
        self._give_back_memory()

    # --- contract

    def _states(self) -> Sequence[torch.Tensor]:
        return self.held()[:2]

    def can_crop(self, count: int) -> bool:
        held = 0 if self.table is None else self.table.length
        return count <= held

    def _take_back(self, count: int) -> None:
        super()._take_back(count)
        self.first_slots.take_back(self.seen)

    def select_rows(self, rows: np.ndarray) -> None:
        if self.table is not None:
            self.first_slots.select_rows(rows)
            self.kept.select_rows(self.context.pool(self.device), rows)
        super().select_rows(rows)

    def fork(self) -> "KeptLayer":
        forked = super().fork()
        forked.kept = self.kept.fork()
        forked.first_slots = None if self.first_slots is None else self.first_slots.fork()
        return forked

    def to(self, device: torch.device, pools: dict) -> None:
        super().to(device, pools)
        if self.table is not None:
            self.first_slots.to(device)
            self.kept.to(self.context.pool(device))

    def state(self) -> LayerState:
        state = super().state()
        if self.table is not None:
            state.put("kept", self.kept.state())
            state.put("first_slots", self.first_slots.state())
            state.tensors["scaling"] = torch.tensor(self.scaling, dtype=torch.float64)
        return state

    def load_state(self, state: LayerState, device: torch.device) -> None:
        super().load_state(state, device)
        if self.table is not None:
            self.kept.load_state(self.context.pool(device), self.table.materialize(), state.part("kept"))
            self.first_slots.load_state(state.part("first_slots"), device)
            self.scaling = state.tensors["scaling"].item()

    def reset(self) -> None:
        super().reset()
        self._clear()
