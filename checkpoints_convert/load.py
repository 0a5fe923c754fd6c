"""Checkpoint to device: item by item, straight to where the parameters will live."""

import jax
import numpy as np

from rlt_jax.checkpoints_convert.checkpoint import Checkpoint
from rlt_jax.checkpoints_convert.fuse import fuse_ends, fuse_layer
from rlt_jax.checkpoints_convert.tensors import DTYPES, layer_item
from rlt_jax.models.ouro import (
    DTypePolicy,
    OuroLayerParams,
    OuroParams,
    abstract_params,
)


def load_params(
    checkpoint: Checkpoint,
    policy: DTypePolicy = DTypePolicy(),  # noqa: B008 (frozen)
    sharding: jax.sharding.Sharding | OuroParams | None = None,
) -> OuroParams:
    """The checkpoint's parameters in the policy's dtype.

    sharding: one for every leaf, or an OuroParams of shardings (a tree prefix will do); None is
    the default device alone. Each item is read, fused and cast on the host, sent to its shards
    and dropped before the next one is read: no whole copy ever exists on the host, nor on any
    device that the sharding does not name.

    Raises CheckpointError when a tensor cannot be read.
    """
    config, dtype = checkpoint.config, DTYPES[policy.dtype]
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(_default_device())
    shardings = jax.tree.broadcast(sharding, abstract_params(config, policy))

    def place(leaf: np.ndarray, target: jax.sharding.Sharding) -> jax.Array:
        return jax.block_until_ready(jax.device_put(leaf, target))

    def ends(item: str) -> dict[str, jax.Array]:
        leaves = fuse_ends(checkpoint.read_item(item), dtype)
        return {field: place(leaf, getattr(shardings, field)) for field, leaf in leaves.items()}

    def layer(number: int) -> OuroLayerParams:
        leaves = fuse_layer(checkpoint.read_item(layer_item(number)), number, dtype)
        return jax.tree.map(place, leaves, shardings.layers[number])

    return OuroParams(
        layers=tuple(layer(number) for number in range(config.num_hidden_layers)),
        **ends("embed"),
        **ends("head"),
    )


def _default_device() -> jax.Device:
    """jax_default_device where it is set (a device or a platform's name), else the first one."""
    default = jax.config.jax_default_device
    if default is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=default)[0] if isinstance(default, str) else default
