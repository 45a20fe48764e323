"""torch.compile with a way out: one warning, once, if this machine cannot compile."""

import functools
import types
import warnings
from collections.abc import Callable

import torch

_is_broken = False


class CannotCompileError(RuntimeError):
    """This machine cannot compile: the caller takes its path without compiled kernels."""


def is_usable() -> bool:
    """Whether no compilation has failed in this process so far."""
    return not _is_broken


def compiled(function: Callable, variant: str) -> Callable:
    """Compile `function` at its first call.

    Functions made from one piece of source need a `variant` name each: the compiler's limit on recompilations counts
    for each piece of code.

    Raises:
        CannotCompileError: by the compiled function, at its first call, where there is no working compiler.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{variant}")
    named = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    # Whole or not at all: a kernel that falls apart into pieces is slower than none.
    fast = torch.compile(named, dynamic=True, fullgraph=True)

    @functools.wraps(function)
    def run(*args):
        global _is_broken
        try:
            return fast(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            _is_broken = True
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"hf_kvcache cannot compile its decode kernels here ({reason}): quantized caches decode more slowly. "
                "Install a C++ compiler to mend it.",
                stacklevel=2,
            )
            raise CannotCompileError(reason) from error

    return run
