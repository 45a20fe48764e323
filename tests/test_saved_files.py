"""Files of saved caches: what is refused and why, writing whole or not at all, sharing, devices, memory."""

import gc
import json
import os
import weakref

import pytest
import torch
from safetensors.torch import save_file

import hf_kvcache
from hf_kvcache import CACHE_ARG, load_cache, make_cache, saving, tensor_file
from hf_kvcache.layers.block_layer import BlockLayer
from hf_kvcache.layers.states import StateLayer
from hf_kvcache.tensor_file import TensorFile, TensorSpec, write_tensors

pytestmark = pytest.mark.core

OPTIONS = {"q_group_size": 16, "residual_length": 24}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


@pytest.fixture
def saved(path, tiny_model, make_ids, run):
    """A model, and the path of a cache that it filled."""
    model = tiny_model("llama")
    cache = make_cache(model, "int4", **OPTIONS)
    run(model, cache, make_ids(2, 90))
    cache.save(path)
    return model, path


def rewrite(path, **changes):
    """Write the file again, as a version of this library would that has other values in its header."""
    with TensorFile(path) as file:
        header = json.loads(file.metadata["hf_kvcache"]) | changes
        tensors = [file.read(name) for name in file.specs]
        write_tensors(path, {"hf_kvcache": json.dumps(header)}, file.specs, tensors)


# --- refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_key_value_heads": 4}, r"saved with num_key_value_heads=2 .* has num_key_value_heads=4"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers=2 .* num_hidden_layers=3"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, r"saved with rope_parameters=\{"),
        ({"rms_norm_eps": 1e-5}, r"rms_norm_eps"),
        ({"seed": 1}, r"other weights .* same checkpoint, adapters and quantization"),
    ],
    ids=str,
)
def test_another_model_is_refused(saved, tiny_model, config, message):
    with pytest.raises(ValueError, match=message):
        load_cache(tiny_model("llama", **config), saved[1])


def test_another_architecture_is_refused(saved, tiny_model):
    with pytest.raises(ValueError, match="and the model given has"):
        load_cache(tiny_model("qwen2"), saved[1])


def test_another_dtype_is_refused(saved):
    model, path = saved
    with pytest.raises(ValueError, match=r"saved with dtype='float32' .* has dtype='bfloat16'"):
        load_cache(model.to(torch.bfloat16), path)


def test_a_changed_adapter_is_refused(saved):
    model, path = saved
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight += 1e-3
    with pytest.raises(ValueError, match="other weights"):
        load_cache(model, path)


def test_what_no_key_depends_on_is_not_compared(saved):
    model, path = saved
    model.config.eos_token_id, model.config.use_cache = 5, False
    model.config.transformers_version = "5.99"
    assert load_cache(model, path).get_seq_length() == 90


@pytest.mark.parametrize("size", [0, 5, 300, -1, -40, -1000], ids=str)
def test_a_truncated_file_is_refused(saved, size):
    model, path = saved
    data = path.read_bytes()
    path.write_bytes(data[:size])
    with pytest.raises(ValueError, match="damaged"):
        load_cache(model, path)


def test_a_longer_file_is_refused(saved):
    model, path = saved
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=f"it has {size + 1} bytes of {size}"):
        load_cache(model, path)


def test_every_changed_byte_is_refused(saved):
    model, path = saved
    data = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    header = int.from_bytes(data[:8], "little")
    places = torch.randint(len(data), (60,), generator=generator).tolist()
    places += [*torch.randint(header, (40,), generator=generator).tolist(), len(data) - 1]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="damaged"):
            load_cache(model, path)


def test_formats_that_this_version_does_not_read(saved):
    model, path = saved
    rewrite(path, version=saving.FORMAT_VERSION + 1)
    with pytest.raises(ValueError, match=r"has format 5 and this version reads format 4: upgrade hf_kvcache"):
        load_cache(model, path)
    rewrite(path, version=0)
    with pytest.raises(ValueError, match="run the prompt again"):
        load_cache(model, path)


def test_a_technique_or_layer_that_does_not_exist_here(saved):
    model, path = saved
    rewrite(path, technique="int5", options={})
    with pytest.raises(ValueError, match="unknown cache technique 'int5'"):
        load_cache(model, path)
    rewrite(path, technique="blocks", options={})
    with pytest.raises(ValueError, match=r"holds layers .*CodedLayer.* builds .*BlockLayer.*: run the prompt again"):
        load_cache(model, path)


