"""Peak memory of a piece of code, as the device or the operating system saw it."""

import gc
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_growth(run: Callable[[], object], device: torch.device) -> int | None:
    """Bytes by which memory rose at its highest while `run` ran, above what was held before.

    On CUDA from the allocator; on Linux CPUs from the process's resident set; None where neither can be read.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        before = _resident("VmRSS")
        _CLEAR.write_text("5")  # resets the high-water mark
    except OSError:
        return None
    run()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
