"""bench replay --record: answers requests in the reference mode and keeps what it did."""

import dataclasses
from typing import Any

import numpy as np

from rlt_jax.bench.driver import BenchEngine, Configs, check_prompt, draw_depths, random_prompts
from rlt_jax.bench.modes import Mode
from rlt_jax.bench.recording import Conditions, RecordedRequest, Recording
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.config import ExitConfig
from rlt_jax.outputs import RequestOutput
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_int, fail

_SAMPLING = ("temperature", "top_p", "top_k")
_EXIT = ("exit_threshold", "min_loops", "max_loops")


@dataclasses.dataclass(frozen=True)
class RecordSpec:
    """requests: in all; the engine runs max_num_seqs of them at once. params: sampling, and with
    `adaptive` when the model's own gate lets a token go. depths: to draw each decoded token's
    from otherwise. seed: of prompts, depths and sampling."""

    requests: int
    prompt: int
    output_tokens: int
    params: SamplingParams
    depths: tuple[int, ...] = ()
    adaptive: bool = False
    seed: int = 0

    def check(self, model: BenchModel) -> None:
        """Raises ValueError that names the flag, the value and the rule."""
        check_int("--requests", self.requests, minimum=1)
        check_int("--output-tokens", self.output_tokens, minimum=2)
        check_prompt(self.prompt, self.output_tokens, model.config)
        if self.adaptive:
            if self.params.exit_threshold == 1:
                fail("--exit-threshold", 1.0, "must be < 1 with --adaptive: 1 is a fixed depth")
            return
        for depth in self.depths:
            check_int("--depths", depth, minimum=1, maximum=model.config.total_ut_steps)
        for name in _EXIT:
            value = getattr(self.params, name)
            if value != getattr(SamplingParams(), name):
                fail(f"--{name.replace('_', '-')}", value, "has a meaning only with --adaptive")

    def request_params(self, index: int) -> SamplingParams:
        given = {"max_tokens": self.output_tokens, "ignore_eos": True, "seed": self.seed + index}
        if not self.adaptive:
            given.update(min_loops=min(self.depths), max_loops=max(self.depths))
        return dataclasses.replace(self.params, **given)


def prepare(spec: RecordSpec, model: BenchModel, configs: Configs) -> Configs:
    """The reference mode: refill, one batch in flight."""
    exits = ExitConfig()
    if not spec.adaptive:
        depths = draw_depths(
            model.config, spec.depths, spec.requests, spec.output_tokens, spec.seed
        )
        exits = ExitConfig(mode="trace", depths_by_request=depths)
    mode = Mode("refill", "sync", configs.execution.kernels)
    configs = dataclasses.replace(
        configs,
        scheduler=mode.scheduler(configs.scheduler),
        exit=exits,
        execution=mode.execution(configs.execution),
    )
    width = configs.scheduler.max_num_seqs or spec.requests
    return configs.fitted(model, width, spec.prompt + spec.output_tokens - 1)


def record(spec: RecordSpec, engine: BenchEngine, source: dict[str, Any]) -> Recording:
    """Answers every request once. source: load_model's arguments."""
    model, configs = engine.model, engine.configs
    rng = np.random.default_rng(spec.seed)
    prompts = random_prompts(model.config, spec.requests, spec.prompt, rng)
    outputs: list[RequestOutput] = []
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, spec.request_params(i))
    engine.finish(outputs.extend)
    exits = {name: getattr(spec.params, name) for name in _EXIT}
    return Recording(
        conditions=Conditions.at_hand(model, configs.cache.layout),
        sampling={name: getattr(spec.params, name) for name in _SAMPLING},
        requests=tuple(_recorded(o) for o in sorted(outputs, key=lambda o: int(o.request_id))),
        source=source,
        exits=exits if spec.adaptive else {"drawn_from": list(spec.depths)},
        width=configs.scheduler.resolve(model.device.platform).max_num_seqs,
    )


def _recorded(output: RequestOutput) -> RecordedRequest:
    return RecordedRequest(
        id=output.request_id,
        prompt=output.prompt_token_ids,
        seed=output.sampling_params.seed,
        depths=output.exit_depths,
        token_ids=output.token_ids,
    )
