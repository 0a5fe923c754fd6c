"""Mixed batches on the real runner: each does what batches of decode rows and whole prefills do."""

import itertools

import jax
import numpy as np
import pytest

from rlt_jax.config import ExitConfig
from rlt_jax.engine.types import Row, RowResults, Rows, SchedulerOutput, SlotUpdate, Stage
from rlt_jax.runtime.programs import Kind
from tests.support import VOCAB, build_engine, small_model

DEPTH, SLOTS, PAGES_EACH = 4, 4, 3
PROMPT_TOKENS = 32  # of a batch, at most
RING = 32  # rows of the window for each slot
OPTIONS = {
    "host decides": {},
    "program decides": {"exit_decision": "device"},
    "lookahead": {"exit_config": ExitConfig("random_lookahead", seed=3)},
    "triton": {"kernels": "triton"},
}
BOUND = 1e-5


def prompt_of(slot: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(slot).integers(0, VOCAB, length).tolist())


class Device:
    """A runner that is given batches by hand."""

    def __init__(self, **options):
        engine = build_engine("tight", mode="mixed", **options)
        self.runner = engine.runner
        self.buckets = engine.programs.buckets
        self._sequence = itertools.count()

    def run(self, stage: Stage, rows: list[Row], **fields) -> RowResults:
        batch = SchedulerOutput(next(self._sequence), stage, Rows.of(rows), **fields)
        return self.runner.collect(self.runner.submit(batch)).rows

    def prefill(self, prompts: dict[int, tuple[int, ...]]) -> None:
        """Whole prompts by slot, each in a batch of its own."""
        for slot, prompt in prompts.items():
            self.run(Stage.PREFILL, [chunk(slot, prompt)])

    def set_slots(self) -> None:
        """Of each slot its pages, by way of a batch of no consequence."""
        updates = [
            SlotUpdate(slot, pages_of(slot), 0.0, -1, 1.0, 0, min_loops=1, exit_threshold=0.5)
            for slot in range(SLOTS)
        ]
        self.run(Stage.CODA, [], slot_updates=tuple(updates))

    def contents(self):
        return jax.tree.map(np.array, self.runner.state)

    def addresses(self) -> tuple[int, ...]:
        state = self.runner.state
        leaves = (state.kv.pool, state.prompt_hidden_wd, state.hidden_sd)
        return tuple(leaf.unsafe_buffer_pointer() for leaf in leaves)


def pages_of(slot: int) -> tuple[int, ...]:
    return tuple(range(PAGES_EACH * slot, PAGES_EACH * (slot + 1)))


def devices(options: dict, count: int = 2) -> list[Device]:
    made = [Device(**options) for _ in range(count)]
    for device in made:
        device.set_slots()
    return made


def chunk(slot: int, prompt, start=0, size=None, depth=DEPTH, window=0, staged=False) -> Row:
    """A part of a prompt; staged: for a mixed batch, where only the first loop reads tokens."""
    end = len(prompt) if size is None else min(start + size, len(prompt))
    return Row(
        generation=slot,
        slot=slot,
        position=start,
        depth=depth,
        ends_prompt=end == len(prompt),
        size=end - start,
        window=window,
        tokens=prompt[start:end] if depth == 1 or not staged else (),
    )


def decode_row(slot: int, position: int, depth: int) -> Row:
    return Row(slot, slot, position, depth, output_index=1, reads_gate=True)


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=BOUND, atol=BOUND)


