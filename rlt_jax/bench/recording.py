"""A recording of bench replay: requests, what they were answered, and all that this hangs on."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlt_jax.bench import report
from rlt_jax.bench.synthetic import BenchModel
from rlt_jax.validation import check_int

COMMAND = "recording"
SOURCE = ("synthetic", "model", "dtype", "total_ut_steps", "seed")  # arguments of load_model


@dataclasses.dataclass(frozen=True)
class RecordedRequest:
    """seed: of its sampling. depths, token_ids: one for each output token; the first token's
    depth is the prompt's."""

    id: str
    prompt: tuple[int, ...]
    seed: int
    depths: tuple[int, ...]
    token_ids: tuple[int, ...]

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> "RecordedRequest":
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What outputs hang on beside the requests themselves.

    model: the model's config. weights_seed: of random weights, None of a checkpoint. weights: a
    digest of the parameters on the device.
    """

    model: dict[str, Any]
    dtype: str
    kv_dtype: str
    layout: str
    weights_seed: int | None
    weights: str

    @classmethod
    def at_hand(cls, model: BenchModel, layout: str) -> "Conditions":
        return cls(
            model=report.plain(model.config),
            dtype=model.policy.dtype,
            kv_dtype=model.policy.kv_dtype,
            layout=layout,
            weights_seed=model.seed,
            weights=digest_of_weights(model.params),
        )


@dataclasses.dataclass(frozen=True)
class Recording:
    """sampling: SamplingParams fields that all requests share. source: the SOURCE that was loaded.
    exits: how the depths were chosen. width: requests at once. made_by: versions and device."""

    conditions: Conditions
    sampling: dict[str, Any]
    requests: tuple[RecordedRequest, ...]
    source: dict[str, Any]
    exits: dict[str, Any]
    width: int
    made_by: str = ""

    @property
    def fingerprint(self) -> str:
        """The sha256 of everything that determines the outputs."""
        return _fingerprint(
            report.plain(self.conditions), self.sampling, report.plain(self.requests)
        )

    @property
    def full_depth(self) -> int:
        return self.conditions.model["total_ut_steps"]

    @property
    def positions(self) -> int:
        """Of the longest request: the last sampled token is never fed back."""
        return max(len(request.prompt) + len(request.token_ids) - 1 for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def mean_depth(self) -> float:
        """Loops of a decoded token: each request's first one costs its prompt only."""
        depths = [depth for request in self.requests for depth in request.depths[1:]]
        return sum(depths) / len(depths)

    def first(self, requests: int) -> "Recording":
        """The same with the first so many requests only."""
        return dataclasses.replace(self, requests=self.requests[:requests])

    def check_conditions(self, here: Conditions, path: str) -> None:
        """Raises ValueError naming the first condition that is not the recorded one."""
        ours = dict(_flat(report.plain(here)))
        for name, recorded in _flat(report.plain(self.conditions)):
            if ours.get(name) != recorded:
                found = ours.get(name)
                raise ValueError(
                    f"{path}: {name} = {recorded!r} was recorded: here it is {found!r}"
                )


def write(
    recording: Recording, path: str, arguments: Sequence[str], engine: dict, device: jax.Device
) -> None:
    """engine: the configs of the engine that answered."""
    config = {
        "conditions": report.plain(recording.conditions),
        "sampling": recording.sampling,
        "source": recording.source,
        "exits": report.plain(recording.exits),
        "width": recording.width,
        "engine": engine,
    }
    rows = tuple(report.plain(request) for request in recording.requests)
    document = report.Report(COMMAND, tuple(arguments), rows, config=config).document(device)
    report.write({**document, "fingerprint": recording.fingerprint}, path)


def read(path: str) -> Recording:
    """A recording that `write` wrote. Raises ValueError naming the file and the rule."""
    document = report.read(path)
    if document.get("command") != COMMAND:
        found = document.get("command")
        raise ValueError(f"{path}: command = {found!r}: must be {COMMAND!r}: see bench replay")
    try:
        config, rows = document["config"], document["rows"]
        fingerprint = _fingerprint(config["conditions"], config["sampling"], rows)
        versions, machine = document["versions"], document["machine"]
        recording = Recording(
            conditions=Conditions(**config["conditions"]),
            sampling=config["sampling"],
            requests=tuple(map(RecordedRequest.parse, rows)),
            source={name: config["source"][name] for name in SOURCE},
            exits=config["exits"],
            width=config["width"],
            made_by=f"jax {versions['jax']} on {machine['device_kind']}",
        )
    except (AttributeError, KeyError, TypeError) as error:
        rule = "must be what `rlt-jax bench replay --record` wrote"
        raise ValueError(f"{path}: {rule}: {type(error).__name__}: {error}") from None
    if document.get("fingerprint") != fingerprint:
        found = document.get("fingerprint")
        raise ValueError(
            f"{path}: fingerprint = {found!r}: must be {fingerprint!r}, that of the file's"
            " contents: one or the other was changed"
        )
    check_int(f"{path}: width", recording.width, minimum=1)
    for request in recording.requests:
        _check_outputs(path, request)
    return recording


def _check_outputs(path: str, request: RecordedRequest) -> None:
    """The fingerprint holds what determines the outputs; these are the outputs themselves."""
    name = f"{path}: token_ids of request {request.id!r}"
    if not isinstance(request.token_ids, tuple) or len(request.token_ids) != len(request.depths):
        raise ValueError(f"{name}: must be a list of {len(request.depths)} tokens, one a depth")
    for i, token in enumerate(request.token_ids):
        check_int(f"{name}[{i}]", token, minimum=0)


def _fingerprint(conditions: dict, sampling: dict, requests: Sequence[dict]) -> str:
    names = ("id", "prompt", "seed", "depths")
    asked = [{name: request[name] for name in names} for request in requests]
    inputs = {"conditions": conditions, "sampling": sampling, "requests": asked}
    canonical = json.dumps(inputs, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def digest_of_weights(params: Any) -> str:
    """The sha256 of a checksum of every parameter, computed where they lie."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sums = jax.device_get([_checksum(leaf) for _, leaf in leaves])
    entries = [
        [jax.tree_util.keystr(path), list(leaf.shape), str(leaf.dtype), int(total)]
        for (path, leaf), total in zip(leaves, sums)
    ]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    """Modulo 2**32: each element's bits times an odd number of its own."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).ravel()
    odd = 2 * jax.lax.iota(jnp.uint32, bits.size) + 1
    return jnp.sum(bits.astype(jnp.uint32) * odd, dtype=jnp.uint32)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, item in value.items():
        yield from _flat(item, f"{name}.{key}" if name else key)
