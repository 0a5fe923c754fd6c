"""What a benchmark must move and compute at the least: pure functions of a model's sizes."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from rlt_jax.models.ouro import DTypePolicy, OuroConfig, abstract_params

# Device kind: (bytes/s read, bf16 flop/s of a large product) that good kernels reach there.
KNOWN_RATES = {"NVIDIA H200": (4.45e12, 770e12)}


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the device can do; a limit is what these rates allow."""

    read_bytes_per_s: float
    matmul_flops_per_s: float

    def text(self) -> str:
        return (
            f"{self.read_bytes_per_s / 1e12:.3f} TB/s, {self.matmul_flops_per_s / 1e12:.2f} Tflop/s"
        )

    @classmethod
    def of(cls, device_kind: str, measured: "Rates | None") -> "Rates | None":
        """The known rates of a device or the measured ones, whichever are higher; None when
        there are neither."""
        if device_kind not in KNOWN_RATES:
            return measured
        known = cls(*KNOWN_RATES[device_kind])
        if measured is None:
            return known
        return cls(
            max(known.read_bytes_per_s, measured.read_bytes_per_s),
            max(known.matmul_flops_per_s, measured.matmul_flops_per_s),
        )


@dataclasses.dataclass(frozen=True)
class Work:
    """The bytes that must be read and the floating-point operations that must be done."""

    read_bytes: float
    flops: float

    def limit_s(self, rates: Rates) -> float:
        """Seconds that it takes at the least: the two overlap perfectly."""
        return max(self.read_bytes / rates.read_bytes_per_s, self.flops / rates.matmul_flops_per_s)


def loop_weight_bytes(model: OuroConfig, policy: DTypePolicy) -> int:
    """The weights that one loop reads: all layers."""
    layers = abstract_params(model, policy).layers
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))


def loop_matmul_flops(model: OuroConfig) -> int:
    """Of one token in one loop, attention left out."""
    layers = jax.tree_util.tree_leaves_with_path(abstract_params(model, DTypePolicy()).layers)
    return sum(2 * leaf.size for path, leaf in layers if path[-1].name != "norms")


def head_bytes(model: OuroConfig, policy: DTypePolicy) -> int:
    return model.vocab_size * model.hidden_size * jnp.dtype(policy.dtype).itemsize


def head_flops(model: OuroConfig) -> int:
    """Of one row's logits."""
    return 2 * model.vocab_size * model.hidden_size


def attention_flops_per_position(model: OuroConfig) -> int:
    """Of one query in one loop, for each position that it sees: q.k and p.v, in all layers."""
    return 4 * model.num_attention_heads * model.head_dim * model.num_hidden_layers


def token_step(
    model: OuroConfig, policy: DTypePolicy, batch: float, depth: float, positions: float
) -> Work:
    """One token for each of `batch` rows.

    depth: loops a token, on average. positions: K/V positions that a token's loops read, all
    loops together, on average (at a fixed depth: depth times the context length).
    """
    kv_bytes = model.kv_bytes_per_position(jnp.dtype(policy.kv_dtype).itemsize)
    weights = depth * loop_weight_bytes(model, policy) + head_bytes(model, policy)
    flops = depth * loop_matmul_flops(model) + head_flops(model)
    return Work(
        read_bytes=weights + batch * positions * kv_bytes,
        flops=batch * (flops + positions * attention_flops_per_position(model)),
    )


def prefill_matmuls(
    model: OuroConfig, policy: DTypePolicy, requests: int, prompt_tokens: int
) -> Work:
    """Prompts through every loop, and logits of the last position: all but the attention."""
    loops = model.total_ut_steps
    tokens = requests * prompt_tokens
    return Work(
        read_bytes=loops * loop_weight_bytes(model, policy) + head_bytes(model, policy),
        flops=tokens * loops * loop_matmul_flops(model) + requests * head_flops(model),
    )


def prefill_attention_flops(model: OuroConfig, requests: int, prompt_tokens: int) -> int:
    """Causal: position i sees i + 1 positions."""
    seen = prompt_tokens * (prompt_tokens + 1) // 2
    return requests * seen * model.total_ut_steps * attention_flops_per_position(model)


def kv_blocks(
    model: OuroConfig, layout: str, block_size: int, requests: int, positions: int
) -> int:
    """KV blocks of `requests` requests with `positions` positions each."""
    planes = model.total_ut_steps if layout == "last_exited" else 1
    return requests * planes * math.ceil(positions / block_size)
