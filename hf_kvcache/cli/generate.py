"""`hf-kvcache generate`: text from a model with one of our caches, streamed as it comes.

With --compare, the same prompt and seed once more with transformers' default cache, after a short warm-up of both.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_kvcache.cli.loading import Device, Dtype, DtypeName, ModelName, load, parse_settings, read_prompt
from hf_kvcache.cli.output import AsJson, Threads, remark, set_threads, show, show_json
from hf_kvcache.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from hf_kvcache.cli.runs import Job, Run


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt, or - for stdin.")] = None,
    model: ModelName = DEFAULT_MODEL,
    cache: Annotated[str, typer.Option("--cache", help="Techniques, joined with +.")] = "blocks",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A cache option.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Run transformers' default cache beside it.")] = False,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="Read the prompt from a file.")] = None,
    chat: Annotated[bool | None, typer.Option("--chat/--no-chat", help="Use the chat template, if any.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float | None, typer.Option("--top-p", min=0, max=1, help="Sample from this much mass.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    dtype: DtypeName = Dtype.float32,
    device: Device = None,
    as_json: AsJson = False,
    threads: Threads = None,
) -> None:
    """Generate text with one of our caches."""
    text, options = read_prompt(prompt, prompt_file), parse_settings(settings or [])
    sampling = sampling_settings(temperature, top_p) | {"max_new_tokens": max_new_tokens}
    _refuse_unknown(cache, options)
    set_threads(threads)
    from hf_kvcache.cli.runs import Job, comparison_table

    loaded, tokenizer = load(model, dtype, device)
    inputs = encode(tokenizer, text, chat).to(loaded.device)
    job = Job(loaded, tokenizer, inputs, settings=sampling, seed=seed)
    runs = _run(job, cache, options, compare, _discard if as_json else _stream)
    if as_json:
        show_json({"model": model, "prompt_tokens": inputs["input_ids"].shape[1], **_as_dict(runs, cache, options)})
    elif compare:
        show(comparison_table(*runs))
    else:
        remark(_summary(runs[0]))


def sampling_settings(temperature: float, top_p: float | None) -> dict[str, Any]:
    """The arguments of `generate()` for these flags; whatever the model's own defaults are, they do not leak in."""
    if top_p is not None and not temperature:
        raise ValueError(f"--top-p {top_p} needs sampling: give --temperature as well, for instance 0.7.")
    if not temperature:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": 1.0 if top_p is None else top_p, "top_k": 0}


def encode(tokenizer: Any, text: str, chat: bool | None) -> Any:
    """Token ids and mask `[1, Tq]`, through the chat template if there is one (`chat` None) or it is asked for."""
    if chat and not tokenizer.chat_template:
        raise ValueError("--chat was given and this model has no chat template: leave it out or give --no-chat.")
    if chat or (chat is None and tokenizer.chat_template):
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    return tokenizer(text, return_tensors="pt")


def _refuse_unknown(cache: str, options: dict[str, Any]) -> None:
    """Say what is wrong with --cache and --set before anything slow happens."""
    from hf_kvcache import registry

    registry.resolve(cache, options)


def _run(job: "Job", cache: str, options: dict[str, Any], compare: bool, write: Callable[[str], None]) -> list["Run"]:
    import hf_kvcache
    from hf_kvcache.cli import runs

    def ours() -> Any:
        return hf_kvcache.make_cache(job.model, cache, **options)

    if compare:
        job.warm_up([ours(), runs.default_cache(job.model)])
    done = [job.run(ours(), cache, write)]
    write("\n")
    if compare:
        remark("generating again with the default cache ...")
        done.append(job.run(runs.default_cache(job.model), runs.DEFAULT_LABEL, _discard))
    return done


def _stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _discard(_: str) -> None:
    pass


def _as_dict(done: list["Run"], cache: str, options: dict[str, Any]) -> dict[str, Any]:
    from hf_kvcache.cli.runs import first_difference

    result = {"cache": cache, "options": options, **done[0].to_dict(), "report": done[0].cache.report().to_dict()}
    if len(done) > 1:
        result["default"] = done[1].to_dict()
        result["first_difference"] = first_difference(done[0].token_ids, done[1].token_ids)
    return result


def _summary(run: "Run") -> str:
    from hf_kvcache.report import format_bytes

    speed = "" if run.tokens_per_s is None else f" at {run.tokens_per_s:.1f} tokens/s"
    cache = f"cache {run.label} holds {format_bytes(run.cache_bytes)}"
    return f"{len(run.token_ids)} tokens{speed}, first after {run.ttft_s:.3f} s; {cache}"