def test_planes_of_another_codec_are_refused(saved):
    model, path = saved
    rewrite(path, options=OPTIONS | {"value_bits": 8})
    with pytest.raises(ValueError, match=r"and torch.uint8 do not fit a layer of 2 heads x 256 of"):
        load_cache(model, path)


def test_other_files_are_refused(saved, tmp_path):
    model, _ = saved
    save_file({"a": torch.zeros(3)}, tmp_path / "weights")
    write_tensors(tmp_path / "other", {}, {}, [])
    (tmp_path / "text").write_text("a long text that is no safetensors file")
    for name in ("weights", "text"):
        with pytest.raises(ValueError, match="is not a file that hf_kvcache saved, or it is damaged"):
            load_cache(model, tmp_path / name)
    with pytest.raises(ValueError, match="a safetensors file, but not a cache"):
        load_cache(model, tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        load_cache(model, tmp_path / "none")


def test_max_bytes_holds_for_a_loaded_cache(saved):
    model, path = saved
    rewrite(path, options=OPTIONS | {"max_bytes": 1000})
    with pytest.raises(RuntimeError, match="max_bytes=1000"):
        load_cache(model, path)


@pytest.mark.parametrize("name", ["int4", "sliding_window"])
def test_not_in_the_middle_of_a_forward(name, path, tiny_model):
    model = tiny_model("llama")
    cache = make_cache(model, name, **(OPTIONS if name == "int4" else {}))
    states = torch.zeros(1, 2, 3, 16)
    cache.layers[0].update(states, states, kwargs={})
    with pytest.raises(RuntimeError, match="layer 0 holds tokens that no attention call has taken yet"):
        cache.save(path)
    assert not path.exists()


def test_the_model_must_still_exist(path, tiny_model):
    model = tiny_model("llama")
    cache = make_cache(model)
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="the model that this cache was built for does not exist"):
        cache.save(path)


def test_options_that_are_objects_cannot_be_saved(path, tiny_model):
    model = tiny_model("llama")
    cache = make_cache(model)
    cache.recipe.options["block_size"] = object()
    with pytest.raises(NotImplementedError, match=r"a cache made with block_size=<object .* cannot be saved"):
        cache.save(path)
    assert not path.exists()


def test_a_layer_that_does_not_say_all_it_holds_cannot_be_saved(path, tiny_model):
    class Forgetful(BlockLayer):
        def fork(self):
            return super().fork()

    model = tiny_model("llama")
    cache = make_cache(model)
    cache.layers[1] = Forgetful(cache.layers[1].context)
    with pytest.raises(NotImplementedError, match="layers of type Forgetful cannot be saved"):
        cache.save(path)


# --- writing


def test_a_failed_save_leaves_the_old_file(saved, make_ids, run, monkeypatch):
    model, path = saved
    old = path.read_bytes()
    cache = load_cache(model, path)
    run(model, cache, make_ids(2, 5))
    digest, calls = tensor_file._digest, []

    def fail_in_the_middle(data):
        calls.append(data)
        if len(calls) == 7:
            raise OSError(28, os.strerror(28))
        return digest(data)

    monkeypatch.setattr(tensor_file, "_digest", fail_in_the_middle)
    with pytest.raises(OSError, match="No space left"):
        cache.save(path)
    monkeypatch.undo()
    assert os.listdir(path.parent) == [path.name]
    assert path.read_bytes() == old
    cache.save(path)
    assert load_cache(model, path).get_seq_length() == 95
    assert os.listdir(path.parent) == [path.name]


def test_the_same_cache_gives_the_same_bytes(saved, tmp_path):
    model, path = saved
    load_cache(model, path).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_tensors_of_all_dtypes_and_shapes(path):
    dtypes = [*tensor_file._DTYPES.values()]
    tensors = [torch.arange(6).view(2, 3).T.to(dtype) for dtype in dtypes] + [torch.zeros(0, 5), torch.tensor(3)]
    specs = {str(index): TensorSpec.of(tensor) for index, tensor in enumerate(tensors)}
    write_tensors(path, {}, specs, tensors)
    with TensorFile(path) as file:
        for name, tensor in zip(specs, tensors, strict=True):
            got = file.read(name)
            assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(got.double(), tensor.double())


# --- what is loaded


def test_an_empty_cache(path, tiny_model, make_ids, run):
    for name in ("llama", "falcon_h1"):
        model = tiny_model(name)
        make_cache(model, "int4", **OPTIONS).save(path)
        loaded = load_cache(model, path)
        assert loaded.get_seq_length() == 0
        ids = make_ids(1, 9)
        assert torch.equal(run(model, loaded, ids), run(model, make_cache(model, "int4", **OPTIONS), ids))


