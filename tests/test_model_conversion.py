"""A GGUF file becomes an ordinary transformers folder: checked with a tiny file written here."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_kvcache import models


def write_gguf(path: Path, *, without: str = "") -> dict[str, np.ndarray]:
    """A float32 llama of one layer with two query heads and one KV head; returns its tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in {
        writer.add_name: "tiny",
        writer.add_context_length: 64,
        writer.add_embedding_length: 8,
        writer.add_block_count: 1,
        writer.add_feed_forward_length: 12,
        writer.add_head_count: 2,
        writer.add_head_count_kv: 1,
        writer.add_layer_norm_rms_eps: 1e-5,
        writer.add_rope_freq_base: 5e4,
        writer.add_rope_dimension_count: 4,
        writer.add_vocab_size: 5,
        writer.add_tokenizer_model: "gpt2",
        writer.add_token_list: ["<end>", "a", "b", "c", "ab"],
        writer.add_token_types: [3, 1, 1, 1, 1],
        writer.add_token_merges: ["a b"],
        writer.add_bos_token_id: 0,
        writer.add_eos_token_id: 0,
        writer.add_pad_token_id: 0,
        writer.add_chat_template: "{{ messages[0]['content'] }}",
    }.items():
        add(value)
    shapes = {"token_embd": (5, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {f"blk.0.attn_{name}": (rows, 8) for name, rows in (("q", 8), ("k", 4), ("v", 4), ("output", 8))}
    shapes |= {"blk.0.ffn_gate": (12, 8), "blk.0.ffn_up": (12, 8), "blk.0.ffn_down": (8, 12)}
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name != without:
            writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_the_conversion_makes_a_folder_that_transformers_loads(tmp_path, capfd):
    tensors = write_gguf(tmp_path / "tiny.gguf")
    num_parameters = sum(tensor.size for tensor in tensors.values())
    models._convert(tmp_path / "tiny.gguf", tmp_path / "model", num_parameters)
    assert capfd.readouterr() == ("", "")
    with models.quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.num_parameters() == num_parameters
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, torch.from_numpy(tensors["token_embd"]))
    key = torch.from_numpy(tensors["blk.0.attn_k"])[[0, 2, 1, 3]]  # llama.cpp interleaves the halves rotary pairs up
    assert torch.equal(model.model.layers[0].self_attn.k_proj.weight, key)
    assert model.config.rope_parameters["rope_theta"] == 5e4
    assert not hasattr(model.config, "quantization_config")
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (0, 0)
    assert tokenizer("abcab").input_ids == [4, 3, 4]
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 64)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "c"}], tokenize=False) == "c"


def test_a_file_that_transformers_cannot_fill_the_model_from_is_refused(tmp_path):
    tensors = write_gguf(tmp_path / "tiny.gguf", without="blk.0.attn_v")
    num_parameters = sum(tensor.size for tensor in tensors.values())
    with pytest.raises(models.FetchError, match=r"wrongly .* missing: \['model.layers.0.self_attn.v_proj.weight'\]"):
        models._convert(tmp_path / "tiny.gguf", tmp_path / "model", num_parameters)
    with pytest.raises(models.FetchError, match=rf"parameters of {num_parameters + 1}"):
        models._convert(tmp_path / "tiny.gguf", tmp_path / "model", num_parameters + 1)


def test_quiet_transformers_puts_the_settings_back():
    def fail_quietly() -> None:
        with models.quiet_transformers():
            assert not logging.is_progress_bar_enabled()
            raise KeyError

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(KeyError):
        fail_quietly()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
