"""The command tree, and the one place where an error becomes one red line.

Exit codes: 0 done, 1 it could not be done (file, network, memory), 2 the command line was wrong.
"""

import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

import hf_kvcache
from hf_kvcache.cli import bench, generate, models, techniques


class ErrorLineGroup(TyperGroup):
    """Commands whose `ValueError`, `OSError`, `RuntimeError` and `ImportError` end as one line on stderr."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            if ctx.params.get("traceback"):
                raise
            line = " ".join(str(error).split()) or type(error).__name__
            Console(stderr=True, soft_wrap=True).print(Text(f"error: {line}", style="red"))
            raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error


app = typer.Typer(
    name="hf-kvcache",
    cls=ErrorLineGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Spend less on the KV cache of Hugging Face transformers models.",
)
app.command("techniques")(techniques.techniques)
app.add_typer(models.app, name="models")
app.command("generate")(generate.generate)
app.add_typer(bench.app, name="bench")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(hf_kvcache.__version__)
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[
        bool, typer.Option("--traceback", envvar="HF_KVCACHE_TRACEBACK", help="Show where an error comes from.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """Run the command line of this process."""
    app(prog_name="hf-kvcache" if "__main__" not in os.path.basename(sys.argv[0]) else "python -m hf_kvcache")
