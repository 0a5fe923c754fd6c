"""Device kernels. Each lives in a folder of its own: a neutral API and a plain-jnp reference."""
