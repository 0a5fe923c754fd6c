"""What the commands of `rlt-jax bench` do with their flags."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from rlt_jax.bench import (
    compare,
    decode,
    kernels,
    plot,
    preemption,
    prefill,
    record,
    recording,
    replay,
    report,
    roofline,
    soak,
    synthetic,
    throughput,
)
from rlt_jax.bench.driver import BenchEngine, Configs
from rlt_jax.bench.limits import Rates
from rlt_jax.bench.modes import IN_FLIGHT, SCHEDULING, SOAK, Mode, all_modes, refused_scheduling
from rlt_jax.bench.recording import SOURCE, Conditions
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.cli_options import config_from_flags, flag_name, was_given
from rlt_jax.config import CacheConfig, ExecutionConfig, ExitConfig, SchedulerConfig
from rlt_jax.llm_engine import resolve_device
from rlt_jax.packaged_model import NAME as PACKAGED_MODEL
from rlt_jax.sampling_params import SamplingParams
from rlt_jax.validation import check_int, fail

Defaults = Mapping[type, Mapping[str, Any]]  # by config, of its fields


@dataclasses.dataclass(frozen=True)
class _Session:
    """A loaded model, the configs of the flags, and what the engines were (appended to). notes:
    lines to print below the results."""

    model: BenchModel
    configs: Configs
    say: report.Say
    engines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    startups: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(
        cls, options: argparse.Namespace, say: report.Say, defaults: Defaults | None = None
    ) -> "_Session":
        """defaults: of config fields whose flags were not given, in place of the config's own."""
        check_int("--seed", options.seed, minimum=0)

        def config(kind: type) -> Any:
            return config_from_flags(kind, options, **(defaults or {}).get(kind, {}))

        configs = Configs(
            cache=config(CacheConfig),
            scheduler=config(SchedulerConfig),
            exit=config(ExitConfig),
            execution=config(ExecutionConfig),
        )
        say("loading the model")
        source = {name: getattr(options, name) for name in (*SOURCE, "device")}
        return cls(synthetic.load_model(**source), configs, say)

    def default(self, value: Any, on_gpu: Any, on_cpu: Any) -> Any:
        return default(self.model.device, value, on_gpu, on_cpu)

    def measure(self, bench: ModuleType, spec: Any, configs: Configs) -> list[Any]:
        """The rows of one engine, which is gone afterwards."""
        kind = f"{configs.cache.layout}, {configs.execution.kernels} kernels"
        self.say(f"building the engine ({kind})")
        with BenchEngine(self.model, bench.prepare(spec, self.model, configs)) as engine:
            rows = list(bench.run(spec, engine, self.say))
            self.engines.append(engine.describe())
            self.startups.append(engine.describe_startup())
        return rows


@dataclasses.dataclass(frozen=True)
class _Limits:
    """The rates that limits were computed from, and those that were measured (None: not)."""

    used: Rates | None
    measured: Rates | None

    @classmethod
    def of(cls, options: argparse.Namespace, device: jax.Device, say: report.Say) -> "_Limits":
        measured = roofline.measured_rates(device, say) if options.roofline else None
        return cls(Rates.of(device.device_kind, measured), measured)

    def line(self) -> str:
        if self.used is None:
            return "no limits: nothing is known of this device, and its roofline was not measured"
        used = self.used.text()
        return f"limits at {used}" + (
            f" (measured: {self.measured.text()})" if self.measured else ""
        )


def default(device: jax.Device, value: Any, on_gpu: Any, on_cpu: Any) -> Any:
    """A flag's value, or what it is when it was not given."""
    if value is not None:
        return value
    return on_cpu if device.platform == "cpu" else on_gpu


def run_roofline(options: argparse.Namespace) -> None:
    report.check_output(options.output)
    check_int("--read-bytes", options.read_bytes, minimum=2**20, optional=True)
    check_int("--matmul", options.matmul, minimum=1, optional=True)
    device = resolve_device(options.device)
    size = roofline.RooflineSize.on(device.platform)
    given = {name: getattr(options, name) for name in ("read_bytes", "matmul")}
    given = {name: value for name, value in given.items() if value is not None}
    with report.progress() as say:
        rows = roofline.measure(device, dataclasses.replace(size, **given), say)
    title = f"roofline: {device.device_kind}"
    report.print_table(title, roofline.COLUMNS, roofline.table(rows))
    _write(options, "roofline", rows, device)


