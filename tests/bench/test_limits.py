"""The least that must be moved and computed, for Ouro-1.4B by hand."""

import dataclasses

import pytest

from rlt_jax.bench import limits
from rlt_jax.bench.limits import KNOWN_RATES, Rates, Work
from rlt_jax.bench.synthetic import OURO_1_4B, OURO_2_6B
from rlt_jax.models.ouro import DTypePolicy

BF16 = DTypePolicy("bfloat16")
H200 = Rates(*KNOWN_RATES["NVIDIA H200"])
# Of one layer: q, k, v and o; gate, up and down; and four norms.
MATRICES = 4 * 2048 * 2048 + 3 * 2048 * 5632
LAYER = MATRICES + 4 * 2048


def test_the_larger_model_has_twice_the_layers():
    assert dataclasses.replace(OURO_2_6B, num_hidden_layers=24) == OURO_1_4B


def test_weights_of_a_loop_and_of_the_head():
    assert limits.loop_weight_bytes(OURO_1_4B, BF16) == 24 * LAYER * 2 == 2_466_643_968
    assert limits.loop_weight_bytes(OURO_2_6B, BF16) == 48 * LAYER * 2
    assert limits.loop_weight_bytes(OURO_1_4B, DTypePolicy("float32")) == 24 * LAYER * 4
    assert limits.head_bytes(OURO_1_4B, BF16) == 49152 * 2048 * 2


def test_flops_of_a_loop_the_head_and_the_attention():
    assert limits.loop_matmul_flops(OURO_1_4B) == 24 * MATRICES * 2
    assert limits.head_flops(OURO_1_4B) == 2 * 49152 * 2048
    assert limits.attention_flops_per_position(OURO_1_4B) == 24 * 2 * 2 * 16 * 128


def test_a_token_step_reads_weights_once_and_each_row_its_context():
    one = limits.token_step(OURO_1_4B, BF16, batch=1, depth=4, positions=4 * 1024)
    kv = 24 * 2 * 16 * 128 * 2
    assert one.read_bytes == 4 * 24 * LAYER * 2 + 49152 * 2048 * 2 + 4 * 1024 * kv
    eight = limits.token_step(OURO_1_4B, BF16, batch=8, depth=4, positions=4 * 1024)
    assert eight.read_bytes - one.read_bytes == 7 * 4 * 1024 * kv
    assert eight.flops == 8 * one.flops
    shallow = limits.token_step(OURO_1_4B, BF16, batch=8, depth=2.5, positions=2.5 * 1024)
    assert eight.read_bytes - shallow.read_bytes == 1.5 * (24 * LAYER * 2 + 8 * 1024 * kv)


@pytest.mark.parametrize("batch, ms", [(1, 2.46), (8, 3.80), (32, 8.42), (128, 26.9)])
def test_the_limit_of_a_token_step_on_an_h200(batch, ms):
    """Means over positions 1,024 .. 1,151: such a row reads 1,025 .. 1,152 positions."""
    positions = 4 * sum(range(1025, 1153)) / 128
    work = limits.token_step(OURO_1_4B, BF16, batch, 4, positions)
    assert 1e3 * work.limit_s(H200) == pytest.approx(ms, rel=0.005)


def test_the_limit_of_a_prefill_on_an_h200():
    work = limits.prefill_matmuls(OURO_1_4B, BF16, 8, 1024)
    assert 8 * 1024 / work.limit_s(H200) == pytest.approx(78_000, rel=0.005)
    assert work.flops == 8 * 1024 * 4 * 24 * MATRICES * 2 + 8 * 2 * 49152 * 2048


def test_causal_attention_of_a_prefill():
    per_position = 4 * 24 * 2 * 2 * 16 * 128  # in all loops
    assert limits.prefill_attention_flops(OURO_1_4B, 3, 4) == 3 * (1 + 2 + 3 + 4) * per_position


def test_a_short_prefill_is_bound_by_its_weights():
    work = limits.prefill_matmuls(OURO_1_4B, BF16, 1, 1)
    assert work.limit_s(H200) == work.read_bytes / 4.45e12


@pytest.mark.parametrize(
    "layout, requests, positions, blocks",
    [("last_exited", 1, 16, 4), ("last_exited", 3, 17, 24), ("shared", 3, 17, 6)],
)
def test_kv_blocks(layout, requests, positions, blocks):
    assert limits.kv_blocks(OURO_1_4B, layout, 16, requests, positions) == blocks


def test_the_slower_of_reading_and_computing_is_the_limit():
    rates = Rates(read_bytes_per_s=10, matmul_flops_per_s=100)
    assert Work(read_bytes=20, flops=100).limit_s(rates) == 2
    assert Work(read_bytes=20, flops=500).limit_s(rates) == 5


def test_known_rates_or_higher_measured_ones():
    assert Rates.of("cpu", None) is None
    assert Rates.of("cpu", Rates(1, 2)) == Rates(1, 2)
    assert Rates.of("NVIDIA H200", None) == Rates(4.45e12, 770e12)
    assert Rates.of("NVIDIA H200", Rates(4.6e12, 1)) == Rates(4.6e12, 770e12)
