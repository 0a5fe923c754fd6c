"""A slot goes to the host and comes back, bit for bit: SAVE and RESTORE on the real runner."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlt_jax.engine.types import (
    BatchError,
    DeviceLostError,
    Row,
    Rows,
    SchedulerOutput,
    SlotUpdate,
    Stage,
    Transfer,
)
from rlt_jax.models.ouro import DTypePolicy
from rlt_jax.runtime import compilation, transfers
from rlt_jax.runtime.compilation import Buckets, Programs
from rlt_jax.runtime.device_state import StateShape
from rlt_jax.runtime.exits import Exits
from rlt_jax.runtime.programs import Kind, ProgramSpec, transfer_pages
from rlt_jax.runtime.runner import Runner
from tests.support import build_engine, drive, random_work, small_model

DEPTH, PAGE, PAGES, SLOTS, WIDTH = 4, 4, 41, 4, 16
AT_ONCE = 3
# Of the slot that is saved, and of the one it is restored into: the longest, and no page in common.
TABLE, OTHER_TABLE = tuple(range(30, 19, -1)), (5, 0, 40, 39, 7, 9, 11, 1, 2, 31, 33)
LEFT, TAKEN = 1, 2

LAYOUTS = {"last_exited": DEPTH, "shared": 1}
KV_DTYPES = ["float32", "bfloat16"]
every_pool = pytest.mark.parametrize("kv_dtype", KV_DTYPES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def spec_of(layout: str, kv_dtype: str = "float32", pages: int = PAGES) -> ProgramSpec:
    planes = LAYOUTS[layout]
    window = DEPTH * 32 if planes > 1 else 0
    shape = StateShape(SLOTS, pages, planes, PAGE, WIDTH, window)
    return ProgramSpec(small_model()[0], DTypePolicy("float32", kv_dtype), shape)


def page_bytes(spec: ProgramSpec) -> int:
    itemsize = jnp.dtype(spec.policy.kv_dtype).itemsize
    return spec.shape.planes * PAGE * spec.config.kv_bytes_per_position(itemsize)


@pytest.fixture
def few_at_once(monkeypatch):
    """The most bytes of a transfer, such that AT_ONCE pages fit. Programs do not hang on it: no
    other test may have these specs."""

    def allow(spec):
        limit = (AT_ONCE + 1) * page_bytes(spec) - 1
        monkeypatch.setattr(transfers, "MAX_TRANSFER_BYTES", limit)
        assert transfer_pages(spec) == AT_ONCE

    return allow


def random_state(abstract, seed: int):
    """Every leaf without a value that another entry is likely to have; tables in bounds."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        if leaf.dtype == jnp.bool_:
            return rng.random(leaf.shape) < 0.5
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return rng.integers(0, PAGES, leaf.shape).astype(leaf.dtype)
        return rng.standard_normal(leaf.shape).astype(leaf.dtype)

    return jax.tree.map(fill, abstract)


class Device:
    """A runner whose state is random: another one after each reset."""

    def __init__(self, spec: ProgramSpec, monkeypatch):
        self.states = []

        def init_state(abstract, sharding):
            self.states.append(random_state(abstract, seed=len(self.states)))
            return jax.device_put(self.states[-1], sharding)

        monkeypatch.setattr("rlt_jax.runtime.runner.init_state", init_state)
        self.programs = Programs(spec, Buckets((4,), (32,), transfers=True), jax.devices()[0])
        self.runner = Runner(small_model()[1], self.programs)

    def submit(self, stage: Stage, slot: int, transfer: Transfer | None, table=None, rows=1):
        updates = (SlotUpdate(slot, table, 0.5, 7, 0.9, 3, 2, 0.6),) if table else ()
        one = Row(generation=8, slot=slot, position=3)
        batch = SchedulerOutput(0, stage, Rows.of([one] * rows), updates, transfer=transfer)
        return self.runner.submit(batch)

    def save(self, slot: int, table: tuple[int, ...]) -> list[Transfer]:
        """All pages of a table, the first batch setting it."""
        saved = []
        for first in range(0, len(table), AT_ONCE):
            transfer = Transfer(first, min(AT_ONCE, len(table) - first))
            ticket = self.submit(Stage.SAVE, slot, transfer, None if first else table)
            output = self.runner.collect(ticket)
            assert output.stage is Stage.SAVE and output.rows[0].generation == 8
            saved.append(dataclasses.replace(transfer, content=output.content))
        return saved

    def restore(self, slot: int, table: tuple[int, ...], saved: list[Transfer]) -> None:
        for i, transfer in enumerate(saved):
            ticket = self.submit(Stage.RESTORE, slot, transfer, None if i else table)
            assert self.runner.collect(ticket).content is None

    def contents(self):
        return jax.tree.map(np.array, self.runner.state)


