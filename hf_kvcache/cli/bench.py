"""`hf-kvcache bench`: what a cache costs in time and in fidelity, measured beside the default one in this process."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_kvcache.bench.texts import python_topics, read_texts
from hf_kvcache.cli.loading import Device, Dtype, DtypeName, ModelName, load, parse_integers, parse_settings
from hf_kvcache.cli.output import AsJson, Threads, remark, set_threads, show, show_json
from hf_kvcache.models import DEFAULT_MODEL

_TextFile = Annotated[
    Path | None, typer.Option("--text-file", help="Text, or a folder of texts (default: Python's own language topics).")
]
_Caches = Annotated[
    str, typer.Option("--caches", help="Caches to measure, comma-separated; options as int4:q_group_size=32:...")
]
_CachesAndPeers = Annotated[
    str,
    typer.Option(
        "--caches",
        help="Caches to measure, comma-separated; options as int4:q_group_size=32:...; static and quantized too.",
    ),
]
_FIDELITY_TOPICS = ("assignment", "class", "for", "numeric-types", "import", "try", "with")

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
    caches: _CachesAndPeers = "blocks,static",
    dtype: DtypeName = Dtype.float32,
    device: Device = None,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Time a decode step of each cache, as a ratio to the default cache."""
    lengths = parse_integers(contexts, "--contexts")
    chosen = _parse_caches_and_peers(caches)
    set_threads(threads)
    from hf_kvcache.bench.decode import bench_decode

    loaded, _ = load(model, dtype, device)
    result = bench_decode(loaded, contexts=lengths, steps=steps, caches=chosen, progress=remark)
    _publish(result, as_json)


@app.command("attention")
def attention(
    model: ModelName = DEFAULT_MODEL,
    contexts: Annotated[str, typer.Option("--contexts", help="Tokens in the layer, comma-separated.")] = "32768",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps a cache and context.")] = 60,
    caches: Annotated[
        str, typer.Option("--caches", help="Caches to measure, comma-separated; options as quest:budget=512:...")
    ] = "index,quest,page_mean",
    dtype: DtypeName = Dtype.float32,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Time the attention of one step in one layer on a CPU, as a ratio to reading everything (`blocks`)."""
    lengths, chosen = parse_integers(contexts, "--contexts"), _parse_caches(caches)
    set_threads(threads)
    from hf_kvcache.bench.attention import bench_attention

    loaded, _ = load(model, dtype, "cpu")
    result = bench_attention(loaded, contexts=lengths, steps=steps, caches=chosen, progress=remark)
    if as_json:
        show_json(result.to_dict())
    else:
        show(result.table())


@app.command("fidelity")
def fidelity(
    model: ModelName = DEFAULT_MODEL,
    caches: _Caches = "int8,int4,int2",
    text_file: _TextFile = None,
    prefix: Annotated[int, typer.Option("--prefix", min=1, help="Tokens prefilled in one pass.")] = 1536,
    scored: Annotated[int, typer.Option("--scored", min=2, help="Tokens compared after the prefix.")] = 512,
    dtype: DtypeName = Dtype.float32,
    device: Device = None,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """KL divergence of each cache's next-token distributions from the full cache's, on forced text."""
    chosen = _parse_caches(caches)
    set_threads(threads)
    from hf_kvcache.bench.fidelity import bench_fidelity

    text = python_topics(_FIDELITY_TOPICS) if text_file is None else read_texts(text_file)
    loaded, tokenizer = load(model, dtype, device)
    ids = tokenizer(text[: 12 * (prefix + scored)], return_tensors="pt").input_ids
    result = bench_fidelity(loaded, ids, caches=chosen, prefix=prefix, scored=scored, progress=remark)
    _publish(result, as_json)


@app.command("growth")
def growth(
    model: ModelName = DEFAULT_MODEL,
    caches: _CachesAndPeers = "dynamic,h2o:budget=512:when=both",
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of the prompt.")] = 1024,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=16, help="Tokens written after it.")] = 4096,
    text_file: _TextFile = None,
    dtype: DtypeName = Dtype.float32,
    device: Device = None,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Bytes that each cache holds while the model writes a long text."""
    chosen = _parse_caches_and_peers(caches)
    set_threads(threads)
    from hf_kvcache.bench.growth import bench_growth

    text = python_topics() if text_file is None else read_texts(text_file)
    loaded, tokenizer = load(model, dtype, device)
    ids = tokenizer(text[: 12 * prompt], return_tensors="pt").input_ids[:, :prompt]
    if ids.shape[1] < prompt:
        raise ValueError(f"the text has {ids.shape[1]:,} tokens and --prompt is {prompt:,}: give a longer text.")
    result = bench_growth(loaded, ids, caches=chosen, new_tokens=new_tokens, progress=remark)
    _publish(result, as_json)


@app.command("recall")
def recall(
    model: ModelName = DEFAULT_MODEL,
    caches: _Caches = "int4,int2",
    tasks: Annotated[
        str, typer.Option("--tasks", help="mk_needle, sent_recall, copy_ids, comma-separated.")
    ] = "mk_needle",
    protocols: Annotated[
        str,
        typer.Option(
            "--protocols",
            help="unseen: the cache is filled before a question is known. seen: context and question are one prompt.",
        ),
    ] = "unseen",
    contexts: Annotated[int, typer.Option("--contexts", min=1, help="Contexts a task.")] = 8,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens a context, at most.")] = 1600,
    questions: Annotated[int, typer.Option("--questions", min=1, help="Questions a context.")] = 4,
    seed: Annotated[int, typer.Option("--seed", help="Of the samples.")] = 0,
    text_file: _TextFile = None,
    dtype: DtypeName = Dtype.float32,
    device: Device = None,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """What each cache can still look up in a context: answers of which perplexity shows nothing."""
    chosen = _parse_caches(caches)
    asked = [[name.strip() for name in names.split(",") if name.strip()] for names in (tasks, protocols)]
    set_threads(threads)
    from hf_kvcache.bench.recall import bench_recall, check_choices

    check_choices(*asked)
    text = python_topics() if text_file is None else read_texts(text_file)
    loaded, tokenizer = load(model, dtype, device)
    result = bench_recall(
        loaded,
        tokenizer,
        text,
        caches=chosen,
        tasks=asked[0],
        protocols=asked[1],
        contexts=contexts,
        length=length,
        questions=questions,
        seed=seed,
        progress=remark,
    )
    _publish(result, as_json)


def _publish(result: Any, as_json: bool) -> None:
    if as_json:
        show_json(result.to_dict())
    else:
        show(result.table())


def _parse_caches_and_peers(text: str) -> list[tuple[str, dict[str, Any]]]:
    from hf_kvcache.bench.peers import PEERS, check_peer

    chosen = _parse_caches(text, peers=PEERS)
    if not chosen:
        raise ValueError("--caches is empty: name at least one, like --caches blocks,static.")
    for name, _ in chosen:
        check_peer(name)
    return chosen


def _parse_caches(text: str, peers: tuple[str, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Names and options, checked; `peers` are names of transformers' caches that are taken as they are."""
    from hf_kvcache import registry

    chosen = []
    for part in filter(None, map(str.strip, text.split(","))):
        name, *settings = part.split(":")
        options = parse_settings(settings)
        if name not in peers:
            registry.resolve(name, options)
        chosen.append((name, options))
    return chosen
