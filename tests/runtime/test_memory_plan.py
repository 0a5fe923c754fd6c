"""The memory plan: how many KV blocks, and that programs need no memory in step with the pool."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from rlt_jax.bench.synthetic import OURO_1_4B
from rlt_jax.config import CacheConfig
from rlt_jax.models.ouro import DTypePolicy, OuroConfig
from rlt_jax.runtime import memory_plan
from rlt_jax.runtime.compilation import Buckets
from rlt_jax.runtime.device_state import abstract_state, tree_bytes
from rlt_jax.runtime.memory_plan import MemoryPlan, plan_memory
from rlt_jax.runtime.programs import Kind
from tests.reference.checkpoints import tensor_shapes

CPU = jax.devices("cpu")[0]
BUCKETS = Buckets(rows=(1, 2, 4, 8), prompts=(1, 2, 4, 8, 16))
GIB = 2**30

BLOCK = 3_145_728  # 24 layers * 16 tokens * 16 heads * 128 * (K and V) * 2 bytes


def plan(
    model: OuroConfig = OURO_1_4B,
    dtype="bfloat16",
    slots: int = 8,
    device=CPU,
    buckets: Buckets = BUCKETS,
    max_in_flight: int = 1,
    **cache,
) -> MemoryPlan:
    return plan_memory(
        model,
        DTypePolicy(dtype),
        CacheConfig(**cache),
        slots,
        buckets,
        device,
        max_in_flight=max_in_flight,
    )


def tiny(**fields) -> OuroConfig:
    """Blocks of `block_size` tokens take 64 bytes a token in f32."""
    sizes = {
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 100,
        "total_ut_steps": 3,
    }
    return OuroConfig(**{**sizes, **fields})


def pool_bytes(planned: MemoryPlan, model: OuroConfig, dtype: str, slots: int = 8) -> int:
    """What the device state really allocates."""
    shape = planned.state_shape(slots, model.max_position_embeddings)
    return tree_bytes(abstract_state(model, DTypePolicy(dtype), shape).kv)


# --- numbers by hand -----------------------------------------------------------------------------


def test_ouro_1_4b_by_hand():
    planned = plan(kv_cache_memory_bytes=10 * GIB)
    assert planned.bytes_per_block == BLOCK
    assert planned.planes * planned.bytes_per_block / 16 == 786_432  # a token, LAST_EXITED
    assert planned.useful_blocks == 4096 * 4 * 8
    assert planned.num_blocks == 3412  # 10 GiB hold 3,413.3 blocks: 853 pages at 4 depths
    assert planned.num_pages == 853
    assert planned.kv_bytes == 3412 * BLOCK
    layer = 4 * 2048 * 2048 + 3 * 2048 * 5632 + 4 * 2048
    weights = 2 * 49152 * 2048 + 24 * layer + 2048 + 2048 + 1
    assert planned.weight_bytes == 2 * weights == 2_869_305_346


def test_ouro_1_4b_shared_by_hand():
    planned = plan(kv_cache_memory_bytes=10 * GIB, layout="shared")
    assert (planned.bytes_per_block, planned.planes) == (BLOCK, 1)
    assert planned.useful_blocks == 4096 * 8
    assert planned.num_blocks == planned.num_pages == 3413


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_bytes_of_a_block_and_of_the_weights(dtype, size, block_size):
    model = tiny()
    planned = plan(model, dtype, num_blocks=12, block_size=block_size)
    assert planned.bytes_per_block == 2 * 2 * block_size * 1 * 4 * size
    shapes = tensor_shapes(dataclasses.asdict(model))
    count = sum(jnp.zeros(shape).size for shape in shapes.values())
    assert planned.weight_bytes == count * size


# --- where the number of blocks comes from -------------------------------------------------------


@pytest.mark.parametrize("layout, planes", [("last_exited", 4), ("shared", 1)])
@pytest.mark.parametrize("num_blocks", [4, 5, 7, 8, 1_000_003])
def test_num_blocks_is_taken_in_whole_pages_and_never_capped(layout, planes, num_blocks):
    planned = plan(slots=1, num_blocks=num_blocks, layout=layout)
    assert planned.source == "num_blocks"
    assert planned.num_blocks == num_blocks // planes * planes
    assert planned.num_pages == num_blocks // planes
    assert planned.kv_bytes == planned.num_blocks * BLOCK


@pytest.mark.parametrize("layout, planes", [("last_exited", 4), ("shared", 1)])
@pytest.mark.parametrize("pages, extra", [(1, 0), (1, 1), (2, -1), (2, 0), (50, 17)])
def test_kv_cache_memory_bytes_is_never_exceeded(layout, planes, pages, extra):
    allowed = pages * planes * BLOCK + extra
    planned = plan(kv_cache_memory_bytes=allowed, layout=layout)
    assert planned.source == "kv_cache_memory_bytes"
    assert planned.num_pages == allowed // (planes * BLOCK)
    assert planned.kv_bytes <= allowed < planned.kv_bytes + planes * BLOCK


def test_kv_cache_memory_bytes_is_capped_at_the_useful_capacity():
    planned = plan(tiny(), "float32", slots=3, kv_cache_memory_bytes=10 * GIB, block_size=16)
    assert planned.useful_blocks == 7 * 3 * 3  # 100 positions in 7 pages, 3 depths, 3 requests
    assert planned.num_blocks == planned.useful_blocks


def test_cpu_default_is_the_useful_capacity():
    planned = plan(tiny(), "float32", slots=3, block_size=16)
    assert planned.source == "cpu_default"
    assert planned.num_blocks == planned.useful_blocks == 63
    planned = plan(tiny(), "float32", slots=3, block_size=16, layout="shared")
    assert planned.num_blocks == planned.useful_blocks == 21


def test_cpu_default_is_at_most_a_gibibyte():
    planned = plan()
    assert planned.source == "cpu_default"
    assert planned.num_blocks == 340  # 1 GiB holds 341.3 blocks: 85 pages at 4 depths
    assert planned.kv_bytes == 1_069_547_520 <= GIB
    assert plan(layout="shared").num_blocks == 341


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "cache",
    [{}, {"num_blocks": 13}, {"kv_cache_memory_bytes": 12_345, "block_size": 3}],
    ids=["default", "num_blocks", "bytes"],
)
def test_the_plan_is_what_the_device_state_allocates(layout, dtype, cache):
    model = tiny()
    planned = plan(model, dtype, layout=layout, **cache)
    assert pool_bytes(planned, model, dtype) == planned.kv_bytes
    assert planned.num_blocks == planned.num_pages * planned.planes


@pytest.mark.parametrize(
    "max_positions, block_size, num_pages, width",
    [
        (100, 16, 1000, 7),  # enough for the longest request: 100 / 16, rounded up
        (96, 16, 1000, 6),
        (97, 16, 1000, 7),
        (100, 16, 7, 7),
        (100, 16, 5, 5),  # no request can use more pages than there are
        (100, 1, 1000, 100),
        (5, 16, 1000, 1),
    ],
)
def test_table_width(max_positions, block_size, num_pages, width):
    planned = plan(tiny(), num_blocks=3 * num_pages, block_size=block_size)
    shape = planned.state_shape(6, max_positions)
    assert (shape.table_width, shape.num_pages) == (width, num_pages)
    assert (shape.num_slots, shape.planes, shape.block_size) == (6, 3, block_size)


@pytest.mark.parametrize(
    "cache, blocks, source, least",
    [
        ({"num_blocks": 3}, 3, "num_blocks", 4),
        ({"kv_cache_memory_bytes": 4 * BLOCK - 1}, 3, "kv_cache_memory_bytes", 4),
        ({"kv_cache_memory_bytes": 1}, 0, "kv_cache_memory_bytes", 4),
        ({"kv_cache_memory_bytes": BLOCK - 1, "layout": "shared"}, 0, "kv_cache_memory_bytes", 1),
        ({"block_size": 2048}, 2, "cpu_default", 4),  # 128 times BLOCK each
    ],
)
def test_a_pool_without_a_page_is_refused_with_value_and_rule(cache, blocks, source, least):
    with pytest.raises(ValueError, match=f"holds {blocks} blocks") as error:
        plan(**cache)
    assert source in str(error.value) and f"must be >= {least}" in str(error.value)


# --- a device with memory of its own -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FakeGPU:
    bytes_limit: int
    bytes_in_use: int = 0
    platform: str = "gpu"

    def memory_stats(self):
        return {"bytes_limit": self.bytes_limit, "bytes_in_use": self.bytes_in_use}


@dataclasses.dataclass
class FakeAnalysis:
    temp_size_in_bytes: int


class FakeCompiler:
    """Notes what is compiled; a prefill is said to need the most temporaries."""

    def __init__(self):
        self.asked = {}
        self.spec = None

    def __call__(self, kind, bucket, spec, device):
        self.asked[kind], self.spec = bucket, spec
        return FakeExecutable(700_000_000 if kind is Kind.PREFILL else 600_000_000)


@dataclasses.dataclass
class FakeExecutable:
    temporaries: int

    def memory_analysis(self):
        return FakeAnalysis(self.temporaries)


@pytest.fixture
def compiler(monkeypatch):
    compiler = FakeCompiler()
    monkeypatch.setattr(memory_plan, "compile_program", compiler)
    return compiler


@pytest.fixture
def fake_gpu(compiler, monkeypatch):
    """A GPU of 100 GB whose allocator may take 92 % of it."""
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    return FakeGPU(92_000_000_000)


@pytest.mark.parametrize(
    "utilization, budget",
    [(0.5, 50_000_000_000), (0.9, 90_000_000_000), (1.0, 92_000_000_000)],  # the allocator's limit
)
def test_device_plan_is_budget_less_weights_temporaries_slots_and_reserve(
    fake_gpu, utilization, budget
):
    planned = plan(
        slots=128,
        device=fake_gpu,
        gpu_memory_utilization=utilization,
        memory_reserve_bytes=1_000_000_000,
    )
    assert planned.source == "device_memory"
    assert abs(planned.budget_bytes - budget) <= 1
    assert planned.reserve_bytes == 1_000_000_000
    # Hidden state, last token, block table of 4,096 pages; temperature, top_k, top_p, seed;
    # min_loops, threshold, remaining, whether it has left.
    slots = 128 * (2048 * 2 + 4 + 4096 * 4 + (4 + 4 + 4 + 8) + (4 + 4 + 4 + 1))
    window = 4 * 16 * 2048 * 2  # hidden states of the largest prompt bucket, for each depth
    assert planned.temporary_bytes == 700_000_000 + slots + window
    free = planned.budget_bytes - 2_869_305_346 - 700_000_000 - slots - window - 1_000_000_000
    assert planned.num_pages == free // BLOCK // 4
    assert planned.kv_bytes <= free < planned.kv_bytes + 4 * BLOCK


@pytest.mark.parametrize(
    "in_use, others",
    [
        (1_000_000_000, 0),  # a part of the weights
        (2_869_305_346, 0),  # the weights
        (2_869_305_346 + 5_000_000_000, 5_000_000_000),
    ],
)
def test_device_plan_leaves_out_what_others_hold(fake_gpu, in_use, others):
    """Memory in use beyond the model's own weights is not there to be planned with."""
    alone = plan(slots=128, device=fake_gpu)
    planned = plan(slots=128, device=dataclasses.replace(fake_gpu, bytes_in_use=in_use))
    assert planned.budget_bytes == alone.budget_bytes - others
    free = planned.budget_bytes - planned.weight_bytes - planned.temporary_bytes
    free -= planned.reserve_bytes
    assert planned.kv_bytes <= free < planned.kv_bytes + 4 * BLOCK


