"""Trees of arrays, frames and spaces on the wire.

No torch here, and no streams.
"""
