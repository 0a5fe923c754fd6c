"""Loading: the right values in the right dtype, straight to where they belong."""

import json
import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.make_random_checkpoint import make_random_checkpoint
from rlt_jax.checkpoints_convert import (
    CheckpointError,
    convert,
    load_params,
    open_checkpoint,
    unfuse,
)
from rlt_jax.checkpoints_convert.safetensors_folder import HuggingFaceFolder
from rlt_jax.models.ouro import DTypePolicy, abstract_params

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@pytest.fixture(params=["huggingface", "orbax"])
def folder(request, tiny_source, tiny_converted):
    return {"huggingface": tiny_source, "orbax": tiny_converted}[request.param]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tree_is_the_one_that_the_model_declares(folder, dtype):
    checkpoint = open_checkpoint(folder)
    params = load_params(checkpoint, DTypePolicy(dtype))
    expected = abstract_params(checkpoint.config, DTypePolicy(dtype))
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for leaf, abstract in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (abstract.shape, abstract.dtype)


def test_rows_are_fused_in_the_order_that_the_model_expects(folder, tiny_source):
    tensors = load_file(tiny_source / "model.safetensors")
    params = load_params(open_checkpoint(folder), DTypePolicy("bfloat16"))
    layer = params.layers[1]

    def get(name):
        return tensors[f"model.layers.1.{name}.weight"]

    np.testing.assert_array_equal(layer.wqkv[:64], get("self_attn.q_proj"))  # 4 heads x 16
    np.testing.assert_array_equal(layer.wqkv[64:96], get("self_attn.k_proj"))  # 2 heads x 16
    np.testing.assert_array_equal(layer.wqkv[96:], get("self_attn.v_proj"))
    np.testing.assert_array_equal(layer.wo, get("self_attn.o_proj"))
    np.testing.assert_array_equal(layer.w_gate_up[:48], get("mlp.gate_proj"))
    np.testing.assert_array_equal(layer.w_gate_up[48:], get("mlp.up_proj"))
    np.testing.assert_array_equal(layer.w_down, get("mlp.down_proj"))
    np.testing.assert_array_equal(layer.norms[0], get("input_layernorm"))
    np.testing.assert_array_equal(layer.norms[1], get("input_layernorm_2"))
    np.testing.assert_array_equal(layer.norms[2], get("post_attention_layernorm"))
    np.testing.assert_array_equal(layer.norms[3], get("post_attention_layernorm_2"))
    np.testing.assert_array_equal(params.embed, tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params.lm_head, tensors["lm_head.weight"])
    np.testing.assert_array_equal(params.norm, tensors["model.norm.weight"])
    np.testing.assert_array_equal(params.gate_weight, tensors["model.early_exit_gate.weight"][0])
    np.testing.assert_array_equal(params.gate_bias, tensors["model.early_exit_gate.bias"][0])


@pytest.mark.parametrize("kind", ["huggingface", "orbax"])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_dtype_is_cast_once_to_the_policy(
    source, edit_tensors, tmp_path, kind, stored, dtype
):
    edit_tensors(source, lambda t: t.update({n: a.astype(DTYPES[stored]) for n, a in t.items()}))
    tensors = load_file(source / "model.safetensors")
    folder = convert(source, tmp_path / "out").folder if kind == "orbax" else source
    params = load_params(open_checkpoint(folder), DTypePolicy(dtype))
    for leaf, name in [
        (params.embed, "model.embed_tokens.weight"),
        (params.layers[0].wo, "model.layers.0.self_attn.o_proj.weight"),
        (params.layers[0].norms[0], "model.layers.0.input_layernorm.weight"),
    ]:
        np.testing.assert_array_equal(leaf, tensors[name].astype(DTYPES[dtype]))


def test_unfuse_is_the_inverse_of_loading(folder):
    checkpoint = open_checkpoint(folder)
    params = load_params(checkpoint, DTypePolicy("bfloat16"))
    seen = set()
    for item, tensors in unfuse(checkpoint.config, params):
        expected = checkpoint.read_item(item)
        assert list(tensors) == list(expected)
        for name, array in tensors.items():
            assert array.dtype == expected[name].dtype
            np.testing.assert_array_equal(array, expected[name])
        seen |= set(tensors)
    assert seen == set(checkpoint.tensors)


def test_parameters_do_not_alias_the_file(source):
    """A later write to the checkpoint must not reach into a running model."""
    path = source / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    padding = -(8 + length) % 64  # JAX shares aligned host memory on the CPU
    header = data[8 : 8 + length] + b" " * padding
    path.write_bytes((length + padding).to_bytes(8, "little") + header + data[8 + length :])
    params = load_params(open_checkpoint(source), DTypePolicy("bfloat16"))
    before = jax.tree.map(lambda leaf: np.array(leaf), params)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_one_item_is_held_on_the_host_at_a_time(tiny_source, monkeypatch):
    held = []

    def read_item(self, item):
        assert not [ref for ref in held if ref() is not None], f"held while {item} is read"
        tensors = original(self, item)
        held.extend(weakref.ref(array) for array in tensors.values())
        return tensors

    original = HuggingFaceFolder.read_item
    monkeypatch.setattr(HuggingFaceFolder, "read_item", read_item)
    load_params(open_checkpoint(tiny_source))
    assert len(held) == 1 + 2 * 11 + 4