def bits(array) -> bytes:
    return np.asarray(array).tobytes()


def assert_same_bits(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), a, b)
    assert list(map(bits, jax.tree.leaves(a))) == list(map(bits, jax.tree.leaves(b)))


def physical(table: tuple[int, ...], planes: int) -> np.ndarray:
    return (np.array(table)[:, None] * planes + np.arange(planes)).ravel()


SLOT_LEAVES = ("hidden_sd", "last_token_s")
EXIT_LEAVES = ("remaining_s", "left_s")


@every_pool
@every_layout
@pytest.mark.parametrize("length", [11, 9, 2], ids=["a part at last", "whole parts", "one part"])
def test_a_slot_comes_back_into_other_pages_and_another_slot_and_all_else_stays(
    layout, kv_dtype, length, few_at_once, monkeypatch
):
    spec = spec_of(layout, kv_dtype)
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    table, other = TABLE[:length], OTHER_TABLE[:length]
    saved = device.save(LEFT, table)
    assert len(saved) == -(-length // AT_ONCE)
    gone = device.states[0]
    device.runner.reset()  # every page and every slot is another
    device.restore(TAKEN, other, saved)

    expected = device.states[1]
    planes = spec.shape.planes
    expected.kv.pool[:, physical(other, planes)] = gone.kv.pool[:, physical(table, planes)]
    for name in SLOT_LEAVES:
        getattr(expected, name)[TAKEN] = getattr(gone, name)[LEFT]
    for name in EXIT_LEAVES:
        getattr(expected.exits, name)[TAKEN] = getattr(gone.exits, name)[LEFT]
    back = device.contents()
    for name, value in (("min_loops_s", 2), ("threshold_s", np.float32(0.6))):  # of the update
        assert getattr(back.exits, name)[TAKEN] == value
        getattr(expected.exits, name)[TAKEN] = value
    assert tuple(back.tables_sp[TAKEN][:length]) == other
    ours = dataclasses.replace(expected, tables_sp=None, sampling=None)
    assert_same_bits(dataclasses.replace(back, tables_sp=None, sampling=None), ours)


@every_layout
def test_saving_changes_nothing(layout, few_at_once, monkeypatch):
    spec = spec_of(layout)
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    device.save(LEFT, TABLE)
    before = device.contents()
    device.save(LEFT, TABLE)
    assert_same_bits(device.contents(), before)


def test_pieces_come_back_in_any_order_and_more_than_once(few_at_once, monkeypatch):
    spec = spec_of("last_exited")
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    saved = device.save(LEFT, TABLE)
    states = []
    for pieces in (saved, saved[::-1], saved + saved[1:3]):
        device.restore(TAKEN, OTHER_TABLE, pieces)
        states.append(device.contents())
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])


def test_other_batches_run_between_the_parts_and_all_may_be_in_flight(few_at_once, monkeypatch):
    """What a SAVE gives is what lay there when it was submitted."""
    spec = spec_of("last_exited")
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    expected = device.save(LEFT, TABLE)
    tickets = []
    for piece in expected:
        tickets.append(device.submit(Stage.SAVE, LEFT, Transfer(piece.first, piece.count)))
    overwrite = [dataclasses.replace(piece, content=expected[0].content) for piece in expected]
    tickets += [device.submit(Stage.RESTORE, LEFT, piece) for piece in overwrite]
    outputs = [device.runner.collect(ticket) for ticket in tickets]
    for output, piece in zip(outputs, expected, strict=False):
        pages = piece.count * spec.shape.planes
        assert_same_bits(output.content.kv[:, :pages], piece.content.kv[:, :pages])
    pool = device.contents().kv.pool
    first = pool[:, physical(TABLE[:AT_ONCE], DEPTH)]
    assert_same_bits(first, pool[:, physical(TABLE[3:6], DEPTH)])


def device_copies(content) -> list[jax.Array]:
    """Arrays like the pages of a transfer that lie in the device's own memory."""
    gc.collect()
    return [
        array
        for array in jax.live_arrays()
        if (array.shape, array.dtype) == (content.kv.shape, content.kv.dtype)
        and array.sharding.memory_kind == "device"
    ]


