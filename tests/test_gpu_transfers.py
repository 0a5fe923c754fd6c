"""Slots on their way between a GPU and the host."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.bench.synthetic import OURO_1_4B
from rlt_jax.engine.types import Row, Rows, SchedulerOutput, SlotUpdate, Stage, Transfer
from rlt_jax.models.ouro import DTypePolicy, init_params
from rlt_jax.runtime.compilation import Buckets, Programs
from rlt_jax.runtime.device_state import StateShape
from rlt_jax.runtime.programs import Kind, ProgramSpec, transfer_pages
from rlt_jax.runtime.runner import Runner

pytestmark = pytest.mark.gpu

# K/V like the large model's, in two layers; 64 MiB are 64 pages.
TRANSFERRED = dataclasses.replace(
    OURO_1_4B, num_hidden_layers=2, vocab_size=64, intermediate_size=128
)
TABLE, OTHER_TABLE = tuple(range(0, 200, 2)), tuple(range(199, 0, -2))


@pytest.fixture
def transferring(monkeypatch) -> Runner:
    """A runner that saves and restores, with a random state."""
    gpu = jax.local_devices(backend="gpu")[0]
    policy = DTypePolicy("bfloat16")
    shape = StateShape(4, num_pages=200, planes=4, block_size=16, table_width=120)
    spec = ProgramSpec(TRANSFERRED, policy, shape)
    assert transfer_pages(spec) == 64
    rng = np.random.default_rng(0)

    def random_state(abstract, sharding):
        def fill(leaf):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)
            return rng.integers(0, 2, leaf.shape).astype(leaf.dtype)

        return jax.device_put(jax.tree.map(fill, abstract), sharding)

    monkeypatch.setattr("rlt_jax.runtime.runner.init_state", random_state)
    programs = Programs(spec, Buckets((4,), (16,), transfers=True), gpu)
    kinds = [(Kind.SET_SLOTS, 8), (Kind.SAVE, 1), (Kind.RESTORE, 1)]
    monkeypatch.setattr(programs, "all_keys", lambda: kinds)
    sharding = jax.sharding.SingleDeviceSharding(gpu)
    runner = Runner(init_params(TRANSFERRED, jax.random.key(0), policy, sharding), programs)
    runner.run_all()
    return runner


def transfer_batch(stage: Stage, slot: int, table: tuple[int, ...], transfer: Transfer):
    update = SlotUpdate(slot, table, 0.0, -1, 1.0, 0)
    rows = Rows.of([Row(0, slot, 0)])
    return SchedulerOutput(0, stage, rows, (update,), transfer=transfer)


def test_a_slot_goes_to_the_host_and_comes_back_elsewhere_bit_for_bit(transferring):
    runner = transferring
    before = jax.tree.map(np.array, runner.state)
    address = runner.state.kv.pool.unsafe_buffer_pointer()
    for transfer in (Transfer(0, 64), Transfer(64, 36)):
        ticket = runner.submit(transfer_batch(Stage.SAVE, 1, TABLE, transfer))
        content = runner.collect(ticket).content
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(content)} == {"pinned_host"}
        transfer = dataclasses.replace(transfer, content=content)
        runner.collect(runner.submit(transfer_batch(Stage.RESTORE, 2, OTHER_TABLE, transfer)))
        assert runner.state.kv.pool.unsafe_buffer_pointer() == address
    after = jax.tree.map(np.array, runner.state)
    pages = [np.array(table)[:, None] * 4 + np.arange(4) for table in (TABLE, OTHER_TABLE)]
    before.kv.pool[:, pages[1]] = before.kv.pool[:, pages[0]]
    before.hidden_sd[2], before.last_token_s[2] = before.hidden_sd[1], before.last_token_s[1]
    before.exits.remaining_s[2] = before.exits.remaining_s[1]
    before.exits.left_s[2] = before.exits.left_s[1]
    for name in ("kv", "hidden_sd", "last_token_s"):
        kept, wanted = getattr(after, name), getattr(before, name)
        jax.tree.map(np.testing.assert_array_equal, kept, wanted)
    np.testing.assert_array_equal(after.exits.remaining_s, before.exits.remaining_s)
    np.testing.assert_array_equal(after.exits.left_s, before.exits.left_s)


def test_submitting_a_save_does_not_wait_for_the_copy(transferring):
    """64 MiB take the bus a millisecond or more."""
    batch = transfer_batch(Stage.SAVE, 1, TABLE, Transfer(0, 64))
    tickets, ready = [], []
    for _ in range(8):
        tickets.append(transferring.submit(batch))
        ready.append(tickets[-1].results.kv.is_ready())
    contents = [transferring.collect(ticket).content for ticket in tickets]
    assert all(content.kv.is_ready() for content in contents)
    assert sum(ready) <= 1, ready
