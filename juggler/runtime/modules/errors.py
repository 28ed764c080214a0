"""The one error of this room that is more than a wrong value."""

from juggler.runtime.wire.errors import UnsupportedSpace

__all__ = ["UnsupportedSpace"]
