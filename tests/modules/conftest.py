from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from weights_learner import Learner

from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.streams.weights import WeightsSubscription
from juggler.runtime.wire.frames import Limits


@pytest.fixture
def learner(tmp_path: Path, every_thread_ends: None) -> Iterator[Learner]:
    made = Learner(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def subscribe(learner: Learner) -> Iterator[Callable[..., WeightsSubscription]]:
    subscriptions: list[WeightsSubscription] = []

    def subscribe(token: str = "secret", limits: Limits | None = None) -> WeightsSubscription:
        metadata = call_metadata(token, "run", "incarnation")
        made = WeightsSubscription(
            learner.address, metadata, "envrunner-0", limits or Limits(), retry_seconds=0.02
        )
        subscriptions.append(made)
        return made

    yield subscribe
    for subscription in subscriptions:
        subscription.close()
