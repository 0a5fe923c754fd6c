"""A plain PyTorch Ouro and a token-by-token oracle of its early-exit decoding.

Written for reading, not for speed: the JAX runtime is compared with it. Depths count from 1; D is
the model's full depth (total_ut_steps). Shape letters: T positions, S history length, d hidden,
H query heads, K key/value heads, h head_dim, V vocabulary.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.reference.checkpoints import head_shape, random_ouro, tensor_shapes, write_hf_folder

__all__ = [
    "History",
    "IncrementalOracle",
    "LoopResult",
    "OracleOutput",
    "TorchOuro",
    "attention",
    "exit_step",
    "random_ouro",
    "write_hf_folder",
]

# attend(layer, q [T, H, h], k [T, K, h], v [T, K, h]) -> [T, H, h]. Where K/V are kept and which
# versions a query sees is the caller's business, so one model body serves every KV layout.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# --- pure functions ------------------------------------------------------------------------------


def exit_step(
    remaining: float, hazard: float, depth: int, *, min_loops: int, max_loops: int, threshold: float
) -> tuple[np.float32, bool, float]:
    """One step of the `ouro` exit rule after loop `depth`, all in f32.

    Returns (new remaining probability, exits here?, margin |1 - remaining - threshold|). The margin
    is inf where nothing was compared: before min_loops, at the max_loops cap, and at threshold 1,
    which means fixed depth (1 - remaining can round to 1, so comparing would not).
    """
    remaining = np.float32(remaining) * (np.float32(1) - np.float32(hazard))
    if depth >= max_loops:
        return remaining, True, math.inf
    if depth < min_loops or threshold == 1:
        return remaining, False, math.inf
    excess = (np.float32(1) - remaining) - np.float32(threshold)
    return remaining, bool(excess >= 0), abs(float(excess))


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of one query [H, h] over a given history [S, K, h] -> [H, h]."""
    heads, head_dim = q.shape
    group = heads // keys.shape[1]
    out = []
    for head in range(heads):
        k, v = keys[:, head // group], values[:, head // group]  # [S, h]
        out.append(torch.softmax(k @ q[head] / math.sqrt(head_dim), dim=0) @ v)
    return torch.stack(out)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of every position over itself and earlier ones; q [T, H, h], k and v [T, K, h]."""
    length, heads, head_dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    probs = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", probs, v)


def rope(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, h] of split-half RoPE, always f32: the definition rounds here."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponent)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to x [T, heads, h]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoopResult:
    """What one loop gives at every position."""

    hidden: torch.Tensor  # [T, d], after the final norm
    gate_logit: torch.Tensor  # [T]
    logits: torch.Tensor  # [T, V]


class TorchOuro:
    """Ouro's weights and one pass ("loop") through its stack of layers."""

    def __init__(self, config: dict, tensors: dict, dtype: torch.dtype = torch.float32):
        self.depth = config["total_ut_steps"]
        self.num_layers = config["num_hidden_layers"]
        self.eps = config["rms_norm_eps"]
        self.rope_theta = {**config, **(config.get("rope_parameters") or {})}["rope_theta"]
        self.heads, self.kv_heads, self.head_dim = head_shape(config)
        self.weights = {}
        for name, shape in tensor_shapes(config).items():
            x = tensors[name]
            # NumPy's bfloat16 is unknown to torch; float64 holds every source type exactly.
            x = x if isinstance(x, torch.Tensor) else torch.from_numpy(np.array(x, np.float64))
            if tuple(x.shape) != shape:
                raise ValueError(f"{name}: shape {tuple(x.shape)}, the config asks for {shape}")
            self.weights[name] = x.to(dtype)

    @classmethod
    def from_folder(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> "TorchOuro":
        """Read config.json and model.safetensors, or the shards its index names."""
        path = Path(path)
        index = path / "model.safetensors.index.json"
        files = ["model.safetensors"]
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        tensors = {k: v for file in files for k, v in load_file(path / file).items()}
        return cls(json.loads((path / "config.json").read_text()), tensors, dtype)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Token ids [T] -> [T, d]."""
        return self.weights["model.embed_tokens.weight"][torch.as_tensor(tokens)]

    def loop(self, hidden: torch.Tensor, positions: Sequence[int], attend: Attend) -> torch.Tensor:
        """All layers and the final norm, once: [T, d] -> [T, d]."""
        cos, sin = rope(torch.as_tensor(positions), self.head_dim, self.rope_theta)
        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            x = self._norm(hidden, f"{layer}.input_layernorm")
            q, k, v = (
                self._linear(x, f"{layer}.self_attn.{p}_proj").unflatten(-1, (-1, self.head_dim))
                for p in "qkv"
            )
            x = attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(-2)
            x = self._linear(x, f"{layer}.self_attn.o_proj")
            hidden = hidden + self._norm(x, f"{layer}.input_layernorm_2")

            x = self._norm(hidden, f"{layer}.post_attention_layernorm")
            x = F.silu(self._linear(x, f"{layer}.mlp.gate_proj")) * self._linear(
                x, f"{layer}.mlp.up_proj"
            )
            x = self._linear(x, f"{layer}.mlp.down_proj")
            hidden = hidden + self._norm(x, f"{layer}.post_attention_layernorm_2")
        return self._norm(hidden, "model.norm")

    def gate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Exit-gate logits: [T, d] -> [T]."""
        bias = self.weights["model.early_exit_gate.bias"]
        return (self._linear(hidden, "model.early_exit_gate") + bias)[:, 0]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """LM head: [T, d] -> [T, V]."""
        return self._linear(hidden, "lm_head")

    def dense_forward(self, tokens: Sequence[int], loops: int | None = None) -> list[LoopResult]:
        """Every position at once; each loop attends to its own K/V: LAST_EXITED at full depth."""
        hidden, results = self.embed(tokens), []
        for _ in range(self.depth if loops is None else loops):
            hidden = self.loop(
                hidden, range(len(tokens)), lambda layer, q, k, v: causal_attention(q, k, v)
            )
            results.append(LoopResult(hidden, self.gate(hidden), self.head(hidden)))
        return results

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        stats = x.to(torch.promote_types(x.dtype, torch.float32))
        stats = stats * torch.rsqrt(stats.square().mean(-1, keepdim=True) + self.eps)
        return stats.to(x.dtype) * self.weights[f"{name}.weight"]


# --- the oracle ----------------------------------------------------------------------------------


class History:
    """K/V of one request: planes[plane][layer][position] = (k [K, h], v [K, h])."""

    def __init__(self, layout: str, depth: int, num_layers: int):
        if layout not in ("last_exited", "shared"):
            raise ValueError(f"layout {layout!r}: must be 'last_exited' or 'shared'")
        self.shared = layout == "shared"
        planes = 1 if self.shared else depth
        self.planes = [[[] for _ in range(num_layers)] for _ in range(planes)]

    def entries(self, depth: int, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self.planes[0 if self.shared else depth - 1][layer]

    def write(self, depth: int, layer: int, position: int, k: torch.Tensor, v: torch.Tensor):
        """Add a position; only SHARED may replace one, the newest, in the token's later loops."""
        entries = self.entries(depth, layer)
        if self.shared and depth > 1:
            entries.pop()
        assert position == len(entries), "K/V must arrive in order of position"
        entries.append((k, v))

    def read(self, depth: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and all values [S, K, h] that a query at `depth` sees."""
        keys, values = zip(*self.entries(depth, layer))
        return torch.stack(keys), torch.stack(values)

    def finalize(self, position: int, exit_depth: int):
        """Copy the exit depth's K/V into every deeper plane (SHARED already holds its last)."""
        if self.shared:
            return
        for plane in self.planes[exit_depth:]:
            for layer, entries in enumerate(plane):
                assert position == len(entries), "a deeper plane must lack exactly this position"
                entries.append(self.entries(exit_depth, layer)[position])


@dataclass(frozen=True)
class OracleOutput:
    """One entry (or row) per output token, unless said otherwise."""

    token_ids: list[int]  # what was decoded: force_tokens where given, else the argmax
    argmax_ids: list[int]  # what greedy decoding would choose here
    exit_depths: list[int]  # entry 0 is the prompt's: D
    logprobs: list[float]  # of token_ids, from the raw logits
    logit_gaps: list[float]  # top-1 minus top-2 logit
    exit_margins: list[float]  # min |1 - remaining - threshold| compared; inf when none was
    hidden: torch.Tensor  # [N, d], the LM head's input
    logits: torch.Tensor | None  # [N, V] with keep_logits
    history: History  # at the end; the last token was never fed back


class IncrementalOracle:
    """Greedy decoding, one token and one loop at a time, with explicit K/V histories.

    exit_mode: "ouro"; "ouro_delayed": the same trigger, one more loop; "random_lookahead": the
    score of a random head, drawn from `seed`, decides about leaving after the next loop;
    "weighted": full depth, the head reads the mean over the exit distribution.
    """

    def __init__(
        self,
        model: TorchOuro,
        layout: str = "last_exited",
        total_ut_steps: int | None = None,
        exit_mode: str = "ouro",
        seed: int = 0,
    ):
        self.model = model
        self.layout = layout
        self.depth = model.depth if total_ut_steps is None else total_ut_steps
        self.exit_mode = exit_mode
        width = model.embed([0]).shape[-1]
        normal = np.random.Generator(np.random.Philox(seed)).standard_normal(width, np.float32)
        self.random_head = torch.from_numpy(normal * np.float32(width**-0.5))

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        min_loops: int | None = None,
        max_loops: int | None = None,
        exit_threshold: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        depths: Sequence[int] | None = None,
        force_tokens: Sequence[int] = (),
        keep_logits: bool = False,
    ) -> OracleOutput:
        """Decode up to max_tokens.

        depths: exit depth of each output token, replayed instead of asking the gate.
        force_tokens: decoded instead of the argmax, for as many outputs as there are.
        """
        max_loops = self.depth if max_loops is None else max_loops
        min_loops = min(2, max_loops, self.depth) if min_loops is None else min_loops
        if not 1 <= min_loops <= max_loops <= self.depth:
            raise ValueError(f"need 1 <= {min_loops=} <= {max_loops=} <= D={self.depth}")
        if not 0 <= exit_threshold <= 1:
            raise ValueError(f"{exit_threshold=}: must be in 0..1")
        if len(prompt_ids) == 0 or max_tokens < 1:
            raise ValueError("need a prompt and max_tokens >= 1")
        if depths is not None and (
            len(depths) < max_tokens
            or depths[0] != self.depth
            or not all(1 <= e <= self.depth for e in depths)
        ):
            raise ValueError(f"{depths=}: D={self.depth}, then one depth in 1..D per output token")

        history = History(self.layout, self.depth, self.model.num_layers)
        hidden, depth, margin = self._prefill(history, prompt_ids), self.depth, math.inf
        tokens, argmaxes, exits, logprobs, gaps, margins, hiddens, rows = ([] for _ in range(8))
        while True:
            logits = self.model.head(hidden)[0]
            best = int(np.argmax(logits.numpy()))  # the lowest id among equals
            n = len(tokens)
            token = int(force_tokens[n]) if n < len(force_tokens) else best
            top = logits.topk(2).values
            tokens.append(token)
            argmaxes.append(best)
            exits.append(depth)
            logprobs.append(float(torch.log_softmax(logits, dim=-1)[token]))
            gaps.append(float(top[0] - top[1]))
            margins.append(margin)
            hiddens.append(hidden[0])
            rows.append(logits)
            if token in stop_token_ids or len(tokens) == max_tokens:
                break
            hidden, depth, margin = self._decode(
                history,
                token,
                position=len(prompt_ids) + n,
                replay=None if depths is None else depths[n + 1],
                rule={"min_loops": min_loops, "max_loops": max_loops, "threshold": exit_threshold},
            )
        return OracleOutput(
            *(tokens, argmaxes, exits, logprobs, gaps, margins, torch.stack(hiddens)),
            logits=torch.stack(rows) if keep_logits else None,
            history=history,
        )

    def _prefill(self, history: History, prompt_ids: Sequence[int]) -> torch.Tensor:
        """Run the prompt at full depth; the last position's hidden [1, d]."""
        hidden = [self.model.embed([token]) for token in prompt_ids]
        positions, depths = range(len(prompt_ids)), range(1, self.depth + 1)
        if self.layout == "shared":  # a position's last loop ends before the next one starts
            order = [(position, depth) for position in positions for depth in depths]
        else:
            order = [(position, depth) for depth in depths for position in positions]
        of_last = []
        for position, depth in order:
            hidden[position] = self._loop(history, hidden[position], position, depth)
            if position == positions[-1]:
                of_last.append(hidden[position])
        return self._mean(of_last) if self.exit_mode == "weighted" else hidden[-1]

    def _decode(
        self, history: History, token: int, position: int, replay: int | None, rule: dict
    ) -> tuple[torch.Tensor, int, float]:
        """Run one token until it exits: (hidden [1, d], exit depth, least margin)."""
        hidden, remaining, least, depth, exits = self.model.embed([token]), 1.0, math.inf, 0, False
        every, triggered = [], False
        while not exits:
            depth += 1
            hidden = self._loop(history, hidden, position, depth)
            every.append(hidden)
            if replay is not None or self.exit_mode == "weighted":
                exits = depth == (self.depth if replay is None else replay)
                continue
            if self.exit_mode == "random_lookahead":
                exits = triggered or depth >= rule["max_loops"]
                triggered, margin = self._looks_ahead(hidden, depth, **rule)
            else:
                hazard = torch.sigmoid(self.model.gate(hidden).float()).item()
                remaining, now, margin = exit_step(remaining, hazard, depth, **rule)
                exits = now
                if self.exit_mode == "ouro_delayed":
                    exits, triggered = triggered or depth >= rule["max_loops"], now
            if not (exits and triggered):  # a decision that comes too late is none
                least = min(least, margin)
        history.finalize(position, depth)
        return self._mean(every) if self.exit_mode == "weighted" else hidden, depth, least

    def _looks_ahead(self, hidden, depth, *, min_loops, max_loops, threshold):
        """(leaves after the next loop?, margin)."""
        if threshold == 1 or depth + 1 < max(2, min_loops):
            return False, math.inf
        score = torch.sigmoid(hidden[0].float() @ self.random_head).item()
        excess = np.float32(score) - np.float32(threshold)
        return bool(excess >= 0), abs(float(excess))

    def _mean(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        """The mean of a token's hidden states after each loop over its exit distribution; the last
        loop takes what is left."""
        hazards = [torch.sigmoid(self.model.gate(h).float()).item() for h in hidden[:-1]] + [1.0]
        remaining, total = 1.0, torch.zeros_like(hidden[0])
        for h, hazard in zip(hidden, hazards, strict=True):
            total = total + remaining * hazard * h
            remaining *= 1 - hazard
        return total

    def _loop(self, history: History, hidden: torch.Tensor, position: int, depth: int):
        """Loop number `depth` of one position; its own K/V are written before they are read."""

        def attend(layer, q, k, v):
            history.write(depth, layer, position, k[0], v[0])
            return attention(q[0], *history.read(depth, layer))[None]

        return self.model.loop(hidden, [position], attend)
