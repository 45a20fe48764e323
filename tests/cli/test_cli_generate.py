"""`hf-kvcache generate` with a tiny random model saved to a folder."""

import io
import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_kvcache.cli import app, loading
from hf_kvcache.cli import generate as generate_command
from hf_kvcache.cli.loading import parse_settings, read_prompt
from hf_kvcache.cli.runs import first_difference

WORDS = ["<pad>", "<end>", "user", *(f"w{index}" for index in range(61))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random llama over 64 words, with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>").save_pretrained(path)
    return str(path)


def call(*arguments, stdin: str | None = None):
    return CliRunner().invoke(app, ["generate", *(str(argument) for argument in arguments)], input=stdin)


def call_json(*arguments, stdin: str | None = None) -> dict:
    result = call(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def no_model(monkeypatch):
    """Fails the test if a model is loaded."""
    monkeypatch.setattr(generate_command, "load", lambda *_: pytest.fail("the model was loaded"))


def test_text_goes_to_stdout_and_figures_to_stderr(folder):
    result = call("w1 w2 w3", "--model", folder, "--max-new-tokens", 5)
    assert result.exit_code == 0, result.stderr
    text = call_json("w1 w2 w3", "--model", folder, "--max-new-tokens", 5)["text"]
    assert result.stdout.split() == text.split()
    assert "first after" in result.stderr


def test_json_holds_what_was_measured(folder):
    found = call_json("w1 w2 w3", "--model", folder, "--max-new-tokens", 6, "--set", "block_size=4")
    assert (found["cache"], found["options"], found["prompt_tokens"]) == ("blocks", {"block_size": 4}, 3)
    assert len(found["token_ids"]) == 6
    assert found["ttft_s"] > 0
    assert found["tpot_s"] > 0
    assert found["report"]["tokens_seen"] == 8  # the last token's keys are never computed
    assert found["cache_bytes"] == found["report"]["reserved_bytes"]
    assert "default" not in found


def test_compare_runs_the_default_cache_beside_ours(folder):
    found = call_json("w1 w2 w3 w4", "--model", folder, "--max-new-tokens", 9, "--compare")
    assert found["first_difference"] is None
    assert found["default"]["token_ids"] == found["token_ids"]
    assert found["default"]["cache_bytes"] == found["report"]["dynamic_bytes"]


def test_compare_prints_one_table(folder):
    result = call("w1 w2 w3 w4", "--model", folder, "--max-new-tokens", 4, "--compare")
    assert result.exit_code == 0, result.stderr
    assert "identical" in result.stdout
    assert "default (DynamicCache)" in result.stdout


def test_a_cache_that_forgets_differs_where_it_first_forgets(folder):
    window = ["--cache", "sliding_window", "--set", "sliding_window=2", "--set", "num_sink_tokens=0"]
    found = call_json("w1 w2 w3 w4 w5 w6", "--model", folder, "--max-new-tokens", 12, "--compare", *window)
    ours, default = found["token_ids"], found["default"]["token_ids"]
    assert ours != default
    assert ours[: found["first_difference"]] == default[: found["first_difference"]]


def test_a_seed_decides_the_samples(folder):
    flags = ["w1 w2", "--model", folder, "--max-new-tokens", 12, "--temperature", 1.5, "--top-p", 0.95]
    first, again = call_json(*flags, "--seed", 1), call_json(*flags, "--seed", 1, "--compare")
    other = call_json(*flags, "--seed", 2)
    assert first["token_ids"] == again["token_ids"] == again["default"]["token_ids"]
    assert other["token_ids"] != first["token_ids"]


@pytest.mark.parametrize("way", ["argument", "dash", "piped", "file"])
def test_the_prompt_comes_from_four_places(folder, tmp_path, way):
    (tmp_path / "prompt.txt").write_text("w7 w8 w9 w10")
    arguments = {
        "argument": ["w7 w8 w9 w10"],
        "dash": ["-"],
        "piped": [],
        "file": ["--prompt-file", tmp_path / "prompt.txt"],
    }
    stdin = "w7 w8 w9 w10" if way in ("dash", "piped") else None
    assert call_json(*arguments[way], "--model", folder, "--max-new-tokens", 1, stdin=stdin)["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a prompt", "--cache", "blokcs"], "did you mean 'blocks'?"),
        (["a prompt", "--set", "block_sise=8"], "did you mean 'block_size'?"),
        (["a prompt", "--set", "block_size=0"], "block_size=0 is not allowed"),
        (["a prompt", "--set", "block_size"], "--set 'block_size' has no value: write it as --set name=value."),
        (["a prompt", "--set", "block_size=8", "--set", "block_size=9"], "given twice"),
        (["a prompt", "--top-p", "0.9"], "--top-p 0.9 needs sampling: give --temperature"),
        ([" "], "the prompt is empty"),
        ([], "the prompt is empty"),
        (["a prompt", "--prompt-file", "x.txt"], "a prompt and --prompt-file were both given"),
    ],
)
def test_a_wrong_command_line_is_refused_before_the_model_is_loaded(no_model, arguments, message):
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_prompt_file_is_named(no_model):
    result = call("--prompt-file", "missing.txt")
    assert result.exit_code == 1
    assert "missing.txt" in result.stderr


def test_an_unknown_model_and_device_are_refused(folder, tmp_path):
    result = call("w1", "--model", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "give smollm2, gemma3, a folder, or a hub id" in result.stderr
    result = call("w1", "--model", folder, "--device", "gpu7")
    assert result.exit_code == 2
    assert "device 'gpu7' cannot be used here: give cpu" in result.stderr


def test_the_chat_template_is_used_if_there_is_one(folder, tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert generate_command.encode(tokenizer, "w1 w2", None)["input_ids"].tolist() == [[4, 5]]
    with pytest.raises(ValueError, match="has no chat template: leave it out"):
        generate_command.encode(tokenizer, "w1 w2", True)
    tokenizer.chat_template = "user {{ messages[0]['content'] }}"
    assert generate_command.encode(tokenizer, "w1 w2", None)["input_ids"].tolist() == [[2, 4, 5]]
    assert generate_command.encode(tokenizer, "w1 w2", False)["input_ids"].tolist() == [[4, 5]]


def test_only_the_default_model_is_fetched_unasked(folder, monkeypatch, tmp_path):
    fetched = []
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "fetch_with_bar", fetched.append)
    result = call("w1", "--model", "gemma3")
    assert (result.exit_code, fetched) == (1, [])
    assert "hf-kvcache models fetch gemma3" in result.stderr
    monkeypatch.setattr(loading, "resolve", lambda _: folder)
    assert call("w1 w2", "--max-new-tokens", 1).exit_code == 0
    assert fetched == ["smollm2"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("0.5", 0.5), ("true", True), ("null", None), ("[1, 2]", [1, 2]), ("cache", "cache"), ("a=b", "a=b")],
)
def test_values_are_json_where_they_can_be(text, value):
    assert parse_settings([f"some-name={text}"]) == {"some_name": value}


def test_an_argument_wins_over_a_pipe(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert read_prompt("given", None) == "given"
    assert read_prompt(None, None) == "piped"


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
