"""Which model a saved cache belongs to: everything that makes the keys and values of the same text differ.

That is the config, the dtype, and the weights. Weights are sampled (some 64 elements of each parameter), which tells
fine-tunes, adapters and other quantizations apart, and is done in milliseconds; an edit of a few single elements can go
unseen.
"""

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedModel

from .report import live_tensors

_SAMPLES = 64

# Fields of a config that no key or value depends on.
_IRRELEVANT = {
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def model_identity(model: PreTrainedModel) -> dict[str, Any]:
    """The identity of `model`, as JSON values."""
    config = json.loads(model.config.get_text_config(decoder=True).to_json_string(use_diff=False))
    relevant = {key: value for key, value in config.items() if key not in _IRRELEVANT and not key.startswith("_")}
    return {
        "name": model.config.name_or_path,
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": relevant,
        "weights": _sampled_weights(model),
    }


def check_identity(saved: dict[str, Any], model: PreTrainedModel) -> None:
    """Refuse `model` if it is not the one that `saved` is the identity of.

    Config fields that only one of the two transformers versions knows are not compared, nor is the name.

    Raises:
        ValueError: naming what differs.
    """
    given = model_identity(model)
    pairs = [("dtype", saved["dtype"], given["dtype"])]
    known = saved["config"].keys() & given["config"].keys()
    pairs += [(key, saved["config"][key], given["config"][key]) for key in sorted(known)]
    for key, old, new in pairs:
        if old != new:
            raise ValueError(
                f"the cache was saved with {key}={old!r} (model {saved['name']!r}) and the model given has "
                f"{key}={new!r}: load it with the model it was saved with."
            )
    if saved["weights"] != given["weights"]:
        raise ValueError(
            f"the cache was saved with other weights (model {saved['name']!r}) than the model given has, though their "
            "configs agree: load it with the same checkpoint, adapters and quantization."
        )


def _sampled_weights(model: PreTrainedModel) -> str:
    """SHA-256 of some elements of each parameter, whatever the device they are on."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in live_tensors(parameter):  # the inner ones, of parameters that wrap them
            if tensor.is_meta:
                continue
            flat = tensor.detach().flatten()
            sample = flat[:: max(1, len(flat) // _SAMPLES)].contiguous().view(torch.uint8).cpu()
            digest.update(sample.numpy())
    return digest.hexdigest()