def run_decode(options: argparse.Namespace) -> None:
    if options.depth and options.mixed_depths:
        fail("--mixed-depths", options.mixed_depths, "cannot be used together with --depth")

    def measure(session: _Session) -> Iterator[decode.DecodeRow]:
        spec = decode.DecodeSpec(
            batches=tuple(options.batch),
            contexts=tuple(session.default(options.context, [1024], [64])),
            tokens=session.default(options.tokens, 128, 16),
            depths=tuple(options.depth or [session.model.config.total_ut_steps]),
            mixed_depths=tuple(options.mixed_depths or ()),
            skip=options.skip,
            seed=options.seed,
        )
        spec.check(session.model, session.configs)
        for layout in options.layout:
            for name in options.kernels:
                configs = session.configs
                cache = dataclasses.replace(configs.cache, layout=layout)
                execution = dataclasses.replace(configs.execution, kernels=name)
                configs = dataclasses.replace(configs, cache=cache, execution=execution)
                yield from session.measure(decode, spec, configs)

    _run_on_engines(options, decode, measure)


def run_prefill(options: argparse.Namespace) -> None:
    def measure(session: _Session) -> list[prefill.PrefillRow]:
        spec = prefill.PrefillSpec(
            requests=tuple(options.requests),
            prompts=tuple(session.default(options.prompt, [1024], [64])),
            repeats=options.repeats,
            seed=options.seed,
        )
        spec.check(session.model)
        return session.measure(prefill, spec, session.configs)

    _run_on_engines(options, prefill, measure)


def run_throughput(options: argparse.Namespace) -> None:
    def measure(session: _Session) -> list[throughput.ThroughputRow]:
        spec = throughput.ThroughputSpec(
            requests=tuple(options.requests),
            prompt=session.default(options.prompt, 1024, 64),
            output_tokens=session.default(options.output_tokens, 128, 16),
            closed_loop=options.closed_loop,
            repeats=options.repeats,
            params=config_from_flags(SamplingParams, options),
            mixed_depths=tuple(options.mixed_depths or ()),
            seed=options.seed,
        )
        spec.check(session.model)
        return session.measure(throughput, spec, session.configs)

    _run_on_engines(options, throughput, measure)


def run_replay(options: argparse.Namespace) -> None:
    if (options.file is None) == (options.record is None):
        fail("FILE", options.file, "must be given, or --record FILE instead, and not both")
    params = config_from_flags(SamplingParams, options)
    if options.record is not None:
        names = ("modes", "in_flight", "repeats", "first", "exact", "output")
        _refuse_flags(options, names, "cannot go with --record")
        _record(options, params)
        return
    rule = "has a meaning only with --record: a recording says it"
    _refuse_flags(options, ("requests", "prompt", "output_tokens", "depths", "adaptive"), rule)
    for field in dataclasses.fields(SamplingParams):
        if was_given(SamplingParams, field.name, options):
            fail(flag_name(SamplingParams, field.name), getattr(params, field.name), rule)
    _replay(options)


