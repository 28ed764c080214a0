"""How often, and in what parts, one update learns from its sample. No torch here: the driver checks
it too."""

from __future__ import annotations


def check_passes(minibatch_size: int | None, num_epochs: int | None) -> None:
    """
    Raises:
        ValueError: one of the two is no number above 0.
    """
    for name, value in (("minibatch_size", minibatch_size), ("num_epochs", num_epochs)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} = {value!r}: must be a whole number, at least 1")
