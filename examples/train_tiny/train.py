"""Trains ouro-tiny from generated problems.

    python -m examples.train_tiny.train --out /tmp/ouro-tiny            # 8 minutes on an H200
    python -m examples.train_tiny.train --out /tmp/ouro-tiny --resume   # finish a stopped run
    python -m examples.train_tiny.train --out /tmp/smoke --smoke        # a minute on a CPU

The budget is time: schedules follow the share of it that is spent, whatever the machine's speed.
The folder gets model/ (the best weights so far, a Hugging Face folder), table.json (exact match by
depth and by exit threshold), log.txt and, for --resume, the state files.
"""

import argparse
import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from examples.train_tiny.batch import training_batches
from examples.train_tiny.checkpoint import export, load_tree, save_tree
from examples.train_tiny.data import examination
from examples.train_tiny.model import init_params
from examples.train_tiny.objective import stage_one, stage_two
from examples.train_tiny.scoring import (
    accuracy_by_depth,
    accuracy_by_level,
    accuracy_by_threshold,
    grade,
)
from examples.train_tiny.settings import SMOKE, STANDARD, Run, make_optimizer, rate_at
from rlt_jax.models.ouro import OuroParams

THRESHOLDS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)


@struct.dataclass
class TrainState:
    params: OuroParams
    average: OuroParams
    optimizer: optax.OptState


def readable(metrics: Mapping[str, jax.Array]) -> dict:
    return {name: np.asarray(v, np.float64).round(4).tolist() for name, v in metrics.items()}


