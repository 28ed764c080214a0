"""Copies of players: from a learner's weights to a frozen module that EnvRunners play with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.checkpoint.restoring import restores
from juggler.driver.checkpoint.snapshots import state_reader
from juggler.driver.config import RunConfig
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.connector_state import ConnectorState
from juggler.driver.workers.frozen_parts import FrozenParts
from juggler.driver.workers.registry import WorkerRegistry
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.actors.setups import to_json
from juggler.runtime.checkpoints.checkpoint import CONNECTORS, Checkpoint, CheckpointError
from juggler.runtime.checkpoints.frozen import WEIGHTS, tree_digest
from juggler.runtime.connectors.mergeable_state import connector_branch
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.frames import FrameReader
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy on its way.

    Attributes:
        player_id: whose copy it is.
        copy_id: its own id.
        reader: puts the learner's answers together.
        awaited: the EnvRunners that do not have it yet, once it is sent to them.
    """

    player_id: str
    copy_id: str
    reader: FrameReader[training_pb2.StateHeader]
    awaited: set[Worker] | None = None


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
        ready: Callable[[str], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self._config, self._run_dir = config, run_dir
        self._registry, self._commands = registry, commands
        self._connectors, self._frozen_parts = connectors, frozen_parts
        self._ready, self._failed = ready, failed
        self._waiting: list[_Copy] = []  # for a learner of the player
        self._asked: dict[int, tuple[Worker, _Copy]] = {}  # by command id
        self._sent: dict[str, _Copy] = {}  # by id, that some EnvRunners do not have yet

    def copy(self, player_id: str, copy_id: str) -> None:
        """Make a copy, as soon as a learner of the player is here."""
        self._waiting.append(_Copy(player_id, copy_id, state_reader()))
        self.look()

    def look(self) -> None:
        """Ask learners that have come for the copies that wait for them."""
        waiting, self._waiting = self._waiting, []
        for copy in waiting:
            learners = self._registry.learners_of(copy.player_id)
            if not learners:
                self._waiting.append(copy)
                continue
            snapshot = training_pb2.Snapshot(module_id=copy.player_id, whole=True)
            command_id = self._commands.pool.submit(learners[0], snapshot)
            self._asked[command_id] = learners[0], copy

    def take(self, command_id: int, chunk: bytes, last: bool) -> bool:
        """A learner's answer. Returns whether it was one about a copy.

        Raises:
            ValueError: it is not the weights of the player.
        """
        if command_id not in self._asked:
            return False
        _, copy = self._asked[command_id]
        frame = copy.reader.feed(chunk)
        if last:
            del self._asked[command_id]
        if frame is None:
            if last:
                self._failed(copy.copy_id, "its learner sent half of its weights")
                raise ValueError("weights that ended in the middle")
            return True
        tree = frame.tree.get(DEFAULT_MODULE) if isinstance(frame.tree, Mapping) else None
        if not isinstance(tree, Mapping) or frame.header.module_id != copy.player_id:
            self._failed(copy.copy_id, "its learner sent something else than its weights")
            raise ValueError("something else than the weights of a module")
        self._keep(copy, tree, Version.of(frame.header.version))
        return True

    def abandoned(self, command_id: int) -> bool:
        """A learner did not answer. Returns whether it was asked for a copy, which another one may
        make."""
        if command_id not in self._asked:
            return False
        _, copy = self._asked.pop(command_id)
        self._waiting.append(_Copy(copy.player_id, copy.copy_id, state_reader()))
        return True

    def has(self, worker: Worker, module_id: str) -> None:
        """A worker has a copy that it was sent."""
        if (copy := self._sent.get(module_id)) is not None and copy.awaited is not None:
            copy.awaited.discard(worker)
            self._look_whether_all_have(copy)

    def left(self, worker: Worker) -> None:
        """A worker is gone: nobody waits for it."""
        for copy in list(self._sent.values()):
            self.has(worker, copy.copy_id)

    def retire(self, copy_id: str) -> None:
        """Let workers forget a copy. Its weights stay on the disk."""
        self._sent.pop(copy_id, None)
        self._registry.frozen.pop(copy_id, None)
        for worker in self._players():
            removal = training_pb2.RemovePlayer(module_id=copy_id)
            self._frozen_parts.append(worker, [removal], self._commands.send)

    def begin_anew(self, player_id: str, seed: int) -> None:
        """Give a player that learns the weights of a new one."""
        for learner in self._registry.learners_of(player_id):
            self._commands.send(learner, training_pb2.Reset(module_id=player_id, seed=seed))

    def reset(self, player_id: str, weights: Tree, source: str) -> None:
        """Give a player that learns other weights, and a new optimizer."""
        for learner in self._registry.learners_of(player_id):
            last = training_pb2.Restore(weights=True, whole=True, source=source)
            for part in restores(player_id, {DEFAULT_MODULE: weights}, {}, last):
                self._commands.send(learner, part)

    def _keep(self, copy: _Copy, weights: Mapping[str, Tree], version: Version) -> None:
        player_id, learned = copy.player_id, self._connectors[copy.player_id].merged
        tree: dict[str, Tree] = {player_id: {"parameters": dict(weights), "buffers": {}}}
        branch = connector_branch({player_id: learned}) if learned else {}
        spaces: dict[str, Any] = dict(self._registry.spaces[player_id].to_json())
        if branch:
            tree[CONNECTORS] = branch
        module = {"version": version, "extra": {}, "spaces": spaces}
        checkpoint = Checkpoint(version, tree, {player_id: module}, {}, self._config.flat(), spaces)
        playing: dict[str, Tree] = {
            WEIGHTS: dict(weights),
            CONNECTORS: checkpoint.learned_of(player_id),
        }
        config = self._config.of(player_id)
        frozen = FrozenModule(
            copy.copy_id, checkpoint, player_id, config, playing, tree_digest(playing)
        )
        try:
            frozen.keep(self._run_dir)
        except CheckpointError as error:
            return self._failed(copy.copy_id, str(error))
        self._registry.frozen[copy.copy_id] = frozen
        self._sent[copy.copy_id] = copy
        copy.awaited = set(self._players())
        for worker in copy.awaited:
            parts = restores(copy.copy_id, frozen.tree, {})
            acting = to_json(frozen.acting_setup())
            add = training_pb2.AddPlayer(module_id=copy.copy_id, config=acting)
            self._frozen_parts.append(worker, [*parts, add], self._commands.send)
        self._look_whether_all_have(copy)

    def _players(self) -> list[Worker]:
        """The workers that play, or are about to."""
        return [each for each in self._registry.attached.values() if each.role != LEARNER]

    def _look_whether_all_have(self, copy: _Copy) -> None:
        if not copy.awaited and copy.copy_id in self._sent:
            del self._sent[copy.copy_id]
            self._ready(copy.copy_id)
