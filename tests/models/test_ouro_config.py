"""Reading Ouro's config.json."""

import dataclasses
import json

import pytest

from rlt_jax.checkpoints_convert.tensors import expected_tensors, parameter_count
from rlt_jax.models.ouro_config import OuroConfig

# As ByteDance/Ouro-1.4B's config.json has them.
RELEASED = {
    "architectures": ["OuroForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"},
    "bos_token_id": 1,
    "early_exit_threshold": 1.0,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "layer_types": ["full_attention"] * 24,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "model_type": "ouro",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "total_ut_steps": 4,
    "transformers_version": "4.55.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 49152,
}


def read(**changes):
    """The released config with some keys changed; a value of ... removes the key."""
    raw = RELEASED | changes
    return OuroConfig.from_dict({key: value for key, value in raw.items() if value is not ...})


def test_released_config_is_read_in_full():
    assert dataclasses.asdict(read()) == {
        "vocab_size": 49152,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 65536,
        "total_ut_steps": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "pad_token_id": None,
    }


@pytest.mark.parametrize("absent", [..., None])
def test_head_dim_is_derived_when_absent(absent):
    assert read(head_dim=absent).head_dim == 128
    assert read(head_dim=absent, num_attention_heads=8, num_key_value_heads=8).head_dim == 256
    assert read(head_dim=64).head_dim == 64  # given: not derived


@pytest.mark.parametrize("absent", [..., None])
def test_kv_heads_are_as_many_as_heads_when_absent(absent):
    assert read(num_key_value_heads=absent).num_key_value_heads == 16
    assert read(num_key_value_heads=4).num_key_value_heads == 4


@pytest.mark.parametrize(
    "changes, theta",
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 2e4}}, 2e4),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 7}}, 7),
        ({"rope_theta": 3e5, "rope_parameters": {"rope_type": "default"}}, 3e5),
        ({"rope_theta": 3e5, "rope_parameters": {"rope_theta": 3e5}}, 3e5),
        ({"rope_theta": 3e5, "rope_parameters": None}, 3e5),
    ],
)
def test_rope_theta_in_both_spellings(changes, theta):
    assert read(**changes).rope_theta == theta


@pytest.mark.parametrize(
    "eos, expected", [(2, (2,)), ([2, 7], (2, 7)), ([], ()), (None, ()), (..., ())]
)
def test_end_tokens_may_be_one_or_many(eos, expected):
    assert read(eos_token_id=eos).eos_token_ids == expected


