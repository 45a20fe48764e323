"""What a cache holds, measured from the tensors that are alive: each storage counted once, nothing from a formula."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

_ATOMS = (str, bytes, int, float, bool, complex, type(None), type, torch.dtype, torch.device, nn.Module)


def live_tensors(root: Any) -> Iterator[torch.Tensor]:
    """Every tensor reachable from `root` by attributes, containers and tensor subclasses; models are not entered."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if isinstance(item, _ATOMS) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if hasattr(item, "__tensor_flatten__"):
                stack.extend(getattr(item, name) for name in item.__tensor_flatten__()[0])
            else:
                yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        else:
            stack.extend(getattr(item, "__dict__", {}).values())
            names = (name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ()))
            stack.extend(getattr(item, name, None) for name in names)


def bytes_by_device(root: Any) -> dict[torch.device, int]:
    """Bytes of the live tensor storages reachable from `root`, each counted once."""
    storages = {}
    for tensor in live_tensors(root):
        storage = tensor.untyped_storage()
        storages[(tensor.device, storage.data_ptr() or id(storage))] = storage.nbytes()
    totals: dict[torch.device, int] = {}
    for (device, _), size in storages.items():
        totals[device] = totals.get(device, 0) + size
    return totals


def measure(root: Any) -> int:
    """Bytes of every live tensor storage reachable from any cache object, each once."""
    return sum(bytes_by_device(root).values())


@dataclass(frozen=True)
class MemoryReport:
    """Memory and reads of a cache. All sizes in bytes, measured; `dynamic_bytes` is what DynamicCache would store.

    `bits_per_value` is all that is stored, over the key and value elements of the tokens kept, and
    `marginal_bits_per_value` what one more old token will cost in the layers that grow with it: scales and every other
    overhead included.
    """

    technique: str
    num_layers: int
    batch_size: int
    tokens_seen: int
    tokens_kept: float
    stored_bytes: int
    reserved_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    shared_bytes: int
    read_bytes: int
    dynamic_bytes: int
    bits_per_value: float
    marginal_bits_per_value: float

    @property
    def waste_bytes(self) -> int:
        """Reserved, and not used by any token."""
        return self.reserved_bytes - self.stored_bytes

    @property
    def compression_ratio(self) -> float:
        """What DynamicCache would hold, divided by what is held here: room to grow counts too."""
        return self.dynamic_bytes / self.reserved_bytes if self.reserved_bytes else 1.0

    @property
    def read_ratio(self) -> float:
        """What the last step read, summaries included, divided by what is stored."""
        return self.read_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        names = ("waste_bytes", "compression_ratio", "read_ratio")
        derived = {name: getattr(self, name) for name in names}
        return asdict(self) | derived

    def table(self) -> Table:
        """A rich table, one line a figure."""
        table = Table(title=f"KV cache: {self.technique}", show_header=False)
        kept = f"{self.tokens_kept:,.1f}".removesuffix(".0")
        table.add_row("sequences x tokens seen", f"{self.batch_size} x {self.tokens_seen:,}")
        table.add_row("tokens kept a sequence (mean of attention layers)", kept)
        read = f"read by the last step ({self.read_ratio:.0%} of stored)"
        for label, size in (
            ("stored", self.stored_bytes),
            ("reserved", self.reserved_bytes),
            ("waste (reserved - stored)", self.waste_bytes),
            ("on the model's device", self.device_bytes),
            ("on the host", self.host_bytes),
            ("on disk", self.disk_bytes),
            ("saved by sharing blocks", self.shared_bytes),
            (read, self.read_bytes),
            ("DynamicCache would store", self.dynamic_bytes),
        ):
            table.add_row(label, format_bytes(size))
        bits = f"{self.bits_per_value:.2f} / {self.marginal_bits_per_value:.2f}"
        table.add_row("bits a value: all stored / one more old token", bits)
        table.add_row("compression ratio", f"{self.compression_ratio:.2f}x")
        return table

    def __str__(self) -> str:
        console = Console(width=90, color_system=None, force_terminal=False, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def format_bytes(size: int) -> str:
    """`12.3 MB`, in powers of 1000."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def build_report(cache: Any) -> MemoryReport:
    """Measure `cache`, a `KVCache`."""
    attention = [layer for layer in cache.layers if hasattr(layer, "stored_length")]
    tables = [table for layer in attention for table in _attention_part(layer).tables]
    arenas = {id(table.arena): table.arena for table in tables}.values()
    by_device = bytes_by_device(cache)
    reserved = sum(by_device.values())
    stored = reserved - sum(_unused_bytes(arena) for arena in arenas)
    parts = [part for layer in attention if (part := _attention_part(layer)).table is not None]
    width = {id(part): part.table.num_rows * part.values_per_token for part in parts}
    num_values = sum(_attention_part(layer).num_values for layer in attention)
    growing = [part for part in parts if part.grows]
    marginal = sum(width[id(part)] * part.marginal_bits for part in growing)
    homes = {table.arena.pool.device for table in tables} or set(by_device)
    on_device = sum(size for device, size in by_device.items() if device in homes)
    return MemoryReport(
        technique=cache.recipe.name,
        num_layers=len(cache.layers),
        batch_size=max(cache.batch_size, 0),
        tokens_seen=cache.num_tokens_seen,
        tokens_kept=sum(layer.stored_length for layer in attention) / max(len(attention), 1),
        stored_bytes=stored,
        reserved_bytes=reserved,
        device_bytes=on_device,
        host_bytes=sum(size for device, size in by_device.items() if device not in homes and device.type == "cpu"),
        disk_bytes=0,
        shared_bytes=sum(_shared_bytes(table) for table in tables),
        read_bytes=sum(getattr(layer, "read_bytes", 0) for layer in cache.layers),
        dynamic_bytes=sum(_dynamic_bytes(layer) for layer in cache.layers),
        bits_per_value=8 * stored / num_values if num_values else 0.0,
        marginal_bits_per_value=marginal / sum(width[id(part)] for part in growing) if growing else 0.0,
    )


def _attention_part(layer: Any) -> Any:
    return getattr(layer, "attention", layer)


def _unused_bytes(arena: Any) -> int:
    """Bytes of `arena` that no token of its tables lies in: free blocks, and the open ends of used ones."""
    slots = {}
    for table in arena.tables:
        for row in table.block_ids:
            for column, block in enumerate(row.tolist()):
                begin = (table.first_column + column) * arena.block_size
                length = min(begin + arena.block_size, table.stop) - max(begin, table.start)
                slots[block] = max(slots.get(block, 0), length)
    return arena.reserved_bytes - sum(slots.values()) * (arena.block_bytes // arena.block_size)


def _shared_bytes(table: Any) -> int:
    """Bytes that the sequences of this table would need more, had they no blocks in common with any other."""
    arena = table.arena
    saved = 1 - 1 / arena.ref_count[table.block_ids] if table.block_ids.size else table.block_ids
    return round(float(saved.sum()) * arena.block_bytes)


def _dynamic_bytes(layer: Any) -> int:
    """What transformers' DynamicCache would hold for the tokens that this layer has seen."""
    states = 0
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states = measure((layer.conv_states, layer.recurrent_states))
    return states + getattr(_attention_part(layer), "dynamic_bytes", 0)
