"""Wheels are fetched by the real pip from a local folder that stands for the package index."""

import hashlib
import importlib.metadata
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from hf_kvcache.wheels import FetchError, Progress, Wheel, _bytes_below, download, sha256_of, unpack


def make_wheel(index: Path, project: str, data: bytes) -> Wheel:
    """A wheel pip accepts, in the folder `index`, holding `data` and a licence, and its pin."""
    module = project.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    members = {
        "part": data,
        "terms": f"terms of {project}".encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = index / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(project, "1.0", path.stat().st_size, digest, "part", (("terms", f"{project}.txt"),))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place pip looks at."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def pins(index: Path) -> tuple[Wheel, ...]:
    return make_wheel(index, "tiny-a", b"first half, "), make_wheel(index, "tiny-b", b"second half")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the wheels go."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work" / "wheels"


def ignore(_: Progress) -> None:
    pass


def refuse_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("pip was run")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_wheels_are_downloaded_and_their_parts_joined(pins, folder, tmp_path):
    seen = []
    download(pins, folder, seen.append)
    assert {path.name for path in folder.iterdir()} == {pin.file_name for pin in pins}
    assert [path.name for path in folder.parent.iterdir()] == ["wheels"]
    done = [step.done_bytes for step in seen]
    assert done == sorted(done)
    assert (
        (seen[-1].stage, done[-1])
        == ("download", seen[-1].total_bytes)
        == ("download", sum(p.size_bytes for p in pins))
    )
    unpack(pins, folder, tmp_path / "joined", tmp_path / "notices")
    assert (tmp_path / "joined").read_bytes() == b"first half, second half"
    assert (tmp_path / "notices" / "tiny-b.txt").read_text() == "terms of tiny-b"


def test_a_wheel_with_another_digest_is_refused(pins, folder):
    wrong = Wheel("tiny-b", "1.0", pins[1].size_bytes, "0" * 64)
    with pytest.raises(FetchError, match=r"served a tiny-b==1\.0 whose sha256 is not 0{64}: use another index"):
        download((wrong,), folder, ignore)
    assert not list(folder.iterdir())


def test_offline_says_what_is_missing_and_what_to_do(index, folder):
    with pytest.raises(FetchError) as caught:
        download((Wheel("tiny-c", "1.0", 1, "0" * 64),), folder, ignore)
    message = str(caught.value)
    assert "pip could not get tiny-c==1.0: the package index cannot be reached" in message
    assert "check the network" in message
    assert "No matching distribution found for tiny-c==1.0" in message


def test_a_python_without_pip_is_refused(pins, folder, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter(()))
    with pytest.raises(FetchError, match=r"downloaded with pip, which .* lacks: run .*ensurepip"):
        download(pins, folder, ignore)


def test_an_interrupted_download_goes_on_with_the_next_wheel(pins, index, folder, tmp_path):
    (index / pins[1].file_name).rename(tmp_path / "hidden")
    with pytest.raises(FetchError, match="tiny-b"):
        download(pins, folder, ignore)
    (tmp_path / "hidden").rename(index / pins[1].file_name)
    (index / pins[0].file_name).unlink()
    download(pins, folder, ignore)
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_wheel_is_fetched_again_and_a_whole_one_is_not(pins, folder, monkeypatch):
    folder.mkdir()
    (folder / pins[0].file_name).write_bytes(b"half a wheel")
    download(pins[:1], folder, ignore)
    assert sha256_of(folder / pins[0].file_name) == pins[0].sha256
    refuse_pip(monkeypatch)
    download(pins[:1], folder, ignore)


def test_an_interrupt_ends_pip(pins, folder, monkeypatch):
    started, popen = [], subprocess.Popen

    def start(command, **kwargs):
        started.append(popen(["sleep", "15"], stdout=kwargs["stdout"], stderr=kwargs["stderr"]))
        return started[-1]

    def interrupt(_: Progress) -> None:
        if started:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        download(pins, folder, interrupt)
    assert started[0].poll() not in (None, 0)  # ended by us, before it was done


def test_a_file_that_vanishes_while_pip_works_is_not_counted(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"1234")
    (tmp_path / "b.whl").symlink_to(tmp_path / "gone")
    assert _bytes_below(tmp_path) == 4
