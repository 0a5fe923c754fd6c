"""Conversion's host memory, measured on a checkpoint of 1 GiB in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from rlt_jax.checkpoints_convert.tensors import expected_items, parameter_count
from rlt_jax.models.ouro_config import OuroConfig

MIB = 2**20

# Prints how far anonymous memory rose above where it stood before, in bytes.
MEASURE = """
import sys, threading
from rlt_jax.checkpoints_convert import convert, export

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

start = peak = anonymous_bytes()
done = threading.Event()
def sample():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous_bytes())
sampler = threading.Thread(target=sample)
sampler.start()
options = {"convert": {"verify": True}, "export": {}}[sys.argv[1]]
{"convert": convert, "export": export}[sys.argv[1]](sys.argv[2], sys.argv[3], **options)
done.set()
sampler.join()
print(peak - start)
"""


@pytest.fixture(scope="module")
def large_source(tiny_source, tmp_path_factory):
    """Ouro-1.4B's layers, 10 of them, and a smaller vocabulary: 1.08 GiB of random bits."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "source").mkdir()
    raw = json.loads((tiny_source / "config.json").read_text()) | {
        "vocab_size": 16384,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
    }
    (folder / "source" / "config.json").write_text(json.dumps(raw))
    config = OuroConfig.from_dict(raw)
    assert parameter_count(config) * 2 >= 1024 * MIB
    generator = np.random.default_rng(0)
    pool = np.frombuffer(generator.bytes(80 * MIB), ml_dtypes.bfloat16)
    weight_map = {}
    for number, specs in enumerate(expected_items(config).values()):
        tensors = {}
        for spec in specs:
            start = int(generator.integers(8 * MIB))
            size = int(np.prod(spec.shape))
            tensors[spec.name] = pool[start : start + size].reshape(spec.shape)
        save_file(tensors, folder / "source" / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    index = {"weight_map": weight_map}
    (folder / "source" / "model.safetensors.index.json").write_text(json.dumps(index))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def limit(large_source) -> int:
    """3 x the largest item + 256 MiB, in bytes."""
    config = OuroConfig.from_json_file(large_source / "source" / "config.json")
    items = expected_items(config).values()
    return 3 * max(sum(2 * int(np.prod(s.shape)) for s in specs) for specs in items) + 256 * MIB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "action, source, destination",
    [("convert", "source", "converted"), ("export", "converted", "exported")],
)
def test_memory_stays_within_three_items_and_256_mib(
    large_source, limit, action, source, destination
):
    result = subprocess.run(
        [
            *(sys.executable, "-c", MEASURE, action),
            *(str(large_source / source), str(large_source / destination)),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr
    growth = int(result.stdout)
    print(f"{action}: {growth / MIB:.0f} MiB of {limit / MIB:.0f} MiB")
    assert 20 * MIB < growth <= limit  # under 20 MiB nothing was measured
