"""`hf-kvcache bench`: what a cache costs in time, measured beside the default one in this process."""

from typing import Annotated

import typer

from hf_kvcache.cli.loading import Device, Dtype, DtypeName, ModelName, load, parse_integers
from hf_kvcache.cli.output import AsJson, Threads, remark, set_threads, show, show_json
from hf_kvcache.models import DEFAULT_MODEL

_BASELINES = ("dynamic", "static")  # transformers' own, measured beside ours

app = typer.Typer(no_args_is_help=True, help="Measure caches side by side.")


@app.callback()
def options() -> None:
    """Measure caches side by side."""


@app.command("decode")
def decode(
    model: ModelName = DEFAULT_MODEL,
    contexts: Annotated[
        str, typer.Option("--contexts", help="Tokens in the cache, comma-separated.")
    ] = "1024,4096,8192",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Decode steps a cache and context.")] = 32,
    caches: Annotated[str, typer.Option("--caches", help="Caches to measure, comma-separated.")] = "blocks,static",
    dtype: DtypeName = Dtype.float32,
    device: Device = None,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Time a decode step of each cache, as a ratio to the default cache."""
    lengths = parse_integers(contexts, "--contexts")
    names = [name.strip() for name in caches.split(",") if name.strip()]
    if not names:
        raise ValueError("--caches is empty: name at least one, like --caches blocks,static.")
    set_threads(threads)
    from hf_kvcache import registry
    from hf_kvcache.bench.decode import bench_decode

    for name in names:
        if name not in _BASELINES:
            registry.resolve(name, {})
    loaded, _ = load(model, dtype, device)
    result = bench_decode(loaded, contexts=lengths, steps=steps, caches=names, progress=remark)
    if as_json:
        show_json(result.to_dict())
    else:
        show(result.table())
