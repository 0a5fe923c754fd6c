"""`python -m rlt_jax` is `rlt-jax`."""

import sys

from rlt_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
