"""The errors of this room."""


class WireError(ValueError):
    """Bytes from elsewhere are invalid: truncated, corrupt, or over a limit.

    The message says what was found and what was expected; it may be sent back to the sender.
    """


class NotProtobuf(WireError):
    """Bytes from elsewhere are no message of protobuf's."""


class UnsupportedSpace(ValueError):
    """A Gymnasium space is not supported."""