@pytest.mark.parametrize("mixed", [False, True])
def test_device_plan_compiles_the_largest_buckets_with_the_least_pool(fake_gpu, compiler, mixed):
    plan(slots=128, device=fake_gpu, buckets=dataclasses.replace(BUCKETS, mixed=mixed))
    shape = compiler.spec.shape
    assert (shape.num_pages, shape.planes, shape.table_width) == (1, 4, 4096)
    largest = {Kind.PREFILL: 16, Kind.BOUNDARY_SAMPLE: 8, Kind.TOKEN_SAMPLE: 8}
    assert compiler.asked == largest | ({Kind.MIXED: 16} if mixed else {})


@pytest.mark.parametrize(
    "layout, pages, page_bytes", [("last_exited", 5, 4 * BLOCK), ("shared", 21, BLOCK)]
)
def test_device_plan_leaves_room_for_a_transfer_in_every_batch_in_flight(
    fake_gpu, compiler, layout, pages, page_bytes
):
    """Each as many pages as 64 MiB hold, and the slot's hidden state, last token and exit state."""
    without = plan(slots=128, device=fake_gpu, layout=layout)
    buckets = dataclasses.replace(BUCKETS, transfers=True)
    options = {"slots": 128, "device": fake_gpu, "layout": layout, "buckets": buckets}
    planned = plan(**options, max_in_flight=3)
    assert {Kind.SAVE: 1, Kind.RESTORE: 1}.items() <= compiler.asked.items()
    assert pages == 64 * 2**20 // page_bytes
    assert without.transfer_bytes == 0
    assert planned.transfer_bytes == 3 * (pages * page_bytes + 2048 * 2 + 4 + 4 + 1)
    free = planned.budget_bytes - planned.weight_bytes - planned.temporary_bytes
    free -= planned.reserve_bytes + planned.transfer_bytes
    assert planned.kv_bytes <= free < planned.kv_bytes + planned.planes * BLOCK
    assert planned.num_blocks < without.num_blocks


@pytest.mark.parametrize("layout, rows", [("last_exited", 4 * 16), ("shared", 0)])
def test_the_prompt_window_is_there_in_the_last_exited_layout(layout, rows):
    shape = plan(layout=layout).state_shape(8, 100)
    state = abstract_state(OURO_1_4B, DTypePolicy("bfloat16"), shape)
    assert shape.window_rows == rows
    window = state.prompt_hidden_wd
    assert window is None if rows == 0 else window.shape == (rows, 2048)


def test_device_plan_is_capped_at_the_useful_capacity(fake_gpu):
    planned = plan(tiny(), "float32", slots=3, device=fake_gpu, block_size=16)
    assert planned.num_blocks == planned.useful_blocks == 63


def test_device_without_room_for_a_page_is_refused(fake_gpu):
    small = dataclasses.replace(fake_gpu, bytes_limit=3_000_000_000)
    with pytest.raises(ValueError, match=r"holds 0 blocks \(source: device_memory.*must be >= 4"):
        plan(device=small)
