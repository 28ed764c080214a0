"""What an environment's own error becomes."""

from __future__ import annotations

import traceback


class EnvironmentFailed(Exception):
    """An environment raised, hung, died, or broke Gymnasium's contract.

    Attributes:
        environment: which one, such as "environment 3 (CartPole-v1)".
        call: what was asked of it: "constructor", "reset" or "step".
        reason: one line.
        traceback: the environment's own, from whichever process it ran in; empty where it has none.
    """

    def __init__(self, environment: str, call: str, reason: str, traceback: str = "") -> None:
        super().__init__(environment, call, reason, traceback)
        self.environment = environment
        self.call = call
        self.reason = reason
        self.traceback = traceback
        if traceback:
            # A note is part of every printed traceback, so nobody who prints one can lose it.
            self.add_note(traceback)

    @classmethod
    def during(cls, environment: str, call: str, error: Exception) -> EnvironmentFailed:
        """From an exception that is being handled."""
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return cls(environment, call, reason, traceback.format_exc())

    def __str__(self) -> str:
        return f"{self.environment} failed in {self.call}: {self.reason}"