def assert_same_state(mixed: Device, separate: Device):
    """Of all that is kept of a request but the window, which only mixed batches use."""
    a, b = (device.contents().replace(prompt_hidden_wd=None) for device in (mixed, separate))
    jax.tree.map(assert_close, a, b)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_mixed_batch_gives_what_recurrent_and_prefill_batches_give(options):
    """Two decode rows and two prompts, the second of each a loop behind the first."""
    mixed, separate = devices(options)
    prompts = {slot: prompt_of(slot, length) for slot, length in enumerate((9, 4, 19, 7))}
    windows = {2: 5, 3: 60}
    for device in (mixed, separate):
        device.prefill({slot: prompts[slot] for slot in (0, 1)})
        device.run(Stage.CODA, [Row(i, i, len(prompts[i]) - 1, exit_depth=DEPTH) for i in (0, 1)])
    signals = []
    for loop in range(1, DEPTH + 2):
        depths = [loop, loop - 1, loop, loop - 1]
        running = [slot for slot in range(SLOTS) if 1 <= depths[slot] <= DEPTH]
        decode = [decode_row(i, len(prompts[i]), depths[i]) for i in running if i < 2]
        chunks = [
            chunk(i, prompts[i], depth=depths[i], window=windows[i], staged=True)
            for i in running
            if i >= 2
        ]
        expected = separate.run(Stage.RECURRENT, decode)
        got = mixed.run(Stage.MIXED, decode + chunks)
        assert len(got) == len(decode) + len(chunks)
        for one, other in zip(got, expected):
            assert (one.generation, one.depth) == (other.generation, other.depth)
            assert one.leaves == other.leaves
            signals.append(one.exit_probability if one.leaves is None else one.leaves)
            if one.leaves is None:
                assert_close(one.exit_probability, other.exit_probability)
        for row in list(got)[len(decode) :]:
            assert row.exit_probability is None and row.leaves is None
    assert len(signals) == 2 * DEPTH and len(set(signals)) > 1
    if "exit_decision" in options:
        assert any(signals[:-2])  # a row that has left does nothing in the last loops
    separate.prefill({slot: prompts[slot] for slot in (2, 3)})
    assert_same_state(mixed, separate)

    ends = [len(prompts[i]) - (i >= 2) for i in range(SLOTS)]
    codas = [Row(i, i, ends[i], exit_depth=DEPTH, output_index=i < 2) for i in range(SLOTS)]
    tokens = [device.run(Stage.CODA, codas) for device in (mixed, separate)]
    assert [row.tokens for row in tokens[0]] == [row.tokens for row in tokens[1]]
    assert_same_state(mixed, separate)