def _refuse_flags(options: argparse.Namespace, names: Iterable[str], rule: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False:
            fail("--" + name.replace("_", "-"), value, rule)


def _record(options: argparse.Namespace, params: SamplingParams) -> None:
    report.check_output(options.record, "--record")
    chosen = options.kernels or ["auto"]
    if len(chosen) > 1:
        fail("--kernels", chosen, "must be one with --record")
    options.seed = options.seed or 0
    if options.adaptive and options.depths:
        fail("--depths", options.depths, "cannot be used together with --adaptive")
    with report.progress() as say:
        session = _Session.of(options, say)
        model, full = session.model, session.model.config.total_ut_steps
        spec = record.RecordSpec(
            requests=session.default(options.requests, 128, 8),
            prompt=session.default(options.prompt, 1024, 64),
            output_tokens=session.default(options.output_tokens, 128, 16),
            params=params,
            depths=tuple(options.depths or range(min(2, full), full + 1)),
            adaptive=options.adaptive,
            seed=options.seed,
        )
        spec.check(model)
        execution = dataclasses.replace(session.configs.execution, kernels=chosen[0])
        configs = dataclasses.replace(session.configs, execution=execution)
        source = {name: getattr(options, name) for name in SOURCE} | {
            "synthetic": model.synthetic,
            "dtype": model.policy.dtype,
            "total_ut_steps": full,
        }
        say("recording")
        with BenchEngine(model, record.prepare(spec, model, configs)) as engine:
            made = record.record(spec, engine, source)
            described = engine.describe()
    recording.write(made, options.record, options.arguments, described, model.device)
    print(
        f"{len(made.requests)} requests, {made.width} at once, {made.output_tokens:,} output"
        f" tokens, mean depth {made.mean_depth:.2f} of {full}, fingerprint {made.fingerprint[:12]}"
    )
    print(f"wrote {options.record}")


def _replay(options: argparse.Namespace) -> None:
    recorded = recording.read(options.file)
    most = len(recorded.requests)
    check_int("--first", options.first, minimum=1, maximum=most, optional=True)
    ours = {"synthetic", "model"} if options.synthetic or options.model else set()
    for name in set(SOURCE) - ours:
        if getattr(options, name) is None:
            setattr(options, name, recorded.source[name])

    def measure(session: _Session) -> list[replay.ReplayRow]:
        model, cache = session.model, session.configs.cache
        if not was_given(CacheConfig, "layout", options):
            cache = dataclasses.replace(cache, layout=recorded.conditions.layout)
        configs = dataclasses.replace(session.configs, cache=cache)
        recorded.check_conditions(Conditions.at_hand(model, cache.layout), options.file)
        replayed = recorded.first(options.first or most)
        exact = options.exact or model.policy.dtype == "float32"
        repeats = 3 if options.repeats is None else options.repeats
        specs = [
            replay.ReplaySpec(replayed, mode, repeats, exact)
            for mode in _modes(options, cache, session.notes)
        ]
        for spec in specs:
            spec.check(cache)
        rows = [row for spec in specs for row in session.measure(replay, spec, configs)]
        return replay.compare_with_ideal(replayed, rows)

    _run_on_engines(options, replay, measure)


def _modes(options: argparse.Namespace, cache: CacheConfig, notes: list[str]) -> list[Mode]:
    """Those asked for; without --modes all that the layout allows, and a note on each other."""
    names = options.modes
    if names is None:
        refused = refused_scheduling(cache)
        notes += [f"left out: {name}: {reason}" for name, reason in refused.items()]
        names = [name for name in SCHEDULING if name not in refused]
    return all_modes(names, options.kernels or ["auto"], options.in_flight or IN_FLIGHT)


def run_preemption(options: argparse.Namespace) -> None:
    def measure(session: _Session) -> list[preemption.PreemptionRow]:
        spec = preemption.PreemptionSpec(
            contexts=tuple(session.default(options.context, [1024], [64])),
            repeats=options.repeats,
            seed=options.seed,
        )
        spec.check(session.model)
        return session.measure(preemption, spec, session.configs)

    _run_on_engines(options, preemption, measure)


def run_soak(options: argparse.Namespace) -> int:
    spec = soak.SoakSpec(
        requests=options.requests,
        cancel=options.cancel,
        max_waiting=options.max_waiting,
        max_growth=options.max_growth,
        seed=options.seed,
    )
    spec.check()
    if options.model is None and options.synthetic is None:
        options.model = PACKAGED_MODEL
    defaults = SOAK
    if config_from_flags(CacheConfig, options).layout == "shared":
        defaults = SOAK | {CacheConfig: {**SOAK[CacheConfig], "enable_prefix_caching": False}}

    def measure(session: _Session) -> list[soak.SoakRow]:
        return session.measure(soak, spec, session.configs)

    (row,) = _run_on_engines(options, soak, measure, defaults)
    for problem in row.problems:
        print(f"rlt-jax: soak: {problem}", file=sys.stderr)
    return int(bool(row.problems))


def run_kernels(options: argparse.Namespace) -> None:
    report.check_output(options.output)
    check_int("--seed", options.seed, minimum=0)
    device = resolve_device(options.device)
    name = default(device, options.synthetic, "ouro-1.4b", "ouro-tiny")
    model = synthetic.synthetic_config(name)
    spec = kernels.KernelsSpec(
        model=model,
        dtype=default(device, options.dtype, "bfloat16", "float32"),
        rows=tuple(default(device, options.rows, [1, 8, 32, 128], [4])),
        contexts=tuple(default(device, options.context, [1024, 8192], [64])),
        prompts=default(device, options.prompts, 8, 2),
        prompt_tokens=tuple(default(device, options.prompt, [1024], [64])),
        layers=model.num_hidden_layers if options.layers is None else options.layers,
        cache=config_from_flags(CacheConfig, options),
        kernels=config_from_flags(ExecutionConfig, options).kernels,
        seed=options.seed,
    )
    spec.check()
    with report.progress() as say:
        rows = list(kernels.run(spec, device, say))
        limits = _Limits.of(options, device, say)
    rows = [row.with_limit(limits.used) for row in rows]
    title = f"kernels: {name}, {spec.dtype}, on {device.device_kind}"
    report.print_table(title, kernels.COLUMNS, kernels.table(rows))
    print(limits.line())
    config = {"name": name, **report.plain(spec)}
    _write(options, "kernels", rows, device, config=config, rates=report.plain(limits))


def run_compare(options: argparse.Namespace) -> None:
    report.check_output(options.output)
    command, rows = compare.compare(options.before, options.after)
    title = f"{command}: {options.after} / {options.before}"
    report.print_table(title, compare.columns(rows), compare.table(rows))
    _write(options, "compare", rows, None)


def run_plot(options: argparse.Namespace) -> None:
    plot.plot(options.files, options.output, options.labels, options.title)
    print(f"wrote {options.output}")


RUN = {
    "roofline": run_roofline,
    "decode": run_decode,
    "prefill": run_prefill,
    "kernels": run_kernels,
    "throughput": run_throughput,
    "replay": run_replay,
    "preemption": run_preemption,
    "soak": run_soak,
    "compare": run_compare,
    "plot": run_plot,
}


def _run_on_engines(
    options: argparse.Namespace,
    bench: ModuleType,
    measure: Callable[[_Session], Iterable[Any]],
    defaults: Defaults | None = None,
) -> list[Any]:
    """Loads the model and measures; computes limits last, as the arrays of the roofline would
    count as peak memory; prints, writes and returns the rows. defaults: as for _Session.of."""
    report.check_output(options.output)
    limits = None
    with report.progress() as say:
        session = _Session.of(options, say, defaults)
        model = session.model
        rows = list(measure(session))
        if "roofline" in options:
            limits = _Limits.of(options, model.device, say)
            rows = [row.with_limit(limits.used) for row in rows]
    command = options.bench_command
    title = f"{command}: {model.name}, {model.policy.dtype}, on {model.device.device_kind}"
    report.print_table(title, bench.COLUMNS, bench.table(rows))
    if limits is not None:
        print(limits.line())
    for line in (*session.notes, *map(report.startup_line, session.startups)):
        print(line)
    late = sum(getattr(row, "compiled_meanwhile", 0) for row in rows)
    if late:
        print(f"{late} programs were compiled within the measurements above")
    sizes = {"name": model.name, **report.plain(model.config), **report.plain(model.policy)}
    _write(
        options,
        command,
        rows,
        model.device,
        config={"model": sizes, "engines": session.engines},
        rates=report.plain(limits),
        startup=tuple(session.startups),
    )
    return rows


def _write(
    options: argparse.Namespace,
    command: str,
    rows: Sequence[Any],
    device: jax.Device | None,
    **more: Any,
) -> None:
    if options.output is None:
        return
    rows = tuple(report.plain(row) for row in rows)
    result = report.Report(command, tuple(options.arguments), rows, **more)
    report.write(result.document(device), options.output)
    print(f"wrote {options.output}")
