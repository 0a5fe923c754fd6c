"""Faults that the simulator must see: each is planted in the engine, or in what it tells."""

import dataclasses

import numpy as np
import pytest

from rlt_jax.engine import scheduler
from rlt_jax.engine.admission import WaitingRequests
from rlt_jax.engine.batching import Batcher
from rlt_jax.engine.core import EngineCore
from rlt_jax.engine.kv_accounting import KVAccounting
from rlt_jax.engine.preemption import HostMemory, Preemption
from rlt_jax.engine.prefix_cache import PrefixCache, page_hashes
from rlt_jax.engine.scheduler import Scheduler
from rlt_jax.engine.seating import Seating
from rlt_jax.engine.slots import HELD, PREFILL, Slots
from rlt_jax.engine.staging import Staging
from rlt_jax.engine.types import Stage
from tests.engine.simulated_device import SimulatedDevice
from tests.engine.simulated_model import FULL_DEPTH
from tests.engine.simulator import simulate_seed

pytestmark = pytest.mark.once


def altered_batch(alter):
    """The scheduler makes other batches: alter(batch) is what the device gets."""

    def install(patch):
        submit = SimulatedDevice.submit
        patch.setattr(SimulatedDevice, "submit", lambda self, batch: submit(self, alter(batch)))

    return install


def altered_rows(stage, **columns):
    """In batches of a stage, columns as these functions make them."""

    def alter(batch):
        if batch.stage is not stage:
            return batch
        changed = {name: make(getattr(batch.rows, name)) for name, make in columns.items()}
        return dataclasses.replace(batch, rows=dataclasses.replace(batch.rows, **changed))

    return altered_batch(alter)


def altered_outputs(alter):
    """The engine tells its outputs otherwise."""

    def install(patch):
        step = EngineCore.step
        patch.setattr(EngineCore, "step", lambda self, only: alter(step(self, only)))

    return install


def replaced(owner, name, function):
    return lambda patch: patch.setattr(owner, name, function)


def releases_blocks_in_flight(patch):
    abort, release, early = Scheduler.abort, KVAccounting.release, set()

    def abort_and_release(self, request_id):
        request = abort(self, request_id)
        if request is not None and request.slot is not None:
            early.add((id(self.kv), request.generation))
            release(self.kv, request.generation)
        return request

    def release_once(self, owner):
        if (id(self), owner) not in early:
            release(self, owner)

    patch.setattr(Scheduler, "abort", abort_and_release)
    patch.setattr(KVAccounting, "release", release_once)


def without_first_token(output):
    return dataclasses.replace(output, token_ids=output.token_ids[1:])


def moved_by_depth(batch):
    rows = batch.rows
    if batch.stage is not Stage.MIXED:
        return batch
    return dataclasses.replace(
        batch, rows=dataclasses.replace(rows, window=rows.window + rows.depth)
    )


def own_ring(self, slot, part, start=Staging.start):
    """As if no other prompt had a place in the window."""
    alone = Staging(self._num_rows, FULL_DEPTH)
    alone._chunks = {slot: list(self.chunks_of(slot))}
    place = start(alone, slot, part)
    self._chunks[slot] = alone._chunks[slot]
    return place


def full_budget(self, budget, others, chunks=Batcher._chunks):
    return chunks(self, self._config.max_num_batched_tokens, others)


def last_chunk_alone(self, budget, others, chunks=Batcher._chunks):
    return chunks(self, budget, others)[-1:]


def grows_untold(self, choice, extend=Scheduler._extend_tables):
    """The device keeps the table that it knows."""
    on_device = self._slots.on_device.copy()
    starved = extend(self, choice)
    self._slots.on_device[:] = on_device
    return starved


def grows_too_late(self, choice, extend=Scheduler._extend_tables):
    earlier = dataclasses.replace(choice.rows, position=choice.rows.position - 1)
    return extend(self, choice._replace(rows=earlier))


def nothing_reserved(self):
    return len(self._free) + self._cache.num_idle


def shrinks(self, owner, positions, extend=KVAccounting.extend):
    """An owner's written pages are exchanged for others."""
    table = extend(self, owner, positions)
    self._tables[owner] = table[::-1]
    return self._tables[owner]