def test_shared_blocks_are_written_once_and_shared_again(path, tiny_model, make_ids, run):
    model = tiny_model("llama")
    cache = make_cache(model, "blocks", block_size=4)
    run(model, cache, make_ids(1, 160))
    cache.save(path)
    single = path.stat().st_size
    cache.batch_repeat_interleave(5)
    cache.save(path)
    assert path.stat().st_size < 1.05 * single + 5 * 2 * 4 * 40 + 2000  # the tokens once, a block table five times
    loaded = load_cache(model, path)
    assert loaded.report().shared_bytes == cache.report().shared_bytes == 4 * 160 * 2 * 2 * 2 * 16 * 4
    rest = make_ids(5, 8, seed=1)
    assert torch.equal(run(model, loaded, rest, chunks=[1] * 8), run(model, cache, rest, chunks=[1] * 8))
    assert loaded.report().shared_bytes > 0


def test_a_fork_saves_its_own_blocks_only(path, tiny_model, make_ids, run):
    model = tiny_model("llama")
    cache = make_cache(model, "blocks")
    run(model, cache, make_ids(1, 16))
    fork = cache.fork()
    run(model, cache, make_ids(1, 800, seed=1))
    run(model, fork, make_ids(1, 3, seed=2))
    fork.save(path)
    loaded = load_cache(model, path)
    assert path.stat().st_size < 30_000
    assert loaded.report().reserved_bytes < 0.1 * fork.report().reserved_bytes
    torch.testing.assert_close(run(model, loaded, make_ids(1, 5)), run(model, fork, make_ids(1, 5)))


def test_loading_in_inference_mode_and_writing_after(saved, make_ids, run):
    model, path = saved
    with torch.inference_mode():
        loaded = load_cache(model, path)
        run(model, loaded, make_ids(2, 3))
    again = load_cache(model, path)
    ids = torch.cat([make_ids(2, 3), make_ids(2, 40, seed=1)], 1)
    expected = run(model, again, ids, chunks=[3] + [1] * 40)
    assert torch.equal(run(model, loaded, ids[:, 3:], chunks=[1] * 40), expected[:, 3:])


def test_device_is_where_the_cache_goes(saved):
    model, path = saved
    loaded = load_cache(model, path, device="meta")
    layer = loaded.layers[0]
    tensors = (*layer.coded.arena.planes, *layer.table.arena.planes, *layer.sinks.states, layer.sinks.first_slot)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert load_cache(model, path).layers[0].device.type == "cpu"


def test_loading_holds_one_layer_of_the_file_at_a_time(path, tiny_model, monkeypatch):
    model = tiny_model("llama", num_hidden_layers=8)
    cache = make_cache(model, "blocks")
    for layer in cache.layers:
        layer.fill(torch.zeros(1, 2, 4000, 16), torch.zeros(1, 2, 4000, 16))
    one_layer = 4000 * 2 * 16 * 4 * 2
    cache.save(path)
    total = hf_kvcache.measure(cache)
    read, refs, alive = TensorFile.read, [], []

    def read_and_count(self, name):
        tensor = read(self, name)
        refs.append(weakref.ref(tensor))
        alive.append(sum(ref().nbytes for ref in refs if ref() is not None))
        return tensor

    monkeypatch.setattr(TensorFile, "read", read_and_count)
    loaded = load_cache(model, path)
    assert hf_kvcache.measure(loaded) == total
    assert len(alive) == 8 * 3
    assert max(alive) < 1.01 * one_layer


def test_a_prompt_is_still_checked(saved, make_ids):
    model, path = saved
    with pytest.raises(ValueError, match="the cache holds another text than this prompt"):
        model.generate(make_ids(2, 95, seed=4), max_new_tokens=2, **{CACHE_ARG: load_cache(model, path)})


def test_convolution_states_keep_their_recorded_past():
    layer, loaded = StateLayer(), StateLayer()
    layer.activate_past_recording()
    for seed in range(2):
        states = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(seed))
        layer.update_conv_state(states, conv_kernel_size=4)
    loaded.load_state(layer.state(), torch.device("cpu"))
    for each in (layer, loaded):
        each.crop(-5)
    assert torch.equal(loaded.conv_states[0], layer.conv_states[0])
    assert loaded.can_crop(1)
