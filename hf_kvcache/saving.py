"""Save a cache to a file and load it again: every layer's stored form as it is, and what it belongs to.

Encoded tokens stay encoded, blocks that rows share are written once, and generation goes on from a loaded cache with
the same bits. Files are safetensors: `layers.<index>.<name>` tensors, and under `hf_kvcache` in the metadata the format
version, the recipe, the model's identity, and each layer's kind and integers. A file holds no text and no token ids,
but keys and values give a text away: keep it as you would keep the text.
"""

import itertools
import json
import os
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from .layers.layer import KVLayer
from .layers.layer_state import LayerState
from .layers.states import StateLayer
from .model_identity import check_identity, model_identity
from .tensor_file import TensorFile, TensorSpec, write_tensors

if TYPE_CHECKING:
    from .cache import KVCache

# A change to what any stored byte or integer means, codecs included, is a new version.
FORMAT_VERSION = 4


def save_cache(cache: "KVCache", model: PreTrainedModel, path: str | os.PathLike) -> None:
    """Write `cache`, filled by `model`, to `path`, a layer at a time; see `KVCache.save`."""
    layers = _storing_layers(cache)
    # What encoded tokens are read with: on another machine another calibration might be found for the same model.
    calibration = cache.recipe.options.get("calibration")
    statistics = {} if calibration is None else calibration.tensors()
    header = {
        "version": FORMAT_VERSION,
        "technique": cache.recipe.name,
        "options": _plain_options(cache),
        "calibrated_on": None if calibration is None else calibration.num_tokens,
        "model": model_identity(model),
        "layers": {},
    }
    specs = {f"calibration.{name}": TensorSpec.of(tensor) for name, tensor in statistics.items()}
    # Asked twice, for the header comes first: holding all states would be a second copy of those that are no views.
    for index, layer in layers.items():
        _check_complete(layer)
        state = layer.state()
        header["layers"][index] = {"kind": type(layer).__name__, "numbers": state.numbers}
        specs |= {f"layers.{index}.{name}": TensorSpec.of(tensor) for name, tensor in state.tensors.items()}
    states = (tensor for layer in layers.values() for tensor in layer.state().tensors.values())
    tensors = itertools.chain(statistics.values(), states)
    write_tensors(path, {"format": "pt", "hf_kvcache": json.dumps(header)}, specs, tensors)


def load_cache(
    model: PreTrainedModel, path: str | os.PathLike, *, device: torch.device | str | None = None
) -> "KVCache":
    """Read a cache that `KVCache.save` wrote, for the same model.

    Generation goes on from it as from the one that was saved: give `generate()` the whole conversation's token ids, or
    the new ones with a mask over all. The file is read a layer at a time, and each tensor is checked before it is used.

    Args:
        model: the model the cache was filled by, loaded anywhere.
        path: the file.
        device: where the cache goes; by default each layer goes where `model` computes it.

    Raises:
        ValueError: if the file is damaged, of a newer format, or of another model, dtype or weights.
        FileNotFoundError: if there is no such file.
        RuntimeError: if it does not fit into the `max_bytes` it was made with.
    """
    from .build import make_cache  # which saves with this module

    with TensorFile(path) as file, torch.inference_mode(False), torch.no_grad():
        header = _read_header(file)
        check_identity(header["model"], model)
        cache = make_cache(model, header["technique"], **header["options"], **_read_calibration(file, header))
        layers = _storing_layers(cache)
        kinds = {str(index): type(layer).__name__ for index, layer in layers.items()}
        saved = {index: layer["kind"] for index, layer in header["layers"].items()}
        if kinds != saved:
            raise ValueError(f"{path} holds layers {saved}, and this version builds {kinds}: run the prompt again.")
        for index, layer in layers.items():
            home = _device_of(model, index) if device is None else torch.empty(0, device=device).device
            layer.load_state(_read_state(file, index, header["layers"][str(index)]["numbers"]), home)
    return cache


def _storing_layers(cache: "KVCache") -> dict[int, KVLayer | StateLayer]:
    return {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, (KVLayer, StateLayer))}


def _check_complete(layer: Any) -> None:
    """Refuse a class that forks something of its own and says nothing of it in `state`: it would be lost."""
    for cls in type(layer).__mro__:
        if "state" in vars(cls):
            return
        if "fork" in vars(cls):
            raise NotImplementedError(f"caches with layers of type {cls.__name__} cannot be saved in this version.")


def _read_calibration(file: TensorFile, header: dict[str, Any]) -> dict[str, Any]:
    if header["calibrated_on"] is None:
        return {}
    from .calibration import Calibration  # which builds caches itself

    names = [name for name in file.specs if name.startswith("calibration.")]
    tensors = {name.removeprefix("calibration."): file.read(name) for name in names}
    return {"calibration": Calibration.from_tensors(tensors, header["calibrated_on"])}


def _plain_options(cache: "KVCache") -> dict[str, Any]:
    options = {name: value for name, value in cache.recipe.changed_options.items() if name != "calibration"}
    for name, value in options.items():
        if not isinstance(value, (str, int, float, list, tuple, type(None))):
            raise NotImplementedError(f"a cache made with {name}={value!r} cannot be saved: only plain values can.")
    return options


def _read_header(file: TensorFile) -> dict[str, Any]:
    text = file.metadata.get("hf_kvcache")
    if text is None:
        raise ValueError(f"{file.path} is a safetensors file, but not a cache that hf_kvcache saved.")
    header = json.loads(text)
    if header["version"] != FORMAT_VERSION:
        remedy = "upgrade hf_kvcache" if header["version"] > FORMAT_VERSION else "run the prompt again"
        raise ValueError(
            f"{file.path} has format {header['version']} and this version reads format {FORMAT_VERSION}: {remedy}."
        )
    return header


def _read_state(file: TensorFile, index: int, numbers: dict[str, int]) -> LayerState:
    prefix = f"layers.{index}."
    names = [name for name in file.specs if name.startswith(prefix)]
    return LayerState({name.removeprefix(prefix): file.read(name) for name in names}, numbers)


def _device_of(model: PreTrainedModel, index: int) -> torch.device:
    """Where `model` computes cache layer `index`: models may be spread over devices."""
    modules = (module for module in model.modules() if getattr(module, "layer_idx", None) == index)
    parameters = (parameter for module in modules for parameter in module.parameters() if not parameter.is_meta)
    return next((parameter.device for parameter in parameters), model.device)