@pytest.mark.parametrize(
    "key, value",
    [
        ("_name_or_path", "/somewhere"),
        ("architectures", None),
        ("dtype", "float32"),
        ("torch_dtype", "float64"),
        ("initializer_range", 7),
        ("transformers_version", "9"),
        ("use_cache", False),
    ],
)
def test_metadata_changes_nothing(key, value):
    assert read(**{key: value}) == read(**{key: ...}) == read()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, ["rope_scaling", "yarn"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters.rope_type", "linear"]),
        ({"rope_parameters": {"factor": 2.0}}, ["rope_parameters.factor", "2.0"]),
        ({"rope_parameters": {"rope_theta": 1e4}}, ["rope_theta", "disagrees", "10000.0"]),
        ({"rope_parameters": [1]}, ["rope_parameters", "[1]", "object"]),
        ({"rope_theta": 0}, ["rope_theta = 0", "> 0"]),
        ({"rope_theta": ...}, ["rope_theta = None", "must give it"]),
        ({"rope_theta": ..., "rope_parameters": {}}, ["rope_theta = None", "must give it"]),
        ({"rope_theta": "1e6"}, ["rope_theta = '1e6'", "number"]),
        ({"rope_theta": float("inf")}, ["rope_theta = inf", "finite"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps = 0", "> 0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps = nan"]),
        ({"sliding_window": 4096}, ["sliding_window = 4096"]),
        ({"use_sliding_window": True}, ["use_sliding_window = True"]),
        ({"layer_types": ["sliding_attention"] * 24}, ["layer_types", "full_attention"]),
        ({"layer_types": ["full_attention"] * 23}, ["layer_types", "24 entries"]),
        ({"layer_types": "full_attention"}, ["layer_types"]),
        ({"layer_types": [["full_attention"]] * 24}, ["layer_types"]),
        ({"attention_bias": True}, ["attention_bias = True", "biases"]),
        ({"mlp_bias": True}, ["mlp_bias = True", "biases"]),
        ({"attention_dropout": 0.1}, ["attention_dropout = 0.1"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
        ({"hidden_act": None}, ["hidden_act = None", "silu"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings = True"]),
        ({"model_type": "llama"}, ["model_type = 'llama'", "ouro"]),
        ({"num_key_value_heads": 5}, ["num_key_value_heads = 5", "num_attention_heads = 16"]),
        ({"num_key_value_heads": 32}, ["num_key_value_heads = 32", "num_attention_heads = 16"]),
        ({"head_dim": ..., "num_attention_heads": 15}, ["hidden_size = 2048", "15"]),
        ({"head_dim": 127}, ["head_dim = 127", "even"]),
        ({"head_dim": ..., "num_attention_heads": 0}, ["num_attention_heads = 0", ">= 1"]),
        ({"hidden_size": 0}, ["hidden_size = 0", ">= 1"]),
        ({"hidden_size": -1, "head_dim": ...}, ["hidden_size = -1", ">= 1"]),
        ({"vocab_size": 2.5}, ["vocab_size = 2.5", "integer"]),
        ({"total_ut_steps": True}, ["total_ut_steps = True", "integer"]),
        ({"total_ut_steps": ...}, ["total_ut_steps = None", "must give this key"]),
        ({"vocab_size": None}, ["vocab_size = None", "must give this key"]),
        ({"bos_token_id": 49152}, ["bos_token_id = 49152", "<= 49151"]),
        ({"eos_token_id": -1}, ["eos_token_id[0] = -1", ">= 0"]),
        ({"eos_token_id": [2, 50000]}, ["eos_token_id[1] = 50000", "<= 49151"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id[0] = '</s>'", "integer"]),
        ({"eos_token_id": [None]}, ["eos_token_id[0] = None", "integer"]),
        ({"pad_token_id": 1.0}, ["pad_token_id = 1.0", "integer"]),
        ({"early_exit_threshold": 1.5}, ["early_exit_threshold = 1.5", "[0, 1]"]),
        ({"num_experts": 8}, ["num_experts = 8", "unknown key"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "unknown key"]),
    ],
)
def test_what_cannot_be_honoured_is_refused(changes, words):
    with pytest.raises(ValueError) as caught:
        read(**changes)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


@pytest.mark.parametrize("raw", [[], None, "ouro", 3])
def test_config_must_be_an_object(raw):
    with pytest.raises(ValueError, match="must be a JSON object"):
        OuroConfig.from_dict(raw)


def test_file_errors_name_the_file(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        OuroConfig.from_json_file(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read as JSON"):
        OuroConfig.from_json_file(path)
    path.write_text(json.dumps(RELEASED | {"hidden_act": "gelu"}))
    with pytest.raises(ValueError, match=r"config\.json: hidden_act = 'gelu'"):
        OuroConfig.from_json_file(path)
    path.write_text(json.dumps(RELEASED))
    assert OuroConfig.from_json_file(path) == read()


@pytest.mark.parametrize("steps, expected", [(None, 4), (4, 4), (3, 3), (1, 1)])
def test_fewer_loops_can_be_asked_for(steps, expected):
    config = read().with_total_ut_steps(steps)
    assert config == dataclasses.replace(read(), total_ut_steps=expected)


@pytest.mark.parametrize("steps", [5, 0, -1, 2.0, True, "3"])
def test_more_loops_than_trained_are_refused(steps):
    with pytest.raises(ValueError, match=r"total_ut_steps = .*>= 1 and <= 4"):
        read().with_total_ut_steps(steps)


@pytest.mark.parametrize(
    "layers, tensors, parameters", [(24, 269, 1_434_652_673), (48, 533, 2_667_974_657)]
)
def test_tensor_and_parameter_counts_of_the_released_shapes(layers, tensors, parameters):
    """Per layer 4 x 2048^2 + 3 x 2048 x 5632 + 4 x 2048; 2 x 49152 x 2048, 2048, 2049 besides."""
    config = read(num_hidden_layers=layers, layer_types=...)
    assert len(expected_tensors(config)) == tensors
    assert parameter_count(config) == parameters
    layer = 4 * 2048**2 + 3 * 2048 * 5632 + 4 * 2048
    assert parameters == layers * layer + 2 * 49152 * 2048 + 2048 + 2049
