"""Answers a few prompts in one batch and shows at which loop each token left the model.

    python examples/generate.py
    python examples/generate.py --model checkpoints/ouro-1.4b --exit-threshold 0.6 "The sea is"

The first depth of an answer is always the full one: that token comes from the prompt.
"""

import argparse

from rlt_jax import LLM, SamplingParams

PROMPTS = ["17+25=", "rev:stone=", "a=c;c=f;f=7;b=2;d=b;e=3;g=1;h=e;a?"]


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
        for prompt, output in zip(options.prompts, llm.generate(options.prompts, params)):
            print(f"{prompt}{output.text}")
            print(f"    depths {output.exit_depths}, ended by {output.finish_reason}")


if __name__ == "__main__":
    main()
