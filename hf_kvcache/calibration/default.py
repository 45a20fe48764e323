"""The calibration of a model that was given none: measured on first use, kept in the user's cache folder."""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel

from ..model_layers import attention_modules
from ..models import home
from .calibration import Calibration
from .observation import calibrate

logger = logging.getLogger(__name__)

_NO_TOKENIZER = (
    "the cache 'transform' is calibrated on a text, and no tokenizer was found for this model (name_or_path="
    "{name!r}): pass calibration=hf_kvcache.calibrate(model, tokenizer), or the path of a file that its save() wrote."
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
            _loaded[key] = calibrate(model, _find_tokenizer(model))
            _keep(_loaded[key], path)
    return _loaded[key]


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


def _find_tokenizer(model: PreTrainedModel) -> object:
    name = model.name_or_path
    try:
        if not name:
            raise OSError("the model has no name")
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(_NO_TOKENIZER.format(name=name)) from error


def _keep(calibration: Calibration, path: Path) -> None:
    """Save for the next process; a folder that cannot be written is no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            calibration.save(draft)
            os.replace(draft, path)
    except OSError as error:
        logger.warning("the calibration could not be kept in %s (%s): it is measured again next time", path, error)
