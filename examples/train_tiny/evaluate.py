"""Measures ouro-tiny on held-out problems through rlt_jax.LLM, as a user would run it.

    python -m examples.train_tiny.evaluate --out /tmp/results      # some minutes on two CPU cores

Writes results.json and results.md: exact match of each task at total_ut_steps 1 to 4, at several
exit thresholds with the mean depth of the decoded tokens (the first output, which comes from the
prompt at full depth, and the end token do not count), and with the SHARED cache layout.
"""

import argparse
import collections
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.train_tiny.data import Problems, examination
from rlt_jax import LLM, CacheConfig, SamplingParams, SchedulerConfig

THRESHOLDS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BATCHING = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=128)


def measure(llm: LLM, papers: Mapping[str, Problems], exit_threshold: float = 1.0) -> dict:
    """Exact match of each task and their mean in percent; depths of the decoded tokens."""
    prompts = [prompt for problems in papers.values() for prompt in problems.prompts()]
    wanted = [answer for problems in papers.values() for answer in problems.answers()]
    params = SamplingParams(max_tokens=16, exit_threshold=exit_threshold)
    outputs = llm.generate(prompts, params)
    right = [output.text == answer for output, answer in zip(outputs, wanted)]
    decoded = [
        depth
        for output in outputs
        for depth in output.exit_depths[1 : len(output.text.encode())]  # one token is one byte
    ]
    ends = np.cumsum([len(problems) for problems in papers.values()])[:-1]
    by_task = {name: percent(part) for name, part in zip(papers, np.split(np.array(right), ends))}
    counts = collections.Counter(decoded)
    return {
        "exact_match": by_task,
        "mean": round(float(np.mean(list(by_task.values()))), 2),
        "mean_depth": round(float(np.mean(decoded)), 3),
        "depths": {depth: counts[depth] for depth in sorted(counts)},
    }


def percent(right: np.ndarray) -> float:
    return round(100 * float(np.mean(right)), 2)


def evaluate(model: str, papers: Mapping[str, Problems]) -> dict[str, Any]:
    """All measurements, by what was set."""
    results = {"total_ut_steps": {}, "exit_threshold": {}}
    for steps in (1, 2, 3):
        with LLM(model, total_ut_steps=steps, scheduler_config=BATCHING) as llm:
            results["total_ut_steps"][steps] = measure(llm, papers)
    with LLM(model, scheduler_config=BATCHING) as llm:
        for threshold in THRESHOLDS:
            results["exit_threshold"][threshold] = measure(llm, papers, threshold)
    results["total_ut_steps"][4] = results["exit_threshold"][1.0]
    shared = CacheConfig(layout="shared")
    with LLM(model, cache_config=shared, scheduler_config=BATCHING) as llm:
        results["shared_layout"] = {"full depth": measure(llm, papers)}
    return results


def markdown(results: Mapping[str, Any], tasks: Sequence[str]) -> str:
    """The results as tables."""

    def table(first: str, rows: Mapping[Any, dict], depth: bool) -> list[str]:
        names = [first, *tasks, "mean", *(["mean depth"] if depth else [])]
        lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
        for name, row in rows.items():
            cells = [name, *(row["exact_match"][task] for task in tasks), row["mean"]]
            cells += [row["mean_depth"]] if depth else []
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return [*lines, ""]

    about = results["about"]
    return "\n".join(
        [
            f"Exact match in percent, {about['problems_per_task']} held-out problems a task, "
            f"{about['dtype']} on {about['device']}, jax {about['jax']}.",
            "",
            *table("total_ut_steps", results["total_ut_steps"], depth=False),
            *table("exit_threshold", results["exit_threshold"], depth=True),
            *table("SHARED layout", results["shared_layout"], depth=False),
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ouro-tiny", help="a checkpoint's folder or name")
    parser.add_argument("--per-task", type=int, default=350, help="held-out problems of each task")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    options = parser.parse_args(arguments)
    papers, start = examination("test", options.per_task), time.monotonic()
    results = evaluate(options.model, papers)
    platform_name = jax.devices()[0].platform
    results["about"] = {
        "problems_per_task": options.per_task,
        "dtype": "float32" if platform_name == "cpu" else "bfloat16",
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "seconds": round(time.monotonic() - start),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    text = markdown(results, list(papers))
    (options.out / "results.md").write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    main()
