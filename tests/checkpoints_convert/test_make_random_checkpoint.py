import json
import math

import jinja2
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from examples.make_random_checkpoint import byte_level_tokenizer, main, make_random_checkpoint
from rlt_jax.checkpoints_convert import open_checkpoint
from rlt_jax.checkpoints_convert.tensors import expected_tensors


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world",
        "  two  spaces\tand\n\nnewlines ",
        "naïve café, 東京, 👩‍🚀 \u202e rtl",
        "".join(map(chr, range(256))),
        "\x00\ufffd",
        "",
    ],
)
def test_any_text_round_trips_at_one_token_per_byte(text, tiny_source):
    tokenizer = Tokenizer.from_file(str(tiny_source / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_their_ids_and_every_id_has_a_name(tiny_source):
    tokenizer = Tokenizer.from_file(str(tiny_source / "tokenizer.json"))
    assert tokenizer.encode("<|endoftext|>a<|im_start|><|im_end|>").ids[0] == 0
    assert [tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>")] == [1, 2]
    vocab_size = json.loads((tiny_source / "config.json").read_text())["vocab_size"]
    assert tokenizer.get_vocab_size() == vocab_size
    assert all(tokenizer.id_to_token(i) for i in range(vocab_size))


def test_chat_template_writes_chatml(tiny_source):
    config = json.loads((tiny_source / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|endoftext|>"
    text = jinja2.Template(config["chat_template"]).render(
        messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_weights_have_a_healthy_scale(tmp_path):
    folder = make_random_checkpoint(tmp_path / "m", layers=1, dtype="float32", seed=3)
    tensors = load_file(folder / "model.safetensors")
    for name, spec in expected_tensors(open_checkpoint(folder).config).items():
        values = tensors[name]
        if name.endswith("norm.weight") or "layernorm" in name:
            assert abs(values.mean() - 1) < 0.05, name
        elif name == "model.embed_tokens.weight":
            assert abs(values.std() - 1) < 0.05
        elif "gate.weight" in name and "mlp" not in name:
            assert 1 < values.std() * math.sqrt(values.size) < 2
        elif values.ndim == 2:
            assert abs(values.std() * math.sqrt(spec.shape[-1]) - 1) < 0.05, name


def test_gate_spreads_the_hazards(tmp_path):
    folder = make_random_checkpoint(tmp_path / "m", layers=1, dtype="float32")
    tensors = load_file(folder / "model.safetensors")
    hidden = np.random.default_rng(0).standard_normal((1000, 256))  # rms 1, as the norm leaves it
    logits = hidden @ tensors["model.early_exit_gate.weight"][0]
    hazards = 1 / (1 + np.exp(-(logits + tensors["model.early_exit_gate.bias"])))
    low, high = np.quantile(hazards, [0.1, 0.9])
    assert low < 0.15 and high > 0.7


def test_same_seed_same_bytes_and_another_seed_others(tmp_path):
    one, same, other = (
        make_random_checkpoint(tmp_path / name, hidden=32, layers=1, seed=seed)
        for name, seed in [("one", 1), ("same", 1), ("other", 2)]
    )
    weights = [(f / "model.safetensors").read_bytes() for f in (one, same, other)]
    assert weights[0] == weights[1] != weights[2]


def test_command_line_sets_the_sizes(tmp_path, capsys):
    folder = tmp_path / "m"
    sizes = "--hidden 32 --layers 3 --heads 4 --kv-heads 2 --head-dim 8 --intermediate 40"
    more = "--vocab 300 --loops 3 --max-positions 99 --dtype float32 --seed 5"
    main([str(folder), *sizes.split(), *more.split()])
    assert capsys.readouterr().out.strip() == str(folder)
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (32, 3, 300)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.intermediate_size, config.total_ut_steps) == (40, 3)
    assert config.max_position_embeddings == 99
    assert {info.dtype for info in checkpoint.tensors.values()} == {"float32"}


@pytest.mark.parametrize(
    "options, message",
    [(["--vocab", "100"], "vocab = 100"), (["--head-dim", "7"], "head_dim = 7")],
)
def test_command_line_refuses_bad_sizes_and_writes_nothing(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "m"), *options])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_an_existing_folder_is_not_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        make_random_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_smallest_vocabulary_holds_every_byte():
    assert byte_level_tokenizer(259).get_vocab_size() == 259
    with pytest.raises(ValueError, match="at least 259"):
        byte_level_tokenizer(258)
