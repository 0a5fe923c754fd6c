"""A PyTorch reference, independent of the runtime that is compared with it."""
