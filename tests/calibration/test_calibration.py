"""Calibration: what is measured, the file it is kept in, the default, and every refusal."""

import copy

import pytest
import torch
from transformers import DynamicCache

import hf_kvcache
from hf_kvcache import CACHE_ARG, Calibration, calibrate, make_cache
from hf_kvcache.calibration import default

TOKENS = 200
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_KVCACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default, "_loaded", {})
    return tmp_path


class _Tokenizer:
    """Token ids from the bytes of a text."""

    def __call__(self, text, return_tensors):
        assert return_tensors == "pt"
        ids = torch.tensor([[2 + byte % 95 for byte in text.encode()]])
        return type("Encoding", (), {"input_ids": ids})


@pytest.mark.core
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "falcon_h1"])
@torch.no_grad()
def test_coefficients_of_the_models_own_keys_are_uncorrelated(name, tiny_model, make_ids):
    """By hand: the first layer's keys before RoPE are a projection of the embedded tokens."""
    model, ids = tiny_model(name), make_ids(1, TOKENS)
    layers = calibrate(model, ids).layers
    assert sorted(layers) == ([1] if name == "gemma3" else [0, 1])
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE_ARG: cache})
    for index, statistics in layers.items():
        keys = cache.layers[index].keys[0]
        assert statistics.mean.shape == (2, keys.shape[-1])
        # Rotations keep lengths, so the mean square of all keys is that of the unrotated ones.
        unrotated = torch.linalg.inv(statistics.basis.mT @ torch.eye(keys.shape[-1])).mT
        covariance = unrotated.mT @ (statistics.variance[..., None] * unrotated)
        energy = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + statistics.mean.square().sum(-1)
        torch.testing.assert_close(energy, keys[:, 4:].square().sum(-1).mean(-1), rtol=1e-3, atol=1e-6)
        assert (statistics.variance.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("rotated", ["whole", "partial"])
@torch.no_grad()
def test_the_mean_is_that_of_keys_without_rotation(rotated, tiny_model, make_ids):
    parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    model = tiny_model("phi3", rope_parameters=parameters) if rotated == "partial" else tiny_model("llama")
    ids = make_ids(1, TOKENS)
    statistics = calibrate(model, ids).layers[0]
    attention, embedded = model.model.layers[0].self_attn, model.model.embed_tokens(ids)
    states = model.model.layers[0].input_layernorm(embedded)
    keys = attention.qkv_proj(states)[..., 64:96] if rotated == "partial" else attention.k_proj(states)
    keys = keys[0, 4:].view(-1, 2, 16).transpose(0, 1)
    torch.testing.assert_close(statistics.mean, keys.mean(1), rtol=1e-4, atol=1e-6)
    coefficients = (keys - statistics.mean[:, None]) @ statistics.basis
    covariance = coefficients.mT @ coefficients / keys.shape[1]
    torch.testing.assert_close(covariance, torch.diag_embed(statistics.variance), rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_importance_is_the_divergence_that_noise_makes(tiny_model, make_ids):
    """The KL divergence of the predictions is half of importance times squared error, summed over coefficients."""
    model, ids = tiny_model("llama").double(), make_ids(1, 400)
    for layer in model.model.layers:  # values that matter, in a model whose weights are small and random
        layer.self_attn.v_proj.weight *= 10
        layer.self_attn.o_proj.weight *= 10
    half, begin = 200, 250
    full, divergences, expected = model(ids).logits[0, begin:].log_softmax(-1), [], []
    for index, statistics in calibrate(model, ids).layers.items():
        spread = statistics.variance.clamp(max=1e-2).sqrt()
        for head in range(2):
            noise = torch.randn(2, 400, 16, generator=torch.Generator().manual_seed(5)) * spread[:, None]
            noise[1 - head] = 0
            noise[:, :4] = noise[:, half:] = 0
            handle = model.model.layers[index].self_attn.k_proj.register_forward_hook(
                lambda _module, _inputs, keys, noise=noise, s=statistics: (
                    keys + (noise @ torch.linalg.inv(s.basis)).transpose(0, 1).flatten(1).double()
                )
            )
            got = model(ids).logits[0, begin:].log_softmax(-1)
            handle.remove()
            divergences.append((full.exp() * (full - got)).sum().item())
            expected.append((statistics.importance[head] * spread[head].square().sum() / 2).item())
    divergences, expected = torch.tensor(divergences), torch.tensor(expected)
    # One draw of tokens and two of noise: within a factor of two, and right in the order of large differences.
    ratio = divergences / expected
    assert (ratio > 0.4).all()
    assert (ratio < 2.5).all()


def test_important_layers_get_more_bits(model, make_ids):
    calibration = calibrate(model, make_ids(1, TOKENS))
    skewed = {i: s._replace(importance=torch.full((2,), 100.0 if i else 1.0)) for i, s in calibration.layers.items()}
    total = {i: codec.total_bits for i, codec in Calibration(skewed, num_tokens=TOKENS).key_codecs(2).items()}
    assert sum(total.values()) == 2 * 2 * 32
    assert total[1] > total[0] + 32


def test_a_file_gives_back_what_was_saved(model, make_ids, tmp_path):
    saved = calibrate(model, make_ids(1, TOKENS))
    saved.save(tmp_path / "tiny.safetensors")
    loaded = Calibration.load(tmp_path / "tiny.safetensors")
    assert loaded.num_tokens == TOKENS
    assert loaded.layers.keys() == saved.layers.keys()
    for index, statistics in saved.layers.items():
        assert all(torch.equal(*pair) for pair in zip(statistics, loaded.layers[index], strict=True))
    make_cache(model, "transform", calibration=str(tmp_path / "tiny.safetensors"))


def test_the_librarys_text_is_used_by_default(model):
    assert calibrate(model, _Tokenizer()).num_tokens == 2048
    assert calibrate(model, _Tokenizer(), text="word " * 40).num_tokens == 200


def test_codecs_are_made_once_whatever_generate_copies(model, make_ids):
    calibration = calibrate(model, make_ids(1, TOKENS))
    caches = [make_cache(model, "transform", calibration=c) for c in (calibration, copy.deepcopy(calibration))]
    assert caches[0].layers[0].codecs[0] is caches[1].layers[0].codecs[0]


def test_files_of_other_models_and_other_files_are_refused(model, tiny_model, make_ids, tmp_path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(ValueError, match=r"cannot be read .*hf_kvcache\.calibrate\(model, tokenizer\)\.save\(path\)"):
        make_cache(model, "transform", calibration=path)
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="cannot be read"):
        make_cache(model, "transform", calibration=path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not a calibration of this version"):
        make_cache(model, "transform", calibration=tmp_path / "model.safetensors")
    calibrate(model, make_ids(1, TOKENS)).save(path)
    with pytest.raises(ValueError, match=r"layer 0 has 2 KV heads of 16 dimensions there and 4 of 16 here"):
        make_cache(tiny_model("llama", num_key_value_heads=4), "transform", calibration=path)
    with pytest.raises(ValueError, match=r"the full-attention layers \[0, 1\], and this model \[0, 1, 2\]"):
        make_cache(tiny_model("llama", num_hidden_layers=3), "transform", calibration=path)
    with pytest.raises(ValueError, match=r"calibration=3 is not allowed .* what hf_kvcache.calibrate returns"):
        make_cache(model, "transform", calibration=3)


def test_bad_texts_are_refused(model, make_ids):
    with pytest.raises(ValueError, match="the text has 20 tokens: give at least 64, better 2,000"):
        calibrate(model, make_ids(1, 20))
    with pytest.raises(ValueError, match="token ids and a text were both given"):
        calibrate(model, make_ids(1, 100), text="a text")
    with pytest.raises(ValueError, match=r"token ids of shape \(2, 100\) and torch.int64 were given: give integers"):
        calibrate(model, make_ids(2, 100))
    with pytest.raises(ValueError, match="in training mode"):
        calibrate(model.train(), make_ids(1, 100))


def test_keys_that_are_not_finite_are_refused(model, make_ids):
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"layer 1 are not finite in torch\.float32: load"):
        calibrate(model, make_ids(1, 100))


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("jamba", {}, "no rotary embedding of the usual shape"),
        ("deepseek_v3", {}, "does not show them to its cache"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "changes with length",
        ),
    ],
)
def test_models_whose_keys_cannot_be_turned_are_refused_before_they_run(name, config, reason, tiny_model, make_ids):
    model = tiny_model(name, **config)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(NotImplementedError, match=reason):
        calibrate(model, make_ids(1, 100))
    with pytest.raises(NotImplementedError, match=r"turboquant|blocks"):
        make_cache(model, "transform", calibration=Calibration({}, num_tokens=0))


