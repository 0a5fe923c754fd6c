"""What training leaves behind: the state to resume from, and the model for everyone else."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from examples.make_random_checkpoint import CHAT_TEMPLATE, END_OF_TEXT, byte_level_tokenizer
from examples.train_tiny.batch import END_ID
from rlt_jax.checkpoints_convert.fuse import unfuse
from rlt_jax.models.ouro import OuroParams
from rlt_jax.models.ouro_config import OuroConfig


def save_tree(path: Path, tree) -> None:
    """Every leaf into one .npz, which is replaced whole or not at all."""
    leaves = jax.device_get(jax.tree.leaves(tree))
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **{f"{index:04d}": leaf for index, leaf in enumerate(leaves)})
    partial.replace(path)


def load_tree(path: Path, like):
    """The tree that save_tree wrote; `like` gives its structure and shapes."""
    leaves, structure = jax.tree.flatten(like)
    with np.load(path) as arrays:
        loaded = [arrays[name] for name in sorted(arrays.files)]
    if [np.shape(leaf) for leaf in leaves] != [leaf.shape for leaf in loaded]:
        raise ValueError(f"{path}: written by a training run of another model or optimizer")
    return jax.tree.unflatten(structure, [jax.numpy.asarray(leaf) for leaf in loaded])


def raw_config(config: OuroConfig) -> dict:
    """config.json of the model."""
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "total_ut_steps": config.total_ut_steps,
        "early_exit_threshold": 1.0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "torch_dtype": "bfloat16",
    }


def export(config: OuroConfig, params: OuroParams, folder: Path) -> None:
    """Writes the model in bfloat16 in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for _, item in unfuse(config, jax.device_get(params)):
        tensors |= {name: np.array(a, ml_dtypes.bfloat16) for name, a in item.items()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    byte_level_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))
    for name, content in {
        "config.json": raw_config(config),
        "generation_config.json": {"bos_token_id": END_ID, "eos_token_id": END_ID},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
