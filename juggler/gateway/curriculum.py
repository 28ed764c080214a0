"""Seeds and parameters of episodes, as simulators get them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from juggler.envrunner.environments.seeding import session_seed
from juggler.gateway.sessions import GatewaySession
from juggler.runtime.wrong_value import points_of


class Curriculum:
    """Chooses the seeds of sessions, and the parameters of new episodes."""

    def __init__(
        self,
        seed: int = 0,
        parameters: Mapping[str, float | Sequence[tuple[float, float]]] | None = None,
        steps: int = 0,
    ) -> None:
        self.own: Sequence[str] = ()  # ordered addresses that are each reserved for one simulator
        self.parameters: dict[str, float] = {}  # current numbers, by name
        self._seed = seed
        self._schedules = {name: points_of(each) for name, each in (parameters or {}).items()}
        self._begun: Counter[int] = Counter()  # number of sessions, by index of the address
        self.follow(steps)

    def follow(self, steps: int) -> None:
        """Set the parameters for a number of trained steps."""
        now = {}
        for name, points in self._schedules.items():
            at, values = zip(*points, strict=True)
            now[name] = float(np.interp(steps, at, values))
        if now != self.parameters:
            self.parameters = now

    def session_seed(self, dialed: str) -> int:
        """Return the seed of a new session.

        A simulator with a reserved address gets the same seeds in each run. Other simulators get
        them in order of arrival.
        """
        place = self.own.index(dialed) if dialed in self.own else -1
        self._begun[place] += 1
        return session_seed(self._seed, place + 1, self._begun[place])

    def news_for(self, session: GatewaySession) -> Mapping[str, float]:
        """Return changed parameters for a session; {}: it has the current ones."""
        if session.parameters is self.parameters:
            return {}
        session.parameters = self.parameters
        return self.parameters
