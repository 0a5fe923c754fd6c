"""The one error of this package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written. The message names the file, the tensor or field,
    its value and the rule."""
