"""`hf-kvcache bench`: what is refused before a model is loaded, and a run of each on a tiny model."""

import json

import pytest
from typer.testing import CliRunner

from hf_kvcache.bench import peers
from hf_kvcache.cli import app
from hf_kvcache.cli import bench as bench_command

PROSE = " ".join(
    f"Sentence {i} of this text begins in its own way and goes on with words up to {i}." for i in range(60)
)


def call(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def call_json(*arguments) -> dict:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def loaded(monkeypatch, tiny_model, letters):
    """A tiny model in place of the named one."""
    monkeypatch.setattr(bench_command, "load", lambda *_: (tiny_model("llama"), letters))


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "text.txt").write_text(PROSE)
    return tmp_path / "text.txt"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--contexts", "1k"], "--contexts '1k' is not a list of positive integers"),
        (["decode", "--contexts", "0"], "--contexts '0' is not a list"),
        (["decode", "--caches", ","], "--caches is empty"),
        (["decode", "--caches", "blokcs"], "did you mean 'blocks'?"),
        (["growth", "--caches", ","], "--caches is empty"),
        (["growth", "--caches", "h2o:budgets=5"], "did you mean 'budget'?"),
        (["fidelity", "--caches", "int4:q_group=32"], "did you mean 'q_group_size'?"),
        (["fidelity", "--text-file", "/missing"], "neither a file nor a folder"),
        (["recall", "--caches", "itn4"], "did you mean 'int4'?"),
        (["recall", "--tasks", "needle"], "choose from mk_needle, sent_recall, copy_ids"),
        (["recall", "--tasks", ","], "tasks=[] is not possible"),
        (["recall", "--protocols", "blind"], "choose from unseen, seen"),
        (["recall", "--text-file", "/missing"], "neither a file nor a folder"),
    ],
)
def test_bench_refuses_before_it_loads_a_model(monkeypatch, arguments, message):
    monkeypatch.setattr(bench_command, "load", lambda *_: pytest.fail("the model was loaded"))
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_missing_backend_is_named_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(bench_command, "load", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(peers, "is_optimum_quanto_available", lambda: False)
    monkeypatch.setattr(peers, "is_hqq_available", lambda: False)
    result = call("decode", "--caches", "int4,quantized")
    assert result.exit_code == 1
    assert "pip install optimum-quanto, or pip install hqq" in result.stderr


def test_decode(loaded):
    rows = call_json("decode", "--contexts", 16, "--steps", 1, "--caches", "blocks")["rows"]
    assert [row["cache"] for row in rows] == ["dynamic", "blocks"]


def test_growth(loaded, text_file):
    sizes = ["--prompt", 50, "--new-tokens", 20, "--text-file", text_file]
    result = call_json("growth", *sizes, "--caches", "dynamic,keydiff:budget=30")
    assert (result["prompt"], result["new_tokens"]) == (50, 20)
    assert [row["cache"] for row in result["rows"]] == ["dynamic", "keydiff budget=30"]


def test_growth_needs_a_text_as_long_as_the_prompt(loaded, text_file):
    result = call("growth", "--prompt", 100_000, "--text-file", text_file)
    assert result.exit_code == 2
    assert "and --prompt is 100,000" in result.stderr


@pytest.mark.parametrize("is_folder", [False, True])
def test_fidelity_on_texts_of_ones_own(loaded, text_file, is_folder):
    path = text_file.parent if is_folder else text_file
    row = call_json("fidelity", "--text-file", path, "--prefix", 40, "--scored", 10, "--caches", "blocks")["rows"][0]
    assert row["top1_agreement"] == 1.0


def test_recall_on_texts_of_ones_own(loaded, text_file):
    sizes = ["--contexts", 2, "--questions", 1, "--length", 300, "--seed", 5]
    caches = ["--caches", "int4:q_group_size=16,blocks"]
    result = call_json("recall", *sizes, *caches, "--tasks", "copy_ids, sent_recall", "--text-file", text_file)
    assert (result["contexts"], result["questions"], result["length"], result["seed"]) == (2, 1, 300, 5)
    assert [(row["task"], row["cache"]) for row in result["rows"]] == [
        (task, cache)
        for task in ("copy_ids", "sent_recall")
        for cache in ("full cache", "int4 q_group_size=16", "blocks")
    ]


def test_recall_prints_a_table_and_its_progress(loaded):
    sizes = ["--contexts", 1, "--questions", 1, "--length", 300]
    result = call("recall", *sizes, "--tasks", "copy_ids", "--caches", "blocks")
    assert result.exit_code == 0
    assert "full cache" in result.stdout
    assert "copy_ids, unseen: context 1 of 1, blocks" in result.stderr
