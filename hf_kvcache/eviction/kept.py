"""What a layer keeps of its older tokens: up to three stores, of sinks, encoded tokens, and the newest exact ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..blocks import BlockPool
from ..codecs.by_head import HeadCodecs
from ..codecs.exact import ExactCodec
from ..layers.layer_state import LayerState
from ..policies.base import Held
from .kept_attention import attend_kept
from .kept_tokens import KeptTokens

_STORES = ("sinks", "older", "newest")  # in the order of their slots
_EXACT = HeadCodecs(ExactCodec(), ExactCodec())


class Kept:
    """Stores of kept tokens, and which of their rows each sequence reads: sequences share what they have in common.

    Args:
        codecs: of each head's older tokens; None for none, and then there is one store.
        num_sink_tokens: first real tokens of each row that are not encoded.
    """

    def __init__(self, codecs: HeadCodecs | None, num_sink_tokens: int):
        self.codecs = codecs
        self.num_sink_tokens = num_sink_tokens
        self._hold({}, np.zeros(0, dtype=np.int64))

    def _hold(self, stores: dict[str, KeptTokens], rows: np.ndarray) -> None:
        """Read row `rows[i]` of `stores` for sequence `i`: all that is said of them once is said here."""
        self.stores, self.rows = stores, rows
        self.length = sum(float(store.counts[rows].mean()) for store in stores.values())  # tokens a head of a row
        self.nbytes = sum(store.nbytes for store in stores.values())
        # What the decode kernel was told of them, with pointers into their memory.
        self.prepared: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"prepared": None}

    def __bool__(self) -> bool:
        return bool(self.stores)

    # --- reading

    def padded(self) -> list[torch.Tensor]:
        """Keys, values and slots of all tokens, as `KeptTokens.padded`; a view if it is one store and even."""
        parts = [(*store.padded(self.rows), store.padded_slots(self.rows).long()) for store in self.stores.values()]
        return list(parts[0]) if len(parts) == 1 else [torch.cat(part, dim=2) for part in zip(*parts, strict=True)]

    def log_mass(self) -> torch.Tensor | None:
        """Added to the scores of all tokens, `[B, H, w]` as `padded`; None if nothing was merged."""
        stores = self.stores.values()
        if all(store.log_mass is None for store in stores):
            return None
        return torch.cat([store.padded_log_mass(self.rows) for store in stores], dim=2)

    def slots(self) -> list[torch.Tensor]:
        """Slots `[B, H, w]` of each store, -1 for none."""
        return [store.padded_slots(self.rows).long() for store in self.stores.values()]

    def attend(
        self, query: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Output and log-sum-exp of each store, as `attend_kept`."""
        return [attend_kept(store, query, mask, scale, self.rows) for store in self.stores.values()]

    # --- changing

    def replace(self, pool: BlockPool, held: Held, keep: torch.Tensor, first_newest: int) -> None:
        """Hold on to `keep` `[B, H, n]` of `held` instead of what was kept; slots from `first_newest` stay exact."""
        self._hold(self._encode(pool, held, keep, first_newest), np.arange(len(held.slots)))

    def add(self, pool: BlockPool, newer: Held) -> None:
        """Hold on to the tokens of `newer` too, encoded, and encode the newest ones of before."""
        if not np.array_equal(self.rows, np.arange(len(self.rows))):
            self._take(pool, self.rows, np.arange(len(self.rows)))
        if (newest := self.stores.get("newest")) is not None:
            before = (*newest.padded(self.rows), newest.padded_slots(self.rows).long())
            keys, values, slots = (torch.cat(pair, dim=2) for pair in zip(before, newer[:3], strict=True))
            log_mass = None
            if newest.log_mass is not None:
                log_mass = nn.functional.pad(newest.padded_log_mass(self.rows), (0, newer.slots.shape[-1]))
            positions = slots
            if self.codecs.is_packed:
                packed = packed_positions(before[2] >= 0, newer.positions[..., :1])
                positions = torch.cat([packed, newer.positions], dim=2)
            newer = newer._replace(keys=keys, values=values, slots=slots, positions=positions, log_mass=log_mass)
        joined = {name: store for name, store in self.stores.items() if name != "newest"}
        for name, store in self._encode(pool, newer, newer.is_held, newer.seen).items():
            joined[name] = joined[name].join(pool, store) if name in joined else store
        self._hold({name: joined[name] for name in _STORES if name in joined}, np.arange(len(newer.slots)))

    def _encode(self, pool: BlockPool, held: Held, keep: torch.Tensor, first_newest: int) -> dict[str, KeptTokens]:
        if self.codecs is None:
            parts = {"older": (_EXACT, keep)}
        else:
            sinks = held.are_sinks(self.num_sink_tokens)
            newest = (held.slots >= first_newest) & ~sinks
            parts = {
                "sinks": (_EXACT, keep & sinks),
                "older": (self.codecs, keep & ~sinks & ~newest),
                "newest": (_EXACT, keep & newest),
            }
        stores = {name: _store(pool, codecs, held, part) for name, (codecs, part) in parts.items()}
        return {name: store for name, store in stores.items() if store is not None}

    def select_rows(self, pool: BlockPool, rows: np.ndarray) -> None:
        """Row `i` becomes what row `rows[i]` was; rows that none reads go when they are at least half."""
        if not self.stores:
            return
        self._hold(self.stores, self.rows[rows])
        used, renumbered = np.unique(self.rows, return_inverse=True)
        if 2 * len(used) <= next(iter(self.stores.values())).num_rows:
            self._take(pool, used, renumbered)

    def _take(self, pool: BlockPool, taken: np.ndarray, rows: np.ndarray) -> None:
        """Keep only the rows `taken` of the stores; `rows` of them are read from now on."""
        stores = {name: store.take(pool, taken) for name, store in self.stores.items()}
        # The rows that are left may have nothing in a store that others needed.
        self._hold({name: store for name, store in stores.items() if len(store.groups)}, rows)

    def fork(self) -> "Kept":
        """The same stores, which never change."""
        forked = Kept(self.codecs, self.num_sink_tokens)
        forked._hold(self.stores, self.rows)
        return forked

    def state(self) -> LayerState:
        """Every store, and which of its rows each sequence reads."""
        state = LayerState({"rows": torch.tensor(self.rows, dtype=torch.int64)})
        for name, store in self.stores.items():
            state.put(name, store.state())
        return state

    def load_state(self, pool: BlockPool, like: Sequence[torch.Tensor], state: LayerState) -> None:
        """Become what gave `state`; `like` are any keys and values of the layer, for their shapes."""
        stores = {}
        for name in _STORES:
            if (part := state.part(name)).tensors:
                codecs = self.codecs if self.codecs is not None and name == "older" else _EXACT
                stores[name] = KeptTokens.from_state(pool, codecs, like, part)
        self._hold(stores, state.tensors["rows"].numpy())

    def to(self, pool: BlockPool) -> None:
        self._hold({name: store.to(pool) for name, store in self.stores.items()}, self.rows)


