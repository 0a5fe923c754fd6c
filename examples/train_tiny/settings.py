"""What decides a training run: sizes, data, objective, optimizer and their schedule in time."""

import dataclasses
from collections.abc import Mapping

import jax
import optax
import optax.contrib

from examples.train_tiny.batch import END_ID, VOCAB_SIZE
from examples.train_tiny.objective import Objective
from rlt_jax.models.ouro_config import OuroConfig


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides a training run.

    minutes: for the whole command; the last `closing_share` of them is for stage II and the table.
    rows: of each family in a batch. decay_from: share of stage I after which the rate falls.
    """

    model: OuroConfig
    rows: Mapping[str, int]
    objective: Objective = Objective()  # noqa: RUF009 (frozen)
    minutes: float = 8.0
    closing_share: float = 0.1
    learning_rate: float = 2e-3
    warmup_share: float = 0.01
    decay_from: float = 0.6
    weight_decay: float = 0.1
    average_decay: float = 0.998
    gate_steps: int = 400
    gate_learning_rate: float = 3e-2
    save_every: float = 60.0
    validation_rows: int = 256
    test_rows: int = 512
    seed: int = 0


def model_config(**sizes: int) -> OuroConfig:
    standard = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 64,
        "total_ut_steps": 4,
    } | sizes
    return OuroConfig(
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=standard["num_attention_heads"],
        max_position_embeddings=2048,
        rope_theta=10_000.0,
        bos_token_id=END_ID,
        eos_token_ids=(END_ID,),
        **standard,
    )


STANDARD = Run(model_config(), {"arithmetic": 768, "strings": 512, "lookup": 512})
SMOKE = Run(
    model_config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16),
    {"arithmetic": 32, "strings": 16, "lookup": 16},
    minutes=0.75,
    closing_share=0.4,
    average_decay=0.9,
    gate_steps=20,
    save_every=5.0,
    validation_rows=16,
    test_rows=16,
)


def make_optimizer(run: Run) -> optax.GradientTransformation:
    """Muon for the layers' matrices, AdamW without decay for the rest; updates for rate 1."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)

    def matrices(params):
        names = {"wqkv", "wo", "w_gate_up", "w_down"}
        return jax.tree_util.tree_map_with_path(
            lambda path, _: matrix if path[-1].name in names else None, params
        )

    muon = optax.contrib.muon(
        learning_rate=1.0,
        weight_decay=run.weight_decay,
        adam_b2=0.98,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=matrices,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def rate_at(run: Run, progress: float) -> float:
    """Warm-up, plateau, linear fall to zero, by the share of stage I that is done."""
    warm = min(1.0, progress / run.warmup_share)
    fall = min(1.0, max(0.0, (1 - progress) / (1 - run.decay_from)))
    return run.learning_rate * warm * fall
