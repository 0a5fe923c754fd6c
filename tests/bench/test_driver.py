"""An engine under measurement: the configs that fit, what is recorded, what is replayed."""

import jax
import numpy as np
import pytest

from rlt_jax.bench import driver
from rlt_jax.bench.driver import BenchEngine, Configs
from rlt_jax.bench.synthetic import BenchModel, load_model, random_array, synthetic_config
from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.engine.types import Stage
from rlt_jax.models.ouro import DTypePolicy
from rlt_jax.sampling_params import SamplingParams
from tests.support import SHAPES, small_model


@pytest.fixture
def model():
    config, params = small_model()
    return BenchModel("small", config, params, DTypePolicy("float32"), jax.devices()[0], 1.0)


def configs(**cache):
    return Configs(CacheConfig(**cache), SchedulerConfig(), ExitConfig(), ExecutionConfig())


def engine_of(model):
    """The shape that other tests have compiled already."""
    shape = SHAPES["tight"]
    return BenchEngine(
        model,
        Configs(
            CacheConfig(num_blocks=shape.num_blocks, block_size=shape.block_size),
            SchedulerConfig(
                max_num_seqs=shape.max_num_seqs,
                max_num_batched_tokens=shape.max_num_batched_tokens,
            ),
            ExitConfig(),
            ExecutionConfig(
                min_row_bucket=shape.min_row_bucket,
                min_prefill_bucket=shape.min_prefill_bucket,
            ),
        ),
    )


def test_the_pool_holds_what_the_benchmark_needs(model):
    fitted = configs(block_size=8).fitted(model, requests=3, positions=17)
    assert fitted.cache.num_blocks == 3 * 4 * 3
    assert fitted.scheduler.max_num_seqs == 3


def test_what_the_user_set_is_kept(model):
    assert configs(num_blocks=40).fitted(model, 3, 17).cache.num_blocks == 40
    assert configs(kv_cache_memory_bytes=2**20).fitted(model, 3, 17).cache.num_blocks is None


def test_a_pool_that_does_not_fit_is_left_to_the_memory_plan(model, monkeypatch):
    monkeypatch.setattr(driver, "pool_room", lambda *_: 1000.0)
    assert configs().fitted(model, 3, 17).cache.num_blocks is None


def test_batches_and_tokens_are_recorded_and_replayed(model):
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with engine_of(model) as engine:
        with engine.recording() as recorder:
            engine.run([[1, 2, 3], [4, 5]], params)
        assert sorted(recorder.sampled.values()) == [4, 4]
        assert recorder.total == 8
        decoding = [b for b in recorder.collected if b.stage is Stage.TOKENS]
        assert [b.sequence for b in recorder.collected] == list(
            range(1, len(recorder.collected) + 1)
        )
        assert len(decoding) == 3
        assert engine.replay(decoding) > 0
        # The engine goes on as if nothing had happened.
        outputs = []
        engine.submit([[1, 2, 3]], params)
        engine.finish(outputs.extend)
        again = outputs[0].token_ids
    with engine_of(model) as engine:
        outputs = []
        engine.submit([[1, 2, 3]], params)
        engine.finish(outputs.extend)
    assert outputs[0].token_ids == again
    assert engine.parts is None


def test_a_failed_request_ends_the_benchmark(model, monkeypatch):
    with engine_of(model) as engine:

        def broken(batch):
            raise ValueError("no")

        monkeypatch.setattr(engine.parts.runner, "prepare", broken)
        with pytest.raises(RuntimeError, match=r"request 0 failed: .*no"):
            engine.run([[1]], SamplingParams(max_tokens=2))


def test_random_arrays_are_random_everywhere():
    x = np.asarray(random_array(jax.random.key(0), (37, 5, 8), "float32"))
    assert x.shape == (37, 5, 8)
    assert abs(x.mean()) < 0.1 and abs(x.std() - 1) < 0.1
    assert np.count_nonzero(x) == x.size
    assert len(np.unique(x)) > 0.99 * x.size


def test_synthetic_models_by_name():
    assert synthetic_config("ouro-2.6b").num_hidden_layers == 48
    assert synthetic_config("ouro-tiny").vocab_size == 264
    with pytest.raises(ValueError, match=r"--synthetic = 'gpt': must be one of ouro-1.4b"):
        synthetic_config("gpt")


def test_a_checkpoint_is_read_as_it_is(checkpoint):
    model = load_model(model=checkpoint, total_ut_steps=2)
    assert model.config.total_ut_steps == 2 and model.config.num_hidden_layers == 2
    assert model.policy == DTypePolicy("float32")
    with pytest.raises(ValueError, match="--synthetic = 'ouro-tiny': cannot be used together"):
        load_model(model=checkpoint, synthetic="ouro-tiny")