def test_the_default_is_measured_once_and_kept(model, own_home, monkeypatch):
    texts = []

    def find(name):
        texts.append(name)
        return _Tokenizer()

    monkeypatch.setattr(default.AutoTokenizer, "from_pretrained", find)
    model.config._name_or_path = model.name_or_path = "some/model"
    first = make_cache(model, "transform")
    make_cache(model, "transform")
    assert texts == ["some/model"]
    files = list((own_home / "calibrations").iterdir())
    assert [file.suffix for file in files] == [".safetensors"]
    default._loaded.clear()
    again = make_cache(model, "transform")
    assert texts == ["some/model"], "a second process would calibrate again"
    assert torch.equal(first.layers[0].codecs[0].analysis, again.layers[0].codecs[0].analysis)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= 1.01
    make_cache(model, "transform")
    assert len(texts) == 2, "other weights were taken for the same model"


@pytest.mark.parametrize("name", ["", "no/such-folder-here"])
def test_without_a_tokenizer_the_error_names_the_remedy(name, model, own_home, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model.name_or_path = name
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(ValueError, match=r"no tokenizer was found .* pass calibration=hf_kvcache\.calibrate\("):
        make_cache(model, "transform")


def test_a_folder_that_cannot_be_written_is_no_error(model, own_home, monkeypatch, caplog):
    monkeypatch.setattr(default, "_find_tokenizer", lambda *_: _Tokenizer())
    (own_home / "calibrations").write_text("a file where the folder should be")
    make_cache(model, "transform")
    assert "could not be kept" in caplog.text


def test_calibrating_in_inference_mode_measures_the_same(model, make_ids):
    expected = calibrate(model, make_ids(1, 100))
    with torch.inference_mode():
        got = calibrate(model, make_ids(1, 100))
    for index, statistics in expected.layers.items():
        assert all(torch.equal(*pair) for pair in zip(statistics, got.layers[index], strict=True))


def test_calibrating_leaves_the_model_and_its_rng_alone(model, make_ids):
    state = torch.random.get_rng_state()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    calibration = calibrate(model, make_ids(1, 100))
    make_cache(model, "transform", calibration=calibration)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
    assert hf_kvcache.is_enabled(), "make_cache enables; calibrating must not disable"
