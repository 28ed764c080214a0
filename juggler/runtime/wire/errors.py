"""The errors of this room."""


class WireError(ValueError):
    """Received bytes are invalid: truncated, corrupt, or over a limit.

    The message describes what was found and expected; it may be sent back to the sender.
    """


class UnsupportedSpace(ValueError):
    """A Gymnasium space is not supported."""
