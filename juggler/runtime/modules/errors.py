"""The error about spaces, under a name in this room."""

from juggler.runtime.wire.errors import UnsupportedSpace

__all__ = ["UnsupportedSpace"]
