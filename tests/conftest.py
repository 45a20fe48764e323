"""Shared by all tests: tiny random models from configs, the two real ones, poisoned memory, transformers untouched."""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

import transformers as tf

ROOT = Path(__file__).resolve().parents[1]

# A plain checkout, or one beside an installed wheel, has no `hf_kvcache.patches`: the folder is mapped by setup.cfg.
if importlib.util.find_spec("hf_kvcache") is None:
    sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("hf_kvcache.patches") is None:
    spec = importlib.util.spec_from_file_location("hf_kvcache.patches", ROOT / "patches" / "__init__.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["hf_kvcache"].patches = module

import hf_kvcache  # noqa: E402
from hf_kvcache import CACHE_ARG  # noqa: E402
from hf_kvcache.blocks import BlockPool  # noqa: E402

torch.set_num_threads(1)
tf.utils.logging.set_verbosity_error()
tf.utils.logging.disable_progress_bar()

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LOCAL_THEN_GLOBAL = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_MLA = {"kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
_MLA_MOE = _MLA | {
    **{"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1},
}
# An indexer that chooses 6 tokens: most of a prompt is not read.
_INDEXER = {"qk_rope_head_dim": 16, "index_topk": 6, "index_head_dim": 16, "index_n_heads": 2}
_COMPRESS_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 7}
_ROTARY_4_AXES = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}

# Name -> (class prefix, config class, what the config adds to `_COMMON`).
_MODELS = {
    "llama": ("Llama", "LlamaConfig", {}),
    "mistral": ("Mistral", "MistralConfig", {"sliding_window": 8}),
    "mixtral": ("Mixtral", "MixtralConfig", {"num_local_experts": 4}),
    "qwen2": ("Qwen2", "Qwen2Config", {}),
    "qwen3": ("Qwen3", "Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2", "Gemma2Config", {"head_dim": 16, "sliding_window": 8}),
    "gemma3": ("Gemma3", "Gemma3TextConfig", _LOCAL_THEN_GLOBAL),
    "phi3": ("Phi3", "Phi3Config", {}),
    "olmo2": ("Olmo2", "Olmo2Config", {}),
    "gpt_oss": (
        "GptOss",
        "GptOssConfig",
        _LOCAL_THEN_GLOBAL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "jamba": (
        "Jamba",
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False}
        | {"mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "bamba": ("Bamba", "BambaConfig", _MAMBA2 | {"attn_layer_indices": [1], "mamba_expand": 2}),
    "falcon_h1": ("FalconH1", "FalconH1Config", _MAMBA2 | {"head_dim": 16, "mamba_d_ssm": 128}),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3Config", _MLA_MOE),
    "deepseek_v32": ("DeepseekV32", "DeepseekV32Config", _MLA_MOE | _INDEXER),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        "GlmMoeDsaConfig",
        _MLA_MOE | _INDEXER | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    ),
    "hy_v4": ("HYV4", "HYV4Config", _MLA_MOE | _INDEXER | {"hc_mult": 2}),
    "axk2": ("AXK2", "AXK2Config", _MLA_MOE | _INDEXER),
    "minimax_m3": (
        "MiniMaxM3VL",
        "MiniMaxM3VLTextConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 32}
        | {"shared_intermediate_size": 32, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16}
        | {"index_block_size": 4, "index_topk_blocks": 2, "layer_types": ["minimax_m3_sparse", "full_attention"]},
    ),
    "qwen4_exp": (
        "Qwen4Exp",
        "Qwen4ExpTextConfig",
        {"head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        | {"num_experts": 4, "num_experts_per_tok": 2, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2}
        | {"indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4}
        | {"layer_types": ["linear_attention", "indexed_attention"], "rope_parameters": _ROTARY_4_AXES},
    ),
    "deepseek_v4": (
        "DeepseekV4",
        "DeepseekV4Config",
        {"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "moe_intermediate_size": 32}
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "partial_rotary_factor": 0.5,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
        }
        | {"num_hidden_layers": 3, "mlp_layer_types": ["moe"] * 3, "compress_rates": _COMPRESS_RATES}
        | {"layer_types": [*_COMPRESS_RATES, "sliding_attention"], "sliding_window": 8, "o_groups": 2}
        | {"o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 3},
    ),
}


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory():
    """Fresh memory of a block pool is NaN, so that reading a slot no token was written to fails the test."""
    reserve = BlockPool.reserve

    def reserve_poisoned(self, shape, dtype):
        fresh = reserve(self, shape, dtype)
        return fresh.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockPool, "reserve", reserve_poisoned)
        yield


@pytest.fixture(autouse=True)
def transformers_untouched():
    """Each test starts and ends with transformers as it was installed."""
    hf_kvcache.disable()
    yield
    hf_kvcache.disable()


@pytest.fixture(scope="session")
def tiny_model():
    """`tiny_model(name, **config)`: a new random model of that architecture, always with the same weights."""

    def build(name: str, *, seed: int = 0, **config):
        prefix, config_class, extra = _MODELS[name]
        if not hasattr(tf, config_class):
            pytest.skip(f"this transformers has no {config_class}")
        torch.manual_seed(seed)
        config = getattr(tf, config_class)(**(_COMMON | extra | config))
        return getattr(tf, f"{prefix}ForCausalLM")(config).eval()

    return build


@pytest.fixture(scope="session")
def make_ids():
    """`make_ids(rows, length, seed=0)`: random token ids `[rows, length]`, without special tokens."""

    def build(rows: int, length: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(2, 97, (rows, length), generator=torch.Generator().manual_seed(seed))

    return build


class LetterTokenizer:
    """One token a character, within the vocabulary of the tiny models; printable ASCII comes back as it was."""

    bos_token_id = 1

    def __call__(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None):
        ids = [self.bos_token_id] * add_special_tokens + [2 + ord(letter) % 95 for letter in text]
        return SimpleNamespace(input_ids=ids if return_tensors is None else torch.tensor([ids]))

    @staticmethod
    def decode(ids) -> str:
        return "".join(chr(index - 2 if index >= 34 else index + 93) for index in ids if index > 1)


@pytest.fixture(scope="session")
def letters():
    """A tokenizer for the tiny models that needs no file."""
    return LetterTokenizer()


@pytest.fixture(scope="session")
def left_pad():
    """`left_pad(ids, lengths)`: `ids` and its mask, of whose row `i` only the last `lengths[i]` tokens are real."""

    def pad(ids: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        first = ids.shape[1] - torch.tensor(lengths)
        mask = (torch.arange(ids.shape[1])[None] >= first[:, None]).long()
        return ids * mask, mask

    return pad


@pytest.fixture(scope="session")
def run():
    """`run(model, cache, ids, mask=None, chunks=None)`: logits of `ids`, given to the cache after what it holds.

    `mask` covers the cached tokens too; `chunks` are the lengths of the forward passes (default: one).
    """

    @torch.no_grad()
    def forward(model, cache, ids, mask=None, chunks=None) -> torch.Tensor:
        logits, begin = [], 0
        past = cache.get_seq_length()
        for length in chunks or [ids.shape[1]]:
            extra = {}
            if mask is not None:
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, past + begin : past + begin + length]
                extra = {"attention_mask": mask[:, : past + begin + length], "position_ids": positions}
            inputs = {"input_ids": ids[:, begin : begin + length], "use_cache": True, CACHE_ARG: cache}
            logits.append(model(**inputs, **extra).logits)
            begin += length
        assert begin == ids.shape[1]
        return torch.cat(logits, dim=1)

    return forward


@pytest.fixture(scope="session")
def real_model():
    """`real_model(name)`: a pretrained model and its tokenizer, in float32, fetched once."""
    from hf_kvcache import models

    loaded: dict[str, tuple] = {}

    def load(name: str):
        if name not in loaded:
            try:
                folder = models.fetch(name)
            except models.FetchError as error:
                if "cannot be reached" not in str(error):
                    raise
                pytest.skip(f"{name} is not on this machine, and: {error}")
            loaded.clear()  # one at a time in memory
            model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            loaded[name] = model, tf.AutoTokenizer.from_pretrained(folder)
        return loaded[name]

    return load


@pytest.fixture
def kernel():
    """Skips the test where the decode kernel cannot be compiled."""
    from hf_kvcache.kernels import native

    if native.library() is None:
        pytest.skip("this machine has no C++ compiler")


@pytest.fixture
def no_kernel(monkeypatch):
    """As on a machine without a compiler, without the warning that it gives."""
    from hf_kvcache.kernels import native

    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "warn_of_no_library", lambda: None)
