"""Prints the tokens of two requests as they come, each with the loop at which it left the model.

    python examples/stream.py
    python examples/stream.py --model checkpoints/ouro-1.4b --exit-threshold 0.6

Both requests run in one batch: an easy token leaves it early while the other request goes on.
"""

import argparse

from rlt_jax import LLM, SamplingParams

PROMPTS = ["8316+2795=", "sort:stone="]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", default="ouro-tiny")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--exit-threshold", type=float, default=0.5)
    options = parser.parse_args(arguments)

    params = SamplingParams(
        max_tokens=options.max_tokens, exit_threshold=options.exit_threshold, min_loops=1
    )
    with LLM(options.model) as llm:
        for step in llm.stream(options.prompts, params, request_ids=options.prompts):
            for depth in step.exit_depths:
                print(f"{step.request_id:<16} {step.text!r:<8} loop {depth}", flush=True)
            if step.finished:
                print(f"{step.request_id:<16} -> {step.output.text!r}")


if __name__ == "__main__":
    main()
