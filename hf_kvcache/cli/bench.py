"""`hf-kvcache bench`: what a cache costs in time and in fidelity, measured beside the default one in this process."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_kvcache.cli.loading import Device, Dtype, DtypeName, ModelName, load, parse_integers, parse_settings
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


@app.command("fidelity")
def fidelity(
    model: ModelName = DEFAULT_MODEL,
    caches: Annotated[
        str, typer.Option("--caches", help="Caches to measure, comma-separated; options as int4:q_group_size=32:...")
    ] = "int8,int4,int2",
    text_file: Annotated[
        Path | None, typer.Option("--text-file", help="Text to force (default: Python's own language topics).")
    ] = None,
    prefix: Annotated[int, typer.Option("--prefix", min=1, help="Tokens prefilled in one pass.")] = 1536,
    scored: Annotated[int, typer.Option("--scored", min=2, help="Tokens compared after the prefix.")] = 512,
    dtype: DtypeName = Dtype.float32,
    device: Device = None,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """KL divergence of each cache's next-token distributions from the full cache's, on forced text."""
    from hf_kvcache import registry

    chosen = [_parse_cache(text) for text in caches.split(",") if text.strip()]
    for name, options in chosen:
        registry.resolve(name, options)
    set_threads(threads)
    from hf_kvcache.bench.fidelity import bench_fidelity

    loaded, tokenizer = load(model, dtype, device)
    text = _default_text() if text_file is None else text_file.read_text(encoding="utf-8")
    ids = tokenizer(text[: 12 * (prefix + scored)], return_tensors="pt").input_ids
    result = bench_fidelity(loaded, ids, caches=chosen, prefix=prefix, scored=scored, progress=remark)
    if as_json:
        show_json(result.to_dict())
    else:
        show(result.table())


def _parse_cache(text: str) -> tuple[str, dict[str, Any]]:
    name, *settings = text.strip().split(":")
    return name, parse_settings(settings)


def _default_text() -> str:
    """English prose that every Python ships (PSF licence)."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in ("assignment", "class", "for", "numeric-types", "import", "try", "with"))