@every_layout
def test_contents_lie_in_pinned_host_memory_and_nothing_keeps_the_device_copies(
    layout, few_at_once, monkeypatch
):
    spec = spec_of(layout)
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    ticket = device.submit(Stage.SAVE, LEFT, Transfer(0, 2), TABLE)
    content = device.runner.collect(ticket).content
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(content)}
    assert kinds == {"pinned_host"}
    assert content.kv.shape[1] == AT_ONCE * spec.shape.planes
    assert device_copies(content) == []
    ticket = device.submit(Stage.SAVE, LEFT, Transfer(2, 3))
    assert device_copies(content) == []
    device.runner.collect(ticket)
    ticket = device.submit(Stage.RESTORE, TAKEN, Transfer(0, 2, content), OTHER_TABLE)
    assert device_copies(content) == []
    device.runner.collect(ticket)


@pytest.mark.parametrize("kind", [Kind.SAVE, Kind.RESTORE])
@every_layout
@every_pool
def test_temporaries_of_a_transfer_do_not_depend_on_the_pool(layout, kv_dtype, kind, few_at_once):
    sizes = []
    for pages in (2 * PAGES + 1, 8 * PAGES + 1):
        spec = spec_of(layout, kv_dtype, pages)
        few_at_once(spec)
        programs = Programs(spec, Buckets((4,), (32,), transfers=True), jax.devices()[0])
        sizes.append(programs.get(kind, 1).memory_analysis().temp_size_in_bytes)
    # At most the transfer, in twice the precision: jax 0.10 knows no bfloat16 on a CPU.
    assert sizes[0] == sizes[1] < 2 * AT_ONCE * page_bytes(spec) + 1024


@every_layout
def test_200_transfers_leave_the_state_at_its_addresses_and_compile_nothing(
    layout, few_at_once, monkeypatch
):
    spec = spec_of(layout)
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    monkeypatch.setattr(device.programs, "all_keys", lambda: TRANSFERS)
    device.programs.warm_up()
    device.runner.run_all()
    device.restore(TAKEN, OTHER_TABLE, device.save(LEFT, TABLE))
    monkeypatch.setattr(compilation, "late_compile_is_error", True)

    def addresses():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(device.runner.state)]

    compiles, before = [], addresses()

    def listen(event, *_, **__):
        if "backend_compile" in event:
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(25):
            device.restore(TAKEN, OTHER_TABLE, device.save(LEFT, TABLE))
            assert addresses() == before
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiles == [] and device.programs.late_compiles == 0


TRANSFERS = [(Kind.SET_SLOTS, 8), (Kind.SAVE, 1), (Kind.RESTORE, 1)]


@every_layout
def test_running_them_without_rows_leaves_the_state_as_it_was(layout, few_at_once, monkeypatch):
    spec = spec_of(layout)
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    monkeypatch.setattr(device.programs, "all_keys", lambda: TRANSFERS)
    device.runner.run_all()
    assert_same_bits(device.contents(), device.states[0])


def test_as_many_pages_as_fit_at_least_one_at_most_a_table(monkeypatch):
    spec = spec_of("last_exited")
    assert page_bytes(spec) * PAGES < transfers.MAX_TRANSFER_BYTES == 64 * 2**20
    assert transfer_pages(spec) == WIDTH
    for pages, expected in ((0.5, 1), (1, 1), (2.99, 2), (WIDTH + 1, WIDTH)):
        limit = int(pages * page_bytes(spec))
        monkeypatch.setattr(transfers, "MAX_TRANSFER_BYTES", limit)
        assert transfer_pages(spec) == expected


def test_engines_of_other_exit_modes_share_them():
    spec = spec_of("shared", pages=PAGES - 1)
    other = dataclasses.replace(spec, exits=Exits(decides=True, lookahead_seed=1, weighted=True))
    plain, other = (Programs(s, Buckets((4,), (32,)), jax.devices()[0]) for s in (spec, other))
    for kind in (Kind.SAVE, Kind.RESTORE):
        assert plain.get(kind, 1) is other.get(kind, 1)


def test_they_can_be_reached_only_where_they_are_asked_for(few_at_once, monkeypatch):
    buckets = Buckets((4,), (32,))
    assert not {Kind.SAVE, Kind.RESTORE} & {kind for kind in Kind if buckets.of(kind)}
    spec = spec_of("last_exited")
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    assert {(Kind.SAVE, 1), (Kind.RESTORE, 1)} < set(device.programs.all_keys())
    device.programs.buckets = buckets
    with pytest.raises(BatchError, match="1 rows in a save batch: must be <= 0"):
        device.submit(Stage.SAVE, LEFT, Transfer(0, 1))


