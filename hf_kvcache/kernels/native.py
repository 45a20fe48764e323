"""The decode kernel as a library: compiled once for this machine, kept in the user's cache folder.

It needs a C++ compiler at run time (`$CXX`, else g++ or clang++), as torch.compile does, but no headers of torch or
Python: the interface is plain C. The file's name is a hash of the sources, the command, and all that the compiler says
about itself and this CPU, so that machines may share the folder. A process that finds another one compiling waits.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from filelock import FileLock

_FOLDER = Path(__file__).parent
_SOURCES = (
    *("choose.cpp", "clusters.cpp", "decode.cpp", "products.cpp"),
    *("bytes.h", "call.h", "estimates.h", "exact.h", "formats.h", "parts.h"),
    *("products.h", "queries.h", "select.h", "shares.h", "split.h", "vec.h"),
)
_COMPILERS = ("g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-fvisibility=hidden", "-shared", "-w")
_TIMEOUT = 600  # seconds


class CannotCompileError(RuntimeError):
    """There is no working C++ compiler here; the message is its reason."""


def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where this machine cannot compile it. Compiles at its first call (some seconds)."""
    return _library()[0]


@functools.cache
def warn_of_no_library() -> None:
    """Say why there is no library, once in a process."""
    warnings.warn(
        f"hf_kvcache cannot compile its decode kernel here ({_library()[1]}): quantized caches decode more slowly. "
        "Install a C++ compiler to mend it.",
        stacklevel=2,
    )


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    try:
        return ctypes.CDLL(str(_built())), ""
    except (CannotCompileError, OSError) as error:
        return None, str(error).strip().splitlines()[0]


def _built() -> Path:
    compiler = _compiler()
    arguments = [*_FLAGS, *(str(_FOLDER / name) for name in _SOURCES if name.endswith(".cpp"))]
    # The macros tell the compiler's version and each instruction set that "native" stands for on this CPU.
    digest = hashlib.sha256(_run([*compiler, "-dM", "-E", "-x", "c++", os.devnull]))
    digest.update(" ".join([*compiler, *arguments, *_openmp()]).encode())
    for name in _SOURCES:
        digest.update((_FOLDER / name).read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_kvcache" / "kernels"
    path = folder / f"decode-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                _compile([*compiler, *arguments], path)
    return path


def _compiler() -> list[str]:
    if chosen := os.environ.get("CXX"):
        found = shlex.split(chosen)
    elif not (found := [path for name in _COMPILERS if (path := shutil.which(name))][:1]):
        raise CannotCompileError(f"none of {', '.join(_COMPILERS)} is installed and CXX is not set")
    return [*found, "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"]


def _openmp() -> list[str]:
    """The OpenMP that torch has loaded comes before the compiler's own, so that both use one pool of threads.

    Clang's calls are those of another OpenMP: where that is missing it must be noticed when linking, not when loading.
    """
    loaded = sorted(str(path) for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return ["-fopenmp", *loaded, "-Wl,--as-needed,-z,defs"] if loaded else ["-fopenmp"]


def _compile(command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        try:
            _run([*command, *_openmp(), "-o", str(output)])
        except CannotCompileError:
            _run([*command, "-o", str(output)])  # a compiler without OpenMP: one thread
        os.replace(output, path)  # whole or not at all


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompileError(str(error)) from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        first = next((line for line in lines if "error" in line), f"exit status {done.returncode}")
        raise CannotCompileError(f"{command[0]}: {first}")
    return done.stdout
