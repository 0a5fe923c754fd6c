"""Ouro checkpoints for tests (NumPy): shapes, small random ones, writing them as HF folders."""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def head_shape(config: dict) -> tuple[int, int, int]:
    """(query heads, key/value heads, head_dim), derived where the config does not say."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return heads, kv_heads, config.get("head_dim") or config["hidden_size"] // heads


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint."""
    d, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, head_dim = head_shape(config)
    layer = {
        "self_attn.q_proj": (heads * head_dim, d),
        "self_attn.k_proj": (kv_heads * head_dim, d),
        "self_attn.v_proj": (kv_heads * head_dim, d),
        "self_attn.o_proj": (d, heads * head_dim),
        "mlp.gate_proj": (mlp, d),
        "mlp.up_proj": (mlp, d),
        "mlp.down_proj": (d, mlp),
        "input_layernorm": (d,),
        "input_layernorm_2": (d,),
        "post_attention_layernorm": (d,),
        "post_attention_layernorm_2": (d,),
    }
    shapes = {"model.embed_tokens.weight": (vocab, d)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {
        "model.norm.weight": (d,),
        "model.early_exit_gate.weight": (1, d),
        "model.early_exit_gate.bias": (1,),
        "lm_head.weight": (vocab, d),
    }


# Gains over the scale that keeps unit variance: sharp attention (a flat one averages the context
# away and the text repeats), logits with clear winners, hazards spread over most of 0..1.
GAINS = {"q_proj": 4.0, "lm_head": 3.0, "early_exit_gate": 1.2}


def random_ouro(config_overrides: dict | None = None, seed: int = 0) -> tuple[dict, dict]:
    """A small random checkpoint (config, f32 arrays) whose text and exit depths both vary."""
    config = {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "total_ut_steps": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **(config_overrides or {}),
    }
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        x = rng.standard_normal(shape)
        if name == "model.early_exit_gate.bias":
            x = x * 0 - 1.0
        elif "norm" in name:
            # Small steps between normalisations: large ones would drown the token's embedding and
            # with it the variety of the text.
            x = (0.3 if "layernorm_2" in name else 1.0) * (1 + 0.1 * x)
        elif name != "model.embed_tokens.weight":
            part = name.split(".")[-2]
            x = x * GAINS.get(part, 1.0) / math.sqrt(shape[1])
        tensors[name] = x.astype(np.float32)
    return config, tensors


def write_hf_folder(folder: str | Path, config: dict, tensors: dict, shards: int = 1) -> Path:
    """Write config.json and model.safetensors, or `shards` files with an index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    size = sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder
