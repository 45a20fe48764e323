"""Safetensors files written and read one tensor at a time, whole or not at all, each tensor with its SHA-256.

Any safetensors reader opens them. The last tensor, `sha256`, has one digest for the header and one for each tensor
before it. A file appears under its name when it is complete.
Format: https://github.com/huggingface/safetensors#format.
"""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DIGESTS = "sha256"
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(
    path: str | os.PathLike, metadata: dict[str, str], specs: dict[str, TensorSpec], tensors: Iterable[torch.Tensor]
) -> None:
    """Write `tensors`, taken one at a time in the order of `specs`, which come first because the header does."""
    header = _header(metadata, specs | {_DIGESTS: TensorSpec((1 + len(specs), _DIGEST_BYTES), torch.uint8)})
    with _open_whole(path) as file:
        digests = [_digest(header)]
        file.write(len(header).to_bytes(8, "little") + header)
        for (name, spec), tensor in zip(specs.items(), tensors, strict=True):
            assert spec == TensorSpec.of(tensor), f"{name} changed while it was written"
            data = memoryview(tensor.detach().contiguous().reshape(-1, 1).view(torch.uint8).cpu().numpy())
            digests.append(_digest(data))
            file.write(data)
        file.write(b"".join(digests))


def _header(metadata: dict[str, str], specs: dict[str, TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (shape, dtype) in specs.items():
        end = offset + specs[name].nbytes
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    return text.ljust(-(-len(text) // 8) * 8)


@contextlib.contextmanager
def _open_whole(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when all has gone well, and leaves no trace otherwise."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


class TensorFile:
    """A file of `write_tensors`, open for reading. `metadata` and `specs` are known at once, tensors are read by name.

    Raises:
        ValueError: if it is no such file, is cut off, or has been changed; by `read` for the tensor that was.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._file = self.path.open("rb")
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_header(self) -> None:
        length = int.from_bytes(self._file.read(8), "little")
        header = self._file.read(length) if length <= _MAX_HEADER_BYTES else b""
        try:
            entries = json.loads(header)
            self.metadata = entries.pop("__metadata__")
            self._offsets = {name: entry["data_offsets"][0] for name, entry in entries.items()}
            self.specs = {name: TensorSpec(tuple(e["shape"]), _DTYPES[e["dtype"]]) for name, e in entries.items()}
            digests_spec = self.specs.pop(_DIGESTS)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is not a file that hf_kvcache saved, or it is damaged ({error}).") from error
        self._begin = 8 + length
        expected = self._begin + self._offsets[_DIGESTS] + digests_spec.nbytes
        size = os.fstat(self._file.fileno()).st_size
        if size != expected:
            raise ValueError(f"{self.path} is damaged: it has {size} bytes of {expected}. Save it again.")
        table = self._read(_DIGESTS, digests_spec).view(-1, _DIGEST_BYTES)
        self._digests = {name: bytes(row.tolist()) for name, row in zip(("", *self.specs), table, strict=True)}
        self._check("", header)

    def _check(self, name: str, data: bytes | memoryview) -> None:
        if _digest(data) != self._digests[name]:
            what = f"tensor {name!r}" if name else "its header"
            raise ValueError(f"{self.path} is damaged: {what} has changed since it was saved. Save it again.")

    def _read(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """The bytes of a tensor."""
        data = torch.empty(spec.nbytes, dtype=torch.uint8)
        self._file.seek(self._begin + self._offsets[name])
        if self._file.readinto(memoryview(data.numpy())) != spec.nbytes:
            raise ValueError(f"{self.path} is damaged: it ends within tensor {name!r}. Save it again.")
        return data

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the file, on the CPU, with memory of its own."""
        spec = self.specs[name]
        data = self._read(name, spec)
        self._check(name, memoryview(data.numpy()))
        return data.view(spec.dtype).view(spec.shape)


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()
