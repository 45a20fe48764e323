"""What every command shares: the `--json` and `--threads` options, and where text goes.

Results go to stdout, as a table or as JSON and nothing else; progress and remarks go to stderr.
"""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

WIDE = 140  # columns when the output is a file or a pipe, so that tables are not folded

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads for torch. [default: torch's own]")]


def set_threads(threads: int | None) -> None:
    """Tell torch how many CPU threads to use; None leaves its own choice, and torch unimported."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def show(result: RenderableType) -> None:
    """Write a table or text to stdout."""
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    console.print(result)


def show_json(result: Any) -> None:
    """Write JSON to stdout; numbers JSON has no word for (infinity) are refused rather than written wrong."""
    typer.echo(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))


def remark(text: str) -> None:
    """Write a line about the run to stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(text, style="dim"))


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
