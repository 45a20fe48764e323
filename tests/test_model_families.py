"""Families whose caches are unusual, tiny and random: the tokens of transformers' own cache, or a refusal by name.

Every causal language model of transformers was run in this way once; here is one of each kind.
"""

import pytest
import torch
import transformers as tf

import hf_kvcache
from hf_kvcache import CACHE_ARG, make_cache

pytestmark = pytest.mark.core

_SMALL = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_LAYERS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
_GROUPED = _LAYERS | {"num_key_value_heads": 2, "max_position_embeddings": 256}
_MLA = {"kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_BART = {f"{side}_{size}": count for side in ("encoder", "decoder") for size, count in (("layers", 3), ("ffn_dim", 96))}
_SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97}

# Class prefix -> (config class, what is not in `_SMALL`), with what is unusual.
FAMILIES = {
    "Bart": ("BartConfig", _BART | {"d_model": 64, "is_encoder_decoder": False}),  # the decoder of an encoder-decoder
    "Bloom": ("BloomConfig", {"hidden_size": 64, "n_layer": 3, "n_head": 4}),  # ALiBi
    "CpmAnt": ("CpmAntConfig", _LAYERS | {"dim_head": 16, "dim_ff": 96}),  # puts tokens of its own before the prompt
    "Doge": ("DogeConfig", _GROUPED),  # masks by its values
    "FalconMamba": ("FalconMambaConfig", {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 8}),  # states only
    "GPTNeoXJapanese": ("GPTNeoXJapaneseConfig", _LAYERS),  # takes packed keys only
    "Gemma3n": (  # layers that read the keys of others
        "Gemma3nTextConfig",
        _GROUPED
        | _SHARED
        | {"head_dim": 16, "sliding_window": 8, "laurel_rank": 8, "altup_num_inputs": 2}
        # The last one of each type that owns its keys lends them.
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "KimiLinear": (  # linear attention and latents
        "KimiLinearConfig",
        _LAYERS
        | _MLA
        | {"num_key_value_heads": 4, "moe_intermediate_size": 32, "topk_group": 1, "linear_head_dim": 8}
        | {"linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "Lfm2": ("Lfm2Config", _GROUPED | {"layer_types": ["conv", "full_attention"] * 2}),  # convolutions
    "Llama4": (  # chunked attention
        "Llama4TextConfig",
        _GROUPED | {"head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 4, "intermediate_size_mlp": 96},
    ),
    "LongcatFlash": (  # two attentions, and cache layers, a layer
        "LongcatFlashConfig",
        _MLA
        | {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 2, "num_hidden_layers": 4, "num_attention_heads": 4}
        | {"num_key_value_heads": 4, "head_dim": 8, "qk_head_dim": 24, "expert_ffn_hidden_size": 32}
        | {"n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2, "max_position_embeddings": 256},
    ),
    "NemotronH": (  # layers without attention
        "NemotronHConfig",
        _GROUPED
        | {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "mamba_num_heads": 8}
        | {"mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "use_mamba_kernels": False}
        | {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
    ),
    "Qwen3Next": (  # gated delta rule
        "Qwen3NextConfig",
        _GROUPED
        | _EXPERTS
        | {"head_dim": 16, "shared_expert_intermediate_size": 32, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    "RecurrentGemma": ("RecurrentGemmaConfig", _GROUPED | {"attention_window_size": 8, "lru_width": 64}),
}


def make_model(prefix: str, config_class: str, config: dict, suffix: str = "ForCausalLM"):
    if not hasattr(tf, config_class):
        pytest.skip(f"this transformers has no {config_class}")
    torch.manual_seed(0)
    return getattr(tf, prefix + suffix)(getattr(tf, config_class)(**(_SMALL | config))).eval()


def generate(model, ids, mask, **options) -> torch.Tensor:
    return model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, **options)


@pytest.mark.parametrize("prefix", FAMILIES)
def test_tokens_equal_those_of_the_own_cache(prefix, make_ids, left_pad):
    model, (ids, mask) = make_model(prefix, *FAMILIES[prefix]), left_pad(make_ids(2, 19), [19, 11])
    ours = {"cache_implementation": "blocks", "cache_config": {"block_size": 3}}
    hf_kvcache.enable()
    for options in ({}, {"num_beams": 2}):
        assert torch.equal(generate(model, ids, mask, **options, **ours), generate(model, ids, mask, **options))


@pytest.mark.parametrize(
    ("prefix", "config_class", "config", "suffix", "reason"),
    [
        ("OpenAIGPT", "OpenAIGPTConfig", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "LMHeadModel", "put nothing into"),
        ("MiniMax", "MiniMaxConfig", _GROUPED | {"num_local_experts": 4}, "ForCausalLM", "manages its own state"),
        ("Rwkv", "RwkvConfig", {"hidden_size": 64, "num_hidden_layers": 2}, "ForCausalLM", "manages its own state"),
    ],
)
def test_models_that_take_no_cache_are_refused(prefix, config_class, config, suffix, reason, make_ids):
    model = make_model(prefix, config_class, config, suffix)
    hf_kvcache.enable()
    with pytest.raises(NotImplementedError, match=rf"{reason}.*Leave cache_implementation out"):
        model.generate(make_ids(1, 9), max_new_tokens=2, do_sample=False, cache_implementation="blocks")


def test_encodings_serve_keys_that_other_layers_read(make_ids, run):
    model, ids = make_model("Gemma3n", *FAMILIES["Gemma3n"]), make_ids(2, 150)
    chunks = [120, *[1] * 30]
    expected = run(model, make_cache(model), ids, chunks=chunks)
    cache = make_cache(model, "int8", q_group_size=16, residual_length=16)
    logits = run(model, cache, ids, chunks=chunks)
    assert (logits - expected).norm() < 0.02 * expected.norm()
    assert cache.layers[1].coded_length >= 128
    tokens = generate(model, ids[:, :40], None, **{CACHE_ARG: make_cache(model, "int8", q_group_size=16)})
    assert torch.equal(tokens, generate(model, ids[:, :40], None))  # all of it is still in the exact tail
