"""Attention over paged K/V, and the writes that feed it."""

from rlt_jax.kernels.paged_attention.reference import finalize_kv, paged_attention, write_kv
from rlt_jax.kernels.paged_attention.types import PagedKV, TileBatch

__all__ = ["PagedKV", "TileBatch", "finalize_kv", "paged_attention", "write_kv"]
