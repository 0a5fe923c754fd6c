"""Writes a small, randomly initialised Ouro checkpoint in Hugging Face's layout.

    python examples/make_random_checkpoint.py /tmp/ouro-random --layers 4 --hidden 256

The folder holds config.json, model.safetensors and a byte-level tokenizer with a chat template:
everything that `rlt-jax generate` and `convert` need. The weights are drawn at a healthy
scale (matrices N(0, 1/in), norms near 1, the embedding N(0, 1)) and the exit gate so that hazards
spread over about 0.1 to 0.8: text is nonsense, but depths vary.
"""

import argparse
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rlt_jax.checkpoints_convert.tensors import TensorSpec, expected_tensors
from rlt_jax.models.ouro_config import OuroConfig

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BYTES_VOCAB_SIZE = 320  # 3 special tokens, 256 bytes, 61 reserved

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

GATE_SPREAD, GATE_BIAS = 1.5, -0.5
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}


def make_random_checkpoint(
    destination: str | Path,
    *,
    hidden: int = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 64,
    intermediate: int = 704,
    vocab: int = BYTES_VOCAB_SIZE,
    loops: int = 4,
    max_positions: int = 2048,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Path:
    """Writes the checkpoint into a new or empty folder and returns its path.

    kv_heads: None is as many as heads. vocab: at least 259 (every byte and 3 special tokens).
    dtype: "bfloat16", "float32" or "float16". The same arguments give the same bytes.
    """
    destination = Path(destination)
    raw = {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "total_ut_steps": loops,
        "early_exit_threshold": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": dtype,
    }
    config = OuroConfig.from_dict(raw)
    tokenizer = byte_level_tokenizer(vocab)
    if destination.exists() and any(destination.iterdir()):
        raise ValueError(f"{destination}: already exists and is not empty")
    destination.mkdir(parents=True, exist_ok=True)

    generator = np.random.Generator(np.random.Philox(seed))
    tensors = {
        name: draw_tensor(spec, generator).astype(DTYPES[dtype])
        for name, spec in expected_tensors(config).items()
    }
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(destination / "tokenizer.json"))
    for name, content in {
        "config.json": raw,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_positions,
            "chat_template": CHAT_TEMPLATE,
        },
    }.items():
        (destination / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return destination


def draw_tensor(spec: TensorSpec, generator: np.random.Generator) -> np.ndarray:
    """One tensor in float32 at the scale that its role asks for."""
    noise = generator.standard_normal(spec.shape, dtype=np.float32)
    if spec.name == "model.early_exit_gate.bias":
        return np.full(spec.shape, GATE_BIAS, np.float32)
    if spec.name == "model.embed_tokens.weight":
        return noise
    if len(spec.shape) == 1:  # a norm
        return 1 + 0.1 * noise
    spread = GATE_SPREAD if spec.name == "model.early_exit_gate.weight" else 1.0
    return noise * np.float32(spread / math.sqrt(spec.shape[-1]))


def byte_level_tokenizer(vocab_size: int = BYTES_VOCAB_SIZE) -> Tokenizer:
    """One token per UTF-8 byte: any text encodes, and decodes to itself.

    Ids 0 to 2 are special, 3 to 258 are bytes, those above are reserved special tokens.
    """
    special = [END_OF_TEXT, IM_START, IM_END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    reserved = [f"<|reserved_{i}|>" for i in range(vocab_size - len(special) - len(alphabet))]
    smallest = len(special) + len(alphabet)
    if vocab_size < smallest:
        raise ValueError(f"vocab = {vocab_size}: must be at least {smallest}")
    names = [*special, *alphabet, *reserved]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special + reserved]
    )
    return tokenizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("destination", type=Path, help="a new or empty folder")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=None, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=704, help="MLP width")
    parser.add_argument(
        "--vocab",
        type=lambda text: BYTES_VOCAB_SIZE if text == "bytes" else int(text),
        default=BYTES_VOCAB_SIZE,
        help=f"'bytes' ({BYTES_VOCAB_SIZE}), or a size of at least 259",
    )
    parser.add_argument("--loops", type=int, default=4, help="total_ut_steps")
    parser.add_argument("--max-positions", type=int, default=2048)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(arguments))
    try:
        print(make_random_checkpoint(**options))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
