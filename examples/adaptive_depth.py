"""Plots accuracy against mean depth: tokens leave the loop by the model's gate, or all alike.

    pip install matplotlib
    python examples/adaptive_depth.py adaptive_depth.png

Adds numbers of 1 to 4 digits. The mean depth is that of the decoded tokens: an answer's first
token (its space) comes from the prompt, which always runs to full depth.
"""

import argparse

import numpy as np

from rlt_jax import LLM, SamplingParams

THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def measure(llm: LLM, pairs: np.ndarray, **depth: float) -> tuple[float, float]:
    """(mean depth, share of right answers) of all sums, at these depth settings."""
    params = SamplingParams(max_tokens=8, **depth)
    outputs = llm.generate([f"{a}+{b}=" for a, b in pairs], params)
    depths = [d for output in outputs for d in output.exit_depths[1:]]
    right = [output.text == f" {a + b}" for output, (a, b) in zip(outputs, pairs)]
    return float(np.mean(depths)), float(np.mean(right))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", help="the file to write, .png or .svg")
    parser.add_argument("--model", default="ouro-tiny")
    parser.add_argument("--sums", type=int, default=200)
    options = parser.parse_args(arguments)

    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 10 ** rng.integers(1, 5, (options.sums, 1)), (options.sums, 2))
    with LLM(options.model) as llm:
        loops = range(1, llm.engine.model_config.total_ut_steps + 1)
        fixed = [measure(llm, pairs, max_loops=loop) for loop in loops]
        gated = [measure(llm, pairs, exit_threshold=t, min_loops=1) for t in THRESHOLDS]
    plot({"fixed depth": fixed, "adaptive": gated}, options.picture)


def plot(lines: dict[str, list[tuple[float, float]]], picture: str) -> None:
    for name, points in lines.items():
        for depth, right in points:
            print(f"{name}, depth {depth:.2f}: {right:.1%} right")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="mean depth (loops)", ylabel="right answers")
    for (name, points), style in zip(lines.items(), ("s--", "o-")):
        axes.plot(*zip(*points), style, label=name)
    axes.legend()
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