class Wavefront:
    """The chunks of a prompt in a ring of the window; none is ahead of the one before it."""

    def __init__(self, slot: int, prompt: tuple[int, ...], size: int):
        self.slot, self.prompt, self.size = slot, prompt, size
        self.loops = [0] * -(-len(prompt) // size)  # that each chunk has run

    @property
    def done(self) -> bool:
        return self.loops[-1] == DEPTH

    def ready(self) -> list[Row]:
        """The next loop of every chunk that can run it now."""
        ahead = [DEPTH, *self.loops]  # of each chunk's predecessor
        return [
            chunk(
                self.slot,
                self.prompt,
                start=k * self.size,
                size=self.size,
                depth=loops + 1,
                window=RING * self.slot + k % DEPTH * self.size,
                staged=True,
            )
            for k, loops in enumerate(self.loops)
            if loops < ahead[k] and (k < DEPTH or self.loops[k - DEPTH] == DEPTH)
        ]

    def advance(self, row: Row):
        self.loops[row.position // self.size] += 1


@pytest.mark.parametrize(
    ("seed", "options"), [(0, {}), (1, {}), (2, {}), (0, OPTIONS["triton"])], ids=str
)
def test_chunks_at_any_depths_give_what_whole_prefills_give(seed, options):
    """Batches of whatever chunks can run, drawn at random; buffers are never copied."""
    rng = np.random.default_rng(seed)
    mixed, separate = devices(options)
    fronts = [
        Wavefront(i, prompt_of(i, rng.integers(12, 24)), rng.integers(2, 7)) for i in range(SLOTS)
    ]
    addresses, batches = mixed.addresses(), []
    while not all(front.done for front in fronts):
        batch, room = [], PROMPT_TOKENS
        for front in rng.permutation(fronts):
            for row in front.ready():
                if row.size <= room and rng.random() < 0.8:
                    batch.append(row)
                    room -= row.size
        if not batch:
            continue
        mixed.run(Stage.MIXED, batch)
        for row in batch:
            fronts[row.slot].advance(row)
        batches.append(batch)
        assert mixed.addresses() == addresses
    assert any(len({row.depth for row in batch}) == DEPTH for batch in batches)
    assert any(len({row.slot for row in batch}) == SLOTS for batch in batches)
    assert any(len({row.slot for row in batch}) < len(batch) for batch in batches)
    separate.prefill({front.slot: front.prompt for front in fronts})
    assert_same_state(mixed, separate)


def test_several_loops_of_a_batch_are_as_many_batches():
    """Bit for bit; one chunk begins, another is half-way, and ends its prompt."""
    several, one = devices({})
    prompts = [prompt_of(0, 20), prompt_of(1, 6)]

    def rows(first: int, second: int) -> list[Row]:
        return [
            chunk(0, prompts[0], size=12, depth=first, window=3, staged=True),
            chunk(1, prompts[1], depth=second, window=50, staged=True),
        ]

    for device in (several, one):
        for depth in (1, 2):
            device.run(Stage.MIXED, rows(1, depth)[1:])
    several.run(Stage.MIXED, rows(1, 3), num_loops=2)
    for loop in range(2):
        one.run(Stage.MIXED, rows(1 + loop, 3 + loop))
    jax.tree.map(np.testing.assert_array_equal, several.contents(), one.contents())
    assert one.contents().hidden_sd[1].any()


def test_a_mixed_batch_reads_and_writes_its_own_rows_and_nothing_else():
    """All else is NaN: in the pool, the slots, the window, the padding of rows and of tokens."""
    (device,) = devices({}, count=1)
    prompt = prompt_of(3, 11)
    rows = [
        decode_row(2, 0, depth=2),
        chunk(0, prompt, size=5, depth=1, window=20, staged=True),
        chunk(3, prompt, depth=3, window=40, staged=True),
    ]
    batch = SchedulerOutput(0, Stage.MIXED, Rows.of(rows))
    (call,) = device.runner.prepare(batch)

    state = device.contents()
    poison = np.random.default_rng(0).standard_normal
    kept = {"pool": state.kv.pool, "hidden": state.hidden_sd, "window": state.prompt_hidden_wd}
    for leaf in kept.values():
        leaf[...] = np.nan
    width = kept["hidden"].shape[1]
    kept["hidden"][2] = poison(width)
    kept["window"][40:51] = poison((11, width))
    before = {name: leaf.copy() for name, leaf in kept.items()}

    placed = jax.device_put(state, jax.devices()[0])
    state, results = call.executable(placed, small_model()[1], call.packed)
    after = {
        "pool": np.array(state.kv.pool),
        "hidden": np.array(state.hidden_sd),
        "window": np.array(state.prompt_hidden_wd),
    }
    written = {name: np.zeros(leaf.shape, bool) for name, leaf in before.items()}
    page = state.kv.page_size
    for row in rows:
        for position in range(row.position, row.position + max(row.size, 1)):
            where = pages_of(row.slot)[position // page] * DEPTH + row.depth - 1
            written["pool"][:, where, :, :, position % page] = True
        written["window"][row.window : row.window + row.size] = True
    written["hidden"][[2, 3]] = True  # the decode row's, and that of the prompt that ends
    for name, leaf in after.items():
        changed = leaf.view(np.uint32) != before[name].view(np.uint32)
        assert np.isfinite(leaf[written[name]]).all(), name
        assert not changed[~written[name]].any(), name
        assert changed[written[name]].mean() > 0.9, name
    fields = call.layout.unpack(np.asarray(results))
    assert np.isfinite(fields["exit_probability"][0])


def test_a_batch_of_prompts_alone_needs_no_decode_row_and_reads_nothing_back():
    (device,) = devices({}, count=1)
    rows = Rows.of([chunk(1, prompt_of(1, 8), depth=1, staged=True)])
    ticket = device.runner.submit(SchedulerOutput(0, Stage.MIXED, rows))
    assert ticket.results.size  # it is what shows that the batch is done
    output = device.runner.collect(ticket)
    assert output.rows.token is None and output.rows.exit_probability is None
    assert output.rows[0].generation == 1


def test_a_batch_that_no_bucket_holds_is_refused():
    (device,) = devices({}, count=1)
    assert device.buckets.of(Kind.MIXED) == (PROMPT_TOKENS,)
    rows = [chunk(slot, prompt_of(slot, 17), depth=1, staged=True) for slot in (0, 1)]
    with pytest.raises(RuntimeError, match="34 rows in a mixed batch: must be <= 32"):
        device.run(Stage.MIXED, rows)
