"""Copies of players: from a learner's weights to a frozen module that EnvRunners play with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.checkpoint.restoring import restores
from juggler.driver.config import RunConfig
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.connector_state import ConnectorState
from juggler.driver.workers.frozen_parts import FrozenParts
from juggler.driver.workers.league_weights import LeagueWeights
from juggler.driver.workers.registry import WorkerRegistry
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.actors.setups import to_json
from juggler.runtime.checkpoints.checkpoint import CheckpointError
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


class LeagueCopies:
    """Makes copies of players that learn, keeps them on the disk, and gives them to EnvRunners.

    A learner of the player is asked for its weights. They are written into the directory of the
    run, once, and sent to every worker that plays. When all of them have the copy, it can play.

    Args:
        config: of the run.
        run_dir: its directory.
        registry: who is here.
        commands: reaches them.
        connectors: by module id, what its connectors have learned.
        frozen_parts: sends workers what modules play with that are not trained.
        weights: asks learners for those of their players.
        ready: called with the id of a copy that can play from now on.
        failed: called with the id of a copy that there will not be, and why.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        registry: WorkerRegistry,
        commands: CommandSender,
        connectors: Mapping[str, ConnectorState],
        frozen_parts: FrozenParts,
        weights: LeagueWeights,
        ready: Callable[[str], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self._config, self._run_dir = config, run_dir
        self._registry, self._commands = registry, commands
        self._connectors, self._frozen_parts = connectors, frozen_parts
        self._weights, self._ready, self._failed = weights, ready, failed
        self._awaited: dict[str, set[Worker]] = {}  # by copy, EnvRunners that do not have it yet

    def copy(self, player_id: str, copy_id: str) -> None:
        """Make a copy, as soon as a learner of the player is here."""
        keep, failed = partial(self._keep, player_id, copy_id), partial(self._failed, copy_id)
        self._weights.ask(player_id, copy_id, keep, failed)

    def received(self, worker: Worker, module_id: str) -> None:
        """A worker has a copy that it was sent."""
        if module_id in self._awaited:
            self._awaited[module_id].discard(worker)
            self._look_whether_all_have(module_id)

    def left(self, worker: Worker) -> None:
        """A worker is gone: nobody waits for it."""
        for copy_id in list(self._awaited):
            self.received(worker, copy_id)

    def retire(self, copy_id: str) -> None:
        """Let workers forget a copy. Its weights stay on the disk."""
        self._weights.let_go(copy_id)
        self._awaited.pop(copy_id, None)
        if self._registry.frozen.pop(copy_id, None) is None:
            return
        for worker in self._registry.players():
            removal = training_pb2.RemovePlayer(module_id=copy_id)
            self._frozen_parts.append(worker, [removal], self._commands.send)

    def _keep(
        self, player_id: str, copy_id: str, weights: Mapping[str, Tree], version: Version
    ) -> None:
        spaces = self._registry.spaces[player_id].to_json()
        learned = self._connectors[player_id].merged
        settings_of = self._registry.trained[player_id]
        frozen = FrozenModule.copied(
            copy_id, player_id, self._config, spaces, weights, learned, version, settings_of
        )
        try:
            frozen.keep(self._run_dir)
        except CheckpointError as error:
            return self._failed(copy_id, str(error))
        self._registry.frozen[copy_id] = frozen
        self._awaited[copy_id] = set(self._registry.env_runners())
        for worker in self._registry.players():
            parts = restores(copy_id, frozen.tree, {})
            acting = to_json(frozen.acting_setup())
            add = training_pb2.AddPlayer(module_id=copy_id, config=acting)
            self._frozen_parts.append(worker, [*parts, add], self._commands.send)
        self._look_whether_all_have(copy_id)

    def _look_whether_all_have(self, copy_id: str) -> None:
        if self._awaited.get(copy_id) == set():
            del self._awaited[copy_id]
            self._ready(copy_id)