def forgets_overtakings(self, *rooms, admissible=WaitingRequests.admissible, **how):
    for one in self._queue:
        one.bypasses_left = self._max_bypasses
    return admissible(self, *rooms, **how)


FAULTS = {
    "the device is not told that a table grew": replaced(Scheduler, "_extend_tables", grows_untold),
    "tables do not grow": replaced(Scheduler, "_extend_tables", lambda *_: []),
    "tables grow too late": replaced(Scheduler, "_extend_tables", grows_too_late),
    "tables grow at the wrong end": replaced(KVAccounting, "extend", shrinks),
    "growth is not reserved": replaced(KVAccounting, "_spare_pages", property(nothing_reserved)),
    "overtakings are forgotten": replaced(WaitingRequests, "admissible", forgets_overtakings),
    "the last request goes first": replaced(
        WaitingRequests, "_order", lambda self, request: (0, -request.generation)
    ),
    "who ends while it waits stays in the queue": replaced(
        WaitingRequests, "remove", lambda *_: None
    ),
    "two requests have the same pages": replaced(
        KVAccounting, "table", lambda self, owner: tuple(range(self.geometry.num_pages))
    ),
    "blocks do not come back": replaced(KVAccounting, "release", lambda self, owner: None),
    "blocks come back while in flight": releases_blocks_in_flight,
    "a failed batch leaves its requests there": replaced(Scheduler, "fail", lambda *_: []),
    "a lost device ends nobody": replaced(Scheduler, "fail_running", lambda *_: []),
    "slots are not set": altered_batch(lambda batch: dataclasses.replace(batch, slot_updates=())),
    "sampling rows are greedy": altered_batch(
        lambda batch: dataclasses.replace(batch, samples=False)
    ),
    "a prompt chunk comes a token late": altered_rows(
        Stage.PREFILL, position=lambda position: position + 1
    ),
    "prompts do not end": altered_rows(Stage.PREFILL, ends_prompt=np.zeros_like),
    "a loop is left out": altered_rows(Stage.RECURRENT, depth=lambda depth: depth + 1),
    "a coda comes a loop early": altered_rows(Stage.CODA, exit_depth=lambda depth: depth - 1),
    "another slot": altered_rows(Stage.BOUNDARY, slot=np.flip),
    "a wrong output index": altered_rows(Stage.TOKENS, output_index=lambda index: index + 1),
    "all chunks lie in one place of the window": altered_rows(Stage.MIXED, window=np.zeros_like),
    "chunks lie a row further each loop": altered_batch(moved_by_depth),
    "a chunk leaves out a loop": altered_rows(
        Stage.MIXED, depth=lambda depth: np.minimum(depth + 1, FULL_DEPTH)
    ),
    "a chunk runs on past the full depth": altered_batch(
        lambda batch: (
            dataclasses.replace(batch, num_loops=1 + batch.num_loops % FULL_DEPTH)
            if batch.stage is Stage.MIXED
            else batch
        )
    ),
    "staged prompts do not end": altered_rows(Stage.MIXED, ends_prompt=np.zeros_like),
    "two prompts have the same place in the window": replaced(Staging, "start", own_ring),
    "chunks of a request that has ended stay": replaced(Staging, "drop", lambda *_: None),
    "prompts ignore the decode rows beside them": replaced(Batcher, "_chunks", full_budget),
    "a chunk catches up with the one before it": replaced(Batcher, "_chunks", last_chunk_alone),
    "outputs are told twice": altered_outputs(lambda outputs: [*outputs, *outputs]),
    "ends are not told": altered_outputs(lambda outputs: [o for o in outputs if not o.finished]),
    "a token is lost": altered_outputs(lambda outputs: list(map(without_first_token, outputs))),
    "nothing runs": replaced(Scheduler, "schedule", lambda self: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_sees(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, LookupError, RuntimeError, ValueError)):
        for seed in range(100):
            simulate_seed(seed)


# -- of prefixes -----------------------------------------------------------------------------------


def completes_at_submission(self, schedule=Scheduler.schedule):
    batch = schedule(self)
    if batch is not None and batch.stage in (Stage.PREFILL, Stage.MIXED):
        self._complete_prompts(batch)
    return batch


def completes_with_the_first_loop(self, batch, complete=Scheduler._complete_prompts):
    complete(self, dataclasses.replace(batch, num_loops=FULL_DEPTH))


def gives_up_any_known_page(self):
    page, _ = self._hash_of.popitem()
    self._idle.pop(page, None)
    self._page_of = {key: other for key, other in self._page_of.items() if other != page}
    return page


def hashes_pages_alone(tokens, page_size, salt):
    pages = range(0, len(tokens) - page_size + 1, page_size)
    return tuple(page_hashes(tokens[i : i + page_size], page_size, salt)[0] for i in pages)


def keeps_the_cache(self, release_all=KVAccounting.release_all):
    cache = getattr(self, "_cache", None)
    release_all(self)
    self._cache = cache or self._cache


def lets_go_for_all(self, owner, release=KVAccounting.release):
    for page in self._tables[owner]:
        self._holders[page] = 1
    release(self, owner)


def publishes_the_page_before(self, owner, hashes, first, publish=KVAccounting.publish):
    publish(self, owner, hashes, max(first - 1, 0))


def idle_pages_count_as_held(patch):
    def shared_positions(self, hashes):
        return len(self.find_prefix(hashes)) * self.geometry.block_size

    patch.setattr(KVAccounting, "_held", lambda self, prefix: len(prefix))
    patch.setattr(KVAccounting, "shared_positions", shared_positions)


def fills_from_the_start(self, request, *others, fill=Slots.fill):
    fill(self, request, *others)
    self.position[request.slot] = 0


# With what is said of them.
PREFIX_FAULTS = {
    "pages are known when their batch is submitted": (
        replaced(Scheduler, "schedule", completes_at_submission),
        "a page is shared that is not completed",
    ),
    "pages are known after one loop": (
        replaced(Scheduler, "_complete_prompts", completes_with_the_first_loop),
        "a page is shared that is not completed",
    ),
    "a held page is given up": (
        replaced(PrefixCache, "evict", gives_up_any_known_page),
        "a page is still in use|a page twice in one table|a page of two prompts",
    ),
    "a page is held by no more than one": (
        replaced(KVAccounting, "release", lets_go_for_all),
        "not every block is in one place",
    ),
    "an idle page stays idle when it is shared": (
        replaced(PrefixCache, "take", lambda *_: None),
        "not every block is in one place",
    ),
    "a known page is free, too": (
        replaced(PrefixCache, "let_go", lambda *_: False),
        "a page twice in one table|a page of two prompts|a page is shared that is not completed",
    ),
    "what comes before a page does not count": (
        replaced(scheduler, "page_hashes", hashes_pages_alone),
        "a page twice in one table|a page of two prompts|a cached page",
    ),
    "salts do not count": (
        replaced(scheduler, "page_hashes", lambda tokens, size, _: page_hashes(tokens, size, None)),
        "a cached page of another salt|a page of two salts",
    ),
    "the last prompt token is not computed": (
        replaced(Seating, "_reusable", lambda self, request: request.page_hashes),
        "out of bounds",
    ),
    "pages are known by the hash of the next one": (
        replaced(KVAccounting, "publish", publishes_the_page_before),
        "a page twice in one table|a cached page of other tokens|a page of two prompts",
    ),
    "the prefixes of a lost device stay known": (
        replaced(KVAccounting, "release_all", keeps_the_cache),
        "not every block is in one place",
    ),
    "idle pages need no room": (
        idle_pages_count_as_held,
        "-[1-9]+ pages to spare",
    ),
    "cached prompts run again": (
        replaced(Slots, "fill", fills_from_the_start),
        "a page is still in use|a page went to another request",
    ),
}


@pytest.mark.parametrize("fault", PREFIX_FAULTS)
def test_the_simulator_sees_and_says(fault, monkeypatch):
    install, said = PREFIX_FAULTS[fault]
    install(monkeypatch)
    with pytest.raises((AssertionError, LookupError, RuntimeError, ValueError), match=said):
        for seed in range(300):
            simulate_seed(seed)


# -- of preemption ---------------------------------------------------------------------------------


def restores_the_first_piece_again(self, next_transfer=Preemption.next_transfer):
    found = next_transfer(self)
    if found is None or found[0] is not Stage.RESTORE:
        return found
    stage, slot, transfer = found
    content = self._returning[slot].pieces[0].content
    return stage, slot, dataclasses.replace(transfer, content=content)


def saves_at_once(self):
    for slot in [slot for slot, saved in self._leaving.items() if saved is None]:
        self._begin_saving(slot)


def runs_while_it_is_saved(self, slot, begin=Preemption._begin_saving):
    stage = self._slots.stage[slot]
    begin(self, slot)
    if slot in self._leaving:
        self._slots.stage[slot], self._slots.paused[slot] = stage, False


def goes_on_at_once(self, slot, saved, come_back=Preemption.come_back):
    come_back(self, slot, saved)
    self._slots.enter(np.array([slot]), saved.progress["stage"])


def most_urgent_first(self, eligible):
    slots = self._slots
    running = eligible & (slots.stage >= PREFILL) & (slots.stage <= HELD)
    running[[*self._leaving, *self._returning]] = False
    return np.array(sorted(np.flatnonzero(running).tolist(), key=self._urgency), int)


def makes_way_for_equals(self, coming, priority, *others, make_way=Preemption.make_way):
    make_way(self, coming, priority - 1, *others)


def keeps_chunks_between_loops(self, slot, begin=Preemption._begin_saving):
    slots = self._slots
    slots.completed[slot] = max(slots.completed[slot], slots.position[slot])
    begin(self, slot)


def begins_its_token_again(self, slot, progress, put=Slots.put_progress):
    put(self, slot, progress)
    self.depth[slot] = 0


def keeps_the_pages_before(self, slot):
    return self._slots.position[slot]


PREEMPTION_FAULTS = {
    "pages come back in the place of others": (
        replaced(Preemption, "next_transfer", restores_the_first_piece_again),
        "other pages than",
    ),
    "a victim is saved while it is in flight": (
        replaced(Preemption, "begin_saving", saves_at_once),
        "a victim is still in flight",
    ),
    "a victim runs while it is saved": (
        replaced(Preemption, "_begin_saving", runs_while_it_is_saved),
        "a victim runs on",
    ),
    "a request goes on before its pages are back": (
        replaced(Preemption, "come_back", goes_on_at_once),
        "it runs before all its pages are back",
    ),
    "the most urgent leave": (
        replaced(Preemption, "_victims", most_urgent_first),
        "the most urgent request had to leave",
    ),
    "requests leave for others as urgent": (
        replaced(Preemption, "make_way", makes_way_for_equals),
        "nobody more urgent waits|it left twice",
    ),
    "host memory has no end": (
        replaced(HostMemory, "free_pages", property(lambda _: 10**9)),
        "too much on the host",
    ),
    "host memory does not come back": (
        replaced(HostMemory, "forget", lambda *_: None),
        "host_blocks",
    ),
    "what was saved is forgotten": (
        replaced(HostMemory, "keep", lambda *_: None),
        "what was saved is not restored",
    ),
    "what was saved is lost with the device": (
        replaced(HostMemory, "keep_only", lambda self, _: self._saved.clear()),
        "what was saved is not restored",
    ),
    "chunks between their loops are saved as complete": (
        replaced(Preemption, "_begin_saving", keeps_chunks_between_loops),
        "the prompt before it has not run this loop",
    ),
    "the page of the current token is not saved": (
        replaced(Preemption, "_positions_to_keep", keeps_the_pages_before),
        "its own K/V is not there",
    ),
    "the loops of the current token are forgotten": (
        replaced(Slots, "put_progress", begins_its_token_again),
        "not the loop that is next",
    ),
}


@pytest.mark.parametrize("fault", PREEMPTION_FAULTS)
def test_the_simulator_sees_in_preemption(fault, monkeypatch):
    install, said = PREEMPTION_FAULTS[fault]
    install(monkeypatch)
    with pytest.raises((AssertionError, LookupError, RuntimeError, ValueError), match=said):
        for seed in range(300):
            simulate_seed(seed)