# --- rows, bad input, failures -------------------------------------------------------------------


def test_they_have_no_decode_rows(few_at_once, monkeypatch):
    spec = spec_of("shared")
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    device.restore(TAKEN, OTHER_TABLE, device.save(LEFT, TABLE))
    assert device.runner.occupancy is None


@pytest.mark.parametrize(
    ("stage", "transfer", "error"),
    [
        (Stage.SAVE, Transfer(-1, 1), "Transfer.first = -1: must be >= 0 and <= 15"),
        (Stage.SAVE, Transfer(16, 1), "Transfer.first = 16: must be >= 0 and <= 15"),
        (Stage.SAVE, Transfer(0, 0), "Transfer.count = 0: must be >= 1 and <= 3"),
        (Stage.SAVE, Transfer(0, 4), "Transfer.count = 4: must be >= 1 and <= 3"),
        (Stage.SAVE, Transfer(14, 3), "Transfer.count = 3: must be >= 1 and <= 2"),
        (Stage.SAVE, Transfer(0, 1, "kv"), "Transfer.content = 'str': must be what a SAVE gave"),
        (Stage.RESTORE, Transfer(0, 1), "Transfer.content = 'NoneType': must be what a SAVE gave"),
    ],
    ids=str,
)
def test_a_transfer_that_cannot_be_is_refused_before_dispatch(
    stage, transfer, error, few_at_once, monkeypatch
):
    spec = spec_of("last_exited")
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    with pytest.raises(BatchError, match="was not dispatched: ") as raised:
        device.submit(stage, LEFT, transfer)
    assert error in str(raised.value)
    assert_same_bits(device.contents(), device.states[0])


def test_two_rows_are_refused(few_at_once, monkeypatch):
    spec = spec_of("last_exited")
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    with pytest.raises(BatchError, match="2 rows in a save batch: must be <= 1"):
        device.submit(Stage.SAVE, LEFT, Transfer(0, 1), rows=2)


def test_no_host_memory_for_a_save_is_a_lost_device_and_no_room_to_restore_a_failed_batch(
    few_at_once, monkeypatch
):
    spec = spec_of("last_exited")
    few_at_once(spec)
    device = Device(spec, monkeypatch)
    saved = device.save(LEFT, TABLE)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", lambda *_: 1 / 0)
        with pytest.raises(DeviceLostError, match="save batch failed: division by zero"):
            device.submit(Stage.SAVE, LEFT, Transfer(0, 1))
        before = device.contents()
        with pytest.raises(BatchError, match="restore batch was not dispatched: division by zero"):
            device.submit(Stage.RESTORE, TAKEN, saved[0])
    assert_same_bits(device.contents(), before)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", lambda *_: 1 / 0)
        ticket = device.submit(Stage.SAVE, LEFT, Transfer(0, 1))
        with pytest.raises(DeviceLostError, match="save batch failed: division by zero"):
            device.runner.collect(ticket)
    device.runner.reset()
    device.restore(TAKEN, OTHER_TABLE, saved)


# --- in a running engine -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["roomy", "shared"])
def test_saved_between_its_tokens_and_brought_back_elsewhere_every_request_goes_on_the_same(shape):
    """Before each batch, its slots go to the host, are written over, and come back."""
    work = random_work(numbers=8, count=6)
    expected = drive(build_engine(shape), work)
    engine = build_engine(shape)
    runner, submit, collect = engine.runner, engine.runner.submit, engine.runner.collect
    engine.programs.buckets = dataclasses.replace(engine.programs.buckets, transfers=True)
    moved = []

    def through_the_host(batch):
        tables = engine.core.scheduler.block_tables()
        for slot in {row.slot for row in batch.rows if row.size == 0 and row.slot in tables}:
            rows = Rows.of([Row(0, slot, 0)])
            pages = Transfer(0, len(tables[slot]))
            ticket = submit(SchedulerOutput(0, Stage.SAVE, rows, transfer=pages))
            content = collect(ticket).content
            nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), content)
            for written in (nothing, content):
                transfer = dataclasses.replace(pages, content=written)
                collect(submit(SchedulerOutput(0, Stage.RESTORE, rows, transfer=transfer)))
            moved.append(slot)
        return submit(batch)

    runner.submit = through_the_host
    outputs = drive(engine, work)
    assert len(moved) > 50
    for name, output in outputs.items():
        assert output.token_ids == expected[name].token_ids
        assert output.exit_depths == expected[name].exit_depths
