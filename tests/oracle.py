"""Comparing engine runs with each other and with the PyTorch oracle (invariant 1)."""

import dataclasses
import functools

import pytest

from rlt_jax.config import ExitConfig
from rlt_jax.outputs import RequestOutput
from tests.support import Work, small_checkpoint

TIE = 1e-5
OURO = ExitConfig()


@functools.cache
def torch_oracle(layout: str, exits: ExitConfig = OURO):
    """The token-by-token oracle on the small model."""
    torch = pytest.importorskip("torch")
    from tests.reference.ouro_torch import IncrementalOracle, TorchOuro

    torch.set_num_threads(1)
    model = TorchOuro(*small_checkpoint())
    return IncrementalOracle(model, layout, exit_mode=exits.mode, seed=exits.seed)


@functools.cache
def expected(work: Work, layout: str, eos: tuple[int, ...], exits: ExitConfig = OURO):
    """The oracle's output for a request."""
    params = work.params
    return torch_oracle(layout, exits).generate(
        work.prompt,
        max_tokens=params.max_tokens,
        min_loops=params.min_loops,
        max_loops=params.max_loops,
        exit_threshold=params.exit_threshold,
        stop_token_ids=params.stop_token_ids + (() if params.ignore_eos else eos),
    )


@dataclasses.dataclass
class Comparison:
    """Counts what was compared. Only a margin under TIE counts as a tie: a tie ends its request's
    comparison, and there may be at most one per 10,000 tokens."""

    tokens: int = 0
    ties: int = 0
    depths: set[int] = dataclasses.field(default_factory=set)

    def compare(
        self,
        work: Work,
        output: RequestOutput,
        layout: str,
        eos: tuple[int, ...] = (),
        exits: ExitConfig = OURO,
    ):
        """Asserts that an engine's output is the oracle's, token by token and depth by depth."""
        oracle = expected(dataclasses.replace(work, arrival=0, cancel=None), layout, eos, exits)
        pairs = zip(output.token_ids, output.exit_depths, strict=True)
        for i, (token, depth) in enumerate(pairs):
            gap, margin = oracle.logit_gaps[i], oracle.exit_margins[i]
            if (token, depth) != (oracle.token_ids[i], oracle.exit_depths[i]):
                assert min(gap, margin) < TIE, (
                    f"request {output.request_id} differs at output {i}: (token, depth) ="
                    f" {(token, depth)}, oracle {(oracle.token_ids[i], oracle.exit_depths[i])};"
                    f" top-2 logit gap {gap:.2e}, |score - threshold| {margin:.2e}"
                )
                self.ties += 1
                print(f"tie: request {output.request_id}, output {i}: {gap:.2e}, {margin:.2e}")
                return
            self.tokens += 1
            self.depths.add(depth)
            if output.logprobs is not None:
                assert abs(output.logprobs[i] - oracle.logprobs[i]) < 1e-4
        if output.finish_reason != "abort":
            assert len(output.token_ids) == len(oracle.token_ids)

    def check(self, min_tokens: int, min_depths: int = 3):
        """Asserts that the comparison was worth something."""
        assert self.tokens >= min_tokens
        assert len(self.depths) >= min_depths
        assert self.ties <= self.tokens // 10_000
