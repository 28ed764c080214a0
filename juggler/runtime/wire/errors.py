"""The errors of this room."""


class WireError(ValueError):
    """Bytes from elsewhere that are not what they should be: truncated, corrupt, or over a limit.

    The message says what was found and what was expected; it is fit to be sent back to the sender.
    """


class UnsupportedSpace(ValueError):
    """Nobody serves this Gymnasium space; the message says why, and what is served."""
