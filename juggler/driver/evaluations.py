"""Evaluations beside the training, by a worker of their own."""

from __future__ import annotations

from juggler.driver.conversation import Conversation
from juggler.envrunner.program import EVALUATOR
from juggler.runtime.wire.v1 import training_pb2


def begin_evaluation(workers: Conversation, episodes: int) -> None:
    """Ask for one of so many episodes, unless one is under way or there is nobody to ask."""
    evaluators = workers.roster.of_role(EVALUATOR)
    if evaluators and workers.core.members and not workers.evaluating:
        workers.evaluating = True
        command = training_pb2.Evaluate(
            episodes=episodes,
            seed=workers.roster.seed(evaluators[0], workers.updates),
            connector_state=workers.connectors.everything(),
        )
        workers.outbox.send(evaluators[0], command)