class Trainer:
    """One run in one folder. `started` is when its clock began (time.monotonic)."""

    def __init__(self, run: Run, out: Path, started: float):
        self.run, self.out, self.started = run, out, started
        self.step, self.seconds = 0, 0.0  # of stage I
        self.budget: float | None = None  # seconds of stage I (None: to be set at its start)
        self.best, self.best_score = None, -1.0
        out.mkdir(parents=True, exist_ok=True)
        optimizer = make_optimizer(run)
        params = init_params(run.model, jax.random.key(run.seed))
        average = jax.tree.map(jnp.copy, params)
        self.state = TrainState(params, average, optimizer.init(params))

        def step_one(state, batch, key, rate, average_decay):
            gradient_of = jax.value_and_grad(stage_one, argnums=2, has_aux=True)
            (loss, metrics), gradient = gradient_of(
                run.model, run.objective, state.params, batch, key
            )
            updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
            params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
            average = optax.incremental_update(params, state.average, 1 - average_decay)
            return TrainState(params, average, optimizer_state), metrics | {"loss": loss}

        self.step_one = jax.jit(step_one, donate_argnums=0)
        self.papers = examination("validation", run.validation_rows)

    def log(self, text: str) -> None:
        line = f"[{time.monotonic() - self.started:6.1f} s] {text}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    # --- saving ---

    def save(self) -> None:
        for field in dataclasses.fields(self.state):
            save_tree(self.out / f"{field.name}.npz", getattr(self.state, field.name))
        if self.best is not None:
            save_tree(self.out / "best.npz", self.best)
        progress = {
            "step": self.step,
            "seconds": self.seconds,
            "budget": self.budget,
            "best_score": self.best_score,
        }
        (self.out / "progress.json").write_text(json.dumps(progress) + "\n", encoding="utf-8")

    def resume(self) -> None:
        parts = {
            field.name: load_tree(self.out / f"{field.name}.npz", getattr(self.state, field.name))
            for field in dataclasses.fields(self.state)
        }
        self.state = TrainState(**parts)
        progress = json.loads((self.out / "progress.json").read_text(encoding="utf-8"))
        self.step, self.seconds = progress["step"], progress["seconds"]
        self.budget, self.best_score = progress["budget"], progress["best_score"]
        if (self.out / "best.npz").exists():
            self.best = load_tree(self.out / "best.npz", self.state.average)
        self.log(f"resumed after step {self.step}, {self.seconds:.0f} s of stage I")

    def validate_and_save(self) -> None:
        """Keeps the averaged weights, as bfloat16 rounds them, if they are the best so far."""
        candidate = jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), self.state.average
        )
        graded = grade(self.run.model, candidate, self.papers)
        table = accuracy_by_depth(graded)
        score = sum(row[-1] for row in table.values()) / len(table)
        self.log(f"step {self.step}: validation {score:.2f} %, by depth {table}")
        hops = accuracy_by_level(graded["lookup"], self.papers["lookup"])
        self.log(f"lookup by hops {hops}")
        if score >= self.best_score:
            self.best, self.best_score = candidate, score
            export(self.run.model, candidate, self.out / "model")
        self.save()

    # --- the stages ---

    def train_all(self) -> None:
        """Stage I, until its budget is spent, by earlier runs that this one resumes included."""
        run = self.run
        key = jax.random.key(run.seed + 1)
        before, since, in_flight = self.seconds, None, deque()
        speed = self.step, self.seconds  # at the last log line
        for step, batch in training_batches(run.rows, run.seed, self.step):
            if self.budget is not None and self.seconds >= self.budget:
                break
            rate = rate_at(run, self.seconds / (self.budget or math.inf))
            average_decay = min(run.average_decay, (1 + step) / (10 + step))
            rates = jnp.float32(rate), jnp.float32(average_decay)
            self.state, metrics = self.step_one(
                self.state, batch, jax.random.fold_in(key, step), *rates
            )
            in_flight.append(metrics)
            if len(in_flight) > 3:
                metrics = jax.block_until_ready(in_flight.popleft())
            if since is None:  # the first step compiles: no training time, and its rate is 0
                jax.block_until_ready(self.state)
                since = saved = logged = time.monotonic()
                if self.budget is None:
                    closing = self.started + 60 * run.minutes * (1 - run.closing_share)
                    self.budget = before + max(closing - since, 1.0)
                self.log(f"compiled; stage I has {self.budget:.0f} s")
            self.step, now = step + 1, time.monotonic()
            self.seconds = before + now - since
            if now - logged > run.save_every / 4:
                per_second = (self.step - speed[0]) / (self.seconds - speed[1])
                logged, speed = now, (self.step, self.seconds)
                self.log(f"step {self.step}, {per_second:.1f}/s: {readable(metrics)}")
            if now - saved > run.save_every:
                self.validate_and_save()
                saved = time.monotonic()
        self.validate_and_save()

    def train_gate(self) -> OuroParams:
        """Stage II on the best weights; returns them with the new gate."""
        run, frozen = self.run, self.best
        optimizer = optax.adam(optax.cosine_decay_schedule(run.gate_learning_rate, run.gate_steps))

        def step_two(gate, optimizer_state, batch, key):
            def loss_of(gate):
                params = frozen.replace(gate_weight=gate[0], gate_bias=gate[1])
                return stage_two(run.model, run.objective, params, batch, key)

            (loss, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(gate)
            updates, optimizer_state = optimizer.update(gradient, optimizer_state)
            return optax.apply_updates(gate, updates), optimizer_state, metrics | {"loss": loss}

        step_two = jax.jit(step_two)
        gate = (frozen.gate_weight, frozen.gate_bias)
        optimizer_state, key = optimizer.init(gate), jax.random.key(run.seed + 2)
        for step, batch in training_batches(run.rows, run.seed + 1, 0):
            if step == run.gate_steps:
                break
            gate, optimizer_state, metrics = step_two(
                gate, optimizer_state, batch, jax.random.fold_in(key, step)
            )
            if step % 50 == 0 or step == run.gate_steps - 1:
                self.log(f"gate step {step}: {readable(metrics)}")
        weight, bias = (g.astype(jnp.bfloat16).astype(jnp.float32) for g in gate)
        return frozen.replace(gate_weight=weight, gate_bias=bias)

    def write_table(self, params: OuroParams) -> None:
        """table.json: the test split by dense passes (bfloat16)."""
        papers = examination("test", self.run.test_rows)
        graded = grade(self.run.model, params, papers)
        by_depth = accuracy_by_depth(graded)
        by_level = {name: accuracy_by_level(graded[name], papers[name]) for name in papers}
        by_threshold = accuracy_by_threshold(self.run.model, params, papers, THRESHOLDS)
        table = {
            "exact_match_by_depth": by_depth,
            "exact_match_by_level_and_depth": by_level,
            "by_exit_threshold": by_threshold,
        }
        (self.out / "table.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        for name, row in by_depth.items():
            self.log(f"test {name}: exact match at depths 1.. {row}")
        for threshold, row in by_threshold.items():
            self.log(f"threshold {threshold}: {row}")


def main(arguments: list[str] | None = None) -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all results")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's state")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a minute on a CPU")
    parser.add_argument("--minutes", type=float, help="time for the command (default: 8)")
    options = parser.parse_args(arguments)
    run = SMOKE if options.smoke else STANDARD
    if options.minutes is not None:
        run = dataclasses.replace(run, minutes=options.minutes)
    trainer = Trainer(run, options.out, started)
    trainer.log(f"jax {jax.__version__}, optax {optax.__version__}, {jax.devices()[0].device_kind}")
    if options.resume:
        trainer.resume()
        if options.minutes is not None:
            trainer.budget = None  # more time than was first planned
    trainer.train_all()
    params = trainer.train_gate()
    export(run.model, params, options.out / "model")
    trainer.write_table(params)
    trainer.log("done")


if __name__ == "__main__":
    main()
