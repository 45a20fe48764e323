"""How models and caches are called in the results of all benchmarks."""

from typing import Any

from transformers import PreTrainedModel


def model_label(model: PreTrainedModel) -> str:
    """The last part of the folder or hub id the model came from, or its class if it came from none."""
    return getattr(model.config, "_name_or_path", "").rsplit("/", 1)[-1] or type(model).__name__


def cache_label(name: str, options: dict[str, Any]) -> str:
    """`int4 q_group_size=32`."""
    return name + "".join(f" {key}={value}" for key, value in options.items())
