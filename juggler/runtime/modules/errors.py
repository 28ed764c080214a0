"""The one error of this room that is more than a wrong value."""


class UnsupportedSpace(ValueError):
    """Nothing here serves this Gymnasium space yet; the message says what is served."""
