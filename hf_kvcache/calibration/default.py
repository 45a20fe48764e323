"""The calibration of a model that was given none: measured on first use, kept in the user's cache folder."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from ..model_layers import attention_modules
from ..models import home
from .calibration import Calibration
from .mixed_bits import choose_bits
from .observation import calibrate

logger = logging.getLogger(__name__)

_NO_TOKENIZER = (
    "the cache 'transform' is calibrated on a text, and no tokenizer was found for this model (name_or_path="
    "{name!r}): pass calibration=hf_kvcache.calibrate(model, tokenizer), or the path of a file that its save() wrote."
)
_NO_TOKENIZER_FOR_BITS = (
    "bits='auto' chooses on a text, and no tokenizer was found for this model (name_or_path={name!r}): pass "
    "bits=hf_kvcache.choose_bits(model, tokenizer, ...)."
)
# Numbers of each weight of an attention layer that tell one model from another.
_NUM_SAMPLES = 16
_loaded: dict[str, Calibration] = {}


def default_calibration(model: PreTrainedModel) -> Calibration:
    """The calibration of `model` on the library's own text: from memory, from the disk, or measured now.

    Raises:
        ValueError: if the model's tokenizer cannot be found.
        NotImplementedError: if the model cannot be calibrated.
    """
    key = fingerprint(model)
    if key not in _loaded:
        path = home() / "calibrations" / f"{key}.safetensors"
        if path.exists():
            _loaded[key] = Calibration.load(path)
        else:
            logger.info("calibrating %s for the cache 'transform', once", model.name_or_path)
            _loaded[key] = calibrate(model, _find_tokenizer(model, _NO_TOKENIZER))
            _keep(_loaded[key].save, path)
    return _loaded[key]


def default_bits(model: PreTrainedModel, name: str, options: dict[str, Any]) -> list[list[int]]:
    """What `bits="auto"` stands for: chosen on the library's own text, from memory, from the disk, or now.

    Raises:
        ValueError: if the model's tokenizer cannot be found, or the budget is too small.
    """
    chosen = {key: options[key] for key in ("bits_per_value", "q_group_size", "clip_search") if key in options}
    settings = hashlib.sha256(json.dumps([name, chosen], sort_keys=True).encode()).hexdigest()[:12]
    path = home() / "calibrations" / f"{fingerprint(model)}-{settings}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    logger.info("choosing the bits of %s for the cache %r, once", model.name_or_path, name)
    tokenizer = _find_tokenizer(model, _NO_TOKENIZER_FOR_BITS)
    bits = [list(pair) for pair in choose_bits(model, tokenizer, name, **chosen)]
    _keep(lambda draft: draft.write_text(json.dumps(bits), encoding="utf-8"), path)
    return bits


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of the model's class, and of the shapes and some numbers of its attention weights."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for index, module in sorted(attention_modules(model).items()):
        for name, weight in module.named_parameters():
            flat = weight.detach().flatten()
            sample = flat[:: max(1, flat.numel() // _NUM_SAMPLES)].float().cpu()
            digest.update(f"{index} {name} {tuple(weight.shape)}".encode())
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]


def _find_tokenizer(model: PreTrainedModel, message: str) -> object:
    name = model.name_or_path
    try:
        if not name:
            raise OSError("the model has no name")
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(message.format(name=name)) from error


def _keep(save: Callable[[Path], Any], path: Path) -> None:
    """Save for the next process; a folder that cannot be written is no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            save(draft)
            os.replace(draft, path)
    except OSError as error:
        logger.warning("what was calibrated could not be kept in %s (%s): it is measured again next time", path, error)
