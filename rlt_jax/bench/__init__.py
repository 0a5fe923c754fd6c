"""The benchmarks behind `rlt-jax bench`: each measures one thing and says what the limit is."""
