"""What an installed hf_kvcache contains: setup.cfg lists every package, and `patches` ships inside."""

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hf_kvcache.kernels import native

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def test_setup_cfg_lists_every_package_on_disk(setup_cfg):
    found = set()
    for top, name in ((ROOT / "hf_kvcache", "hf_kvcache"), (ROOT / "patches", "hf_kvcache.patches")):
        for file in top.rglob("*.py"):
            found.add(".".join((name, *file.parent.relative_to(top).parts)))
    assert set(lines(setup_cfg["options"]["packages"])) == found
    assert all((ROOT / name.replace(".", "/")).is_dir() for name in found - {"hf_kvcache.patches"})
    assert lines(setup_cfg["options"]["package_dir"])[1] == "hf_kvcache.patches = patches"


def test_every_package_has_an_init():
    for top in (ROOT / "hf_kvcache", ROOT / "patches"):
        folders = {file.parent for file in top.rglob("*.py")}
        assert all((folder / "__init__.py").is_file() for folder in folders)


def test_data_files_exist(setup_cfg):
    for package, patterns in setup_cfg["options.package_data"].items():
        for pattern in patterns.split(","):
            folder = ROOT / package.replace(".", "/")
            assert list(folder.glob(pattern.strip())), f"{pattern} matches nothing in {package}"


def test_the_kernel_is_hashed_and_shipped_whole():
    folder = ROOT / "hf_kvcache" / "kernels"
    assert {path.name for suffix in ("*.cpp", "*.h") for path in folder.glob(suffix)} == set(native._SOURCES)


def test_patches_is_importable_under_its_name_only():
    import hf_kvcache.patches

    assert hf_kvcache.patches.__name__ == "hf_kvcache.patches"
    command = [sys.executable, "-c", "import patches"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "ImportError: import `hf_kvcache.patches`, not `patches`" in result.stderr


@pytest.mark.slow
def test_the_wheel_contains_the_library_and_nothing_else(setup_cfg, tmp_path):
    sources = tmp_path / "sources"
    copied = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, copied.stdout.split("\0")):
        if (ROOT / name).is_file():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            (sources / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "-w", tmp_path, sources], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (top_level,) = [name for name in names if name.endswith("top_level.txt")]
        assert archive.read(top_level).decode().split() == ["hf_kvcache"]
    assert "hf_kvcache/patches/__init__.py" in names
    assert {"hf_kvcache/py.typed", "hf_kvcache/calibration/text.txt"} <= names
    assert {f"hf_kvcache/kernels/{name}" for name in native._SOURCES} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hf_kvcache"}
    expected = {f"{package.replace('.', '/')}/__init__.py" for package in lines(setup_cfg["options"]["packages"])}
    assert expected <= names
