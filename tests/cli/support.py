"""The flags that say what tests.tiny says, and checks that the tests of the command line share."""

import io
import json

SMALL = ["--num-blocks=256", "--max-num-seqs=4", "--min-row-bucket=4", "--min-prefill-bucket=128"]
ADAPTIVE = ["--max-tokens=12", "--exit-threshold=0.5", "--ignore-eos"]
PROMPTS = ["Hello", "the quick brown fox"]


class Typed(io.StringIO):
    """Standard input at a terminal."""

    def isatty(self):
        return True


def prompt_flags(prompts=PROMPTS):
    return [part for prompt in prompts for part in ("--prompt", prompt)]


def parse_lines(out):
    assert out.endswith("\n")
    return [json.loads(line) for line in out[:-1].split("\n")]


def assert_one_error_line(result, message):
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("rlt-jax: error: ")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert message in err


def neutral(text):
    """A text as it is shown: whatever would steer the terminal replaced."""
    replaced = "\N{REPLACEMENT CHARACTER}"
    return "".join(c if c in "\n\t" or c.isprintable() else replaced for c in text)
