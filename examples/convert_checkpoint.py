"""Converts a Hugging Face checkpoint to Orbax and back, and shows that the answers are the same.

    python examples/convert_checkpoint.py ouro-tiny checkpoints/ouro-tiny
    python examples/convert_checkpoint.py ByteDance/Ouro-1.4B checkpoints/ouro-1.4b

Writes DESTINATION/orbax and DESTINATION/huggingface. `rlt-jax convert`, `export` and `inspect`
do the same from the command line.
"""

import argparse
from pathlib import Path

from rlt_jax import LLM, SamplingParams
from rlt_jax.checkpoints_convert import convert, export, inspect_checkpoint


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a folder, a hub id or ouro-tiny")
    parser.add_argument("destination", type=Path, help="a folder for both results")
    parser.add_argument("--prompt", default="17+25=")
    options = parser.parse_args(arguments)

    orbax, back = options.destination / "orbax", options.destination / "huggingface"
    convert(options.source, orbax, verify=True, force=True)
    export(orbax, back, force=True)

    answers = set()
    for folder in (options.source, orbax, back):
        info = inspect_checkpoint(folder)
        with LLM(folder) as llm:
            (output,) = llm.generate(options.prompt, SamplingParams(max_tokens=8))
        print(f"{info.kind:<12} {info.parameter_count:,} parameters: {output.text!r}  ({folder})")
        answers.add(output.token_ids)
    print("the answers are", "the same" if len(answers) == 1 else "not the same")


if __name__ == "__main__":
    main()