def _store(pool: BlockPool, codecs: HeadCodecs, held: Held, keep: torch.Tensor) -> KeptTokens | None:
    source = move_to_front(keep, codecs.group_length)
    if not source.shape[-1]:
        return None
    # A group that is not full is filled up with its last token, which widens no range of values.
    index = torch.where(source >= 0, source, source.amax(dim=-1, keepdim=True)).clamp(min=0)
    states = [s.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, s.shape[-1])) for s in held[:2]]
    slots = held.slots.gather(2, index).masked_fill(source < 0, -1)
    # Of a row that has had only padding so far, nothing is stored.
    positions = (held.positions - held.first_slot[:, None, None]).clamp(min=0).gather(2, index)
    log_mass = None if held.log_mass is None else held.log_mass.gather(2, index)
    return KeptTokens(pool, codecs, states, slots, positions, log_mass)


def packed_positions(is_kept: torch.Tensor, begin: torch.Tensor | int) -> torch.Tensor:
    """Positions `[B, H, n]` of the tokens that are kept, one after the other and the last right before `begin`."""
    places = is_kept.cumsum(dim=-1)
    return begin + places - 1 - places[..., -1:]


def move_to_front(keep: torch.Tensor, group_length: int) -> torch.Tensor:
    """Columns to keep, bool `[B, H, n]`, in order: int64 `[B, H, w]`, -1 behind the last; `w` fills whole groups."""
    counts = keep.sum(dim=-1, keepdim=True)
    most = int(counts.max()) if keep.shape[-1] else 0
    order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
    order = nn.functional.pad(order, (0, -most % group_length))
    return torch.where(torch.arange(order.shape[-1], device=keep.device) < counts, order, -1)
