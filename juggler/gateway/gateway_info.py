"""What a gateway says of itself to whoever asks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from juggler.gateway.session_manager import GatewaySettings, SessionManager
from juggler.gateway.sessions import PROTOCOL_MAX, PROTOCOL_MIN, SERVED
from juggler.runtime.wire.v1 import simulator_pb2 as pb


class GatewayInfo:
    """
    Args:
        manager: of the sessions.
        settings: of the gateway.
        events: how often each happened.
        counted: of inferences, as `GatewayServer.counted`.
    """

    def __init__(
        self,
        manager: SessionManager,
        settings: GatewaySettings,
        events: Counter[str],
        counted: Mapping[str, float],
    ) -> None:
        self._manager, self._settings = manager, settings
        self._events, self._counted = events, counted

    def message(self) -> pb.Info:
        info = pb.Info(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            run_id=self._settings.run_id,
            modes=self._modes(),
            counts=self.counts(),
        )
        info.agents.extend(self._manager.agents.values())
        return info

    def counts(self) -> dict[str, float]:
        """Counts of events so far, and of what is here now, by name."""
        counts: dict[str, float] = defaultdict(float, {**self._events, **self._counted})
        sessions = self._manager.sessions.by_id.values()
        counts["sessions"] = len(sessions)
        counts["environments"] = sum(session.environments for session in sessions)
        for player in self._manager.players.values():
            for name, count in player.environments.counts.items():
                counts[name] += count
            counts["steps_waiting"] += len(player.waiting)
            counts["recorded_steps_waiting"] += player.recorder.steps_waiting
        if inferences := counts["inferences"]:
            counts["rows_per_inference"] = counts["inferred_rows"] / inferences
        return counts

    def _modes(self) -> list[pb.Mode]:
        if self._settings.agents:
            return [pb.REMOTE_INFERENCE]
        return [m for m in SERVED if m != pb.LOGGED_DATA or not self._settings.refuses_logged]