def test_item_that_vanishes_before_it_is_read_has_a_clear_error(converted):
    checkpoint = open_checkpoint(converted)
    (converted / "items" / "layers.01").rename(converted / "items" / "gone")
    with pytest.raises(CheckpointError, match=r"items/layers\.01: cannot be read by Orbax"):
        load_params(checkpoint)


def test_weight_file_that_shrinks_before_it_is_read_has_a_clear_error(source):
    checkpoint = open_checkpoint(source)
    os.truncate(source / "model.safetensors", 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* cannot be read"):
        load_params(checkpoint)


FRESH_PROCESS = """
import json, sys, time
from rlt_jax.checkpoints_convert import load_params, open_checkpoint
from rlt_jax.models.ouro import DTypePolicy, OuroLayerParams, OuroParams
import jax
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
jax.block_until_ready(jax.device_put(0.0))
if sys.argv[2] == "orbax":
    import orbax.checkpoint
start = time.perf_counter()
checkpoint = open_checkpoint(sys.argv[1])
params = load_params(checkpoint, DTypePolicy("float32"))
seconds = time.perf_counter() - start
jax_devices = jax.devices()

def placed(params):
    shards = [(s.device.id, s.data.nbytes) for leaf in jax.tree.leaves(params)
              for s in leaf.addressable_shards]
    return [sum(size for d, size in shards if d == i) for i in range(len(jax_devices))]

report = {"seconds": seconds, "default": placed(params)}
report["orbax"] = any(name.split(".")[0] == "orbax" for name in sys.modules)
report["one"] = placed(load_params(checkpoint, sharding=SingleDeviceSharding(jax_devices[2])))
with jax.default_device(jax_devices[3]):
    report["default_device"] = placed(load_params(checkpoint))
mesh = jax.make_mesh((4,), ("x",))
rows, columns, whole = (NamedSharding(mesh, p) for p in (P("x"), P(None, "x"), P()))
layer = OuroLayerParams(wqkv=rows, wo=columns, w_gate_up=rows, w_down=columns, norms=columns)
sharding = OuroParams(embed=rows, layers=(layer,) * checkpoint.config.num_hidden_layers,
                      norm=rows, gate_weight=rows, gate_bias=whole, lm_head=rows)
sharded = load_params(checkpoint, sharding=sharding)
report["sharded"] = placed(sharded)
report["prefix"] = placed(load_params(checkpoint, sharding=sharding.replace(layers=columns)))
report["equal"] = all(jax.tree.leaves(jax.tree.map(
    lambda a, b: bool((jax.device_get(a) == jax.device_get(b)).all()), params, sharded)))
print(json.dumps(report))
"""


@pytest.fixture(params=["huggingface", "orbax"], scope="module")
def fresh_process(request, tmp_path_factory):
    """What a new process with four devices reports; see FRESH_PROCESS."""
    folder = make_random_checkpoint(tmp_path_factory.mktemp("fresh") / "source")
    if request.param == "orbax":
        folder = convert(folder, folder.parent / "converted").folder
    result = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(folder), request.param],
        capture_output=True,
        text=True,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    )
    assert result.returncode == 0, result.stderr
    abstract = abstract_params(open_checkpoint(folder).config, DTypePolicy("float32"))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    return request.param, json.loads(result.stdout), size


def test_by_default_only_the_default_device_holds_anything(fresh_process):
    _, report, size = fresh_process
    assert report["default"] == [size, 0, 0, 0]
    assert report["default_device"] == [0, 0, 0, size]


def test_a_single_device_sharding_is_followed(fresh_process):
    _, report, size = fresh_process
    assert report["one"] == [0, 0, size, 0]


@pytest.mark.parametrize("key", ["sharded", "prefix"])
def test_sharded_leaves_are_split_never_replicated(fresh_process, key):
    _, report, size = fresh_process
    bias = jnp.dtype("float32").itemsize  # the only leaf that was asked for everywhere
    assert report[key] == [(size - bias) // 4 + bias] * 4
    assert report["equal"]


def test_only_an_orbax_folder_needs_orbax(fresh_process):
    kind, report, _ = fresh_process
    assert report["orbax"] == (kind == "orbax")


def test_a_small_model_loads_in_two_seconds(fresh_process):
    _, report, _ = fresh_process
    assert report["seconds"] < 2
