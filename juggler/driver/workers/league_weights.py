"""Weights of players that learn, as one of their learners has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from juggler.driver.checkpoint.snapshots import state_reader
from juggler.driver.workers.command_sender import CommandSender
from juggler.driver.workers.registry import WorkerRegistry
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.frames import FrameReader
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


@dataclass(slots=True, eq=False)
class _Wanted:
    """Weights on their way.

    Attributes:
        player_id: whose.
        for_id: of the player that is to have them.
        then: called with the weights.
        failed: called with why there are none.
        reader: puts the learner's answers together.
        unwanted: nobody is to have them any more.
        has_others: the player was reset since: only the learner that was asked can send them.
    """

    player_id: str
    for_id: str
    then: Callable[[Mapping[str, Tree], Version], None]
    failed: Callable[[str], None]
    reader: FrameReader[training_pb2.StateHeader]
    unwanted: bool = False
    has_others: bool = False


class LeagueWeights:
    """Asks learners for the weights of their players, until one has sent them.

    Args:
        registry: who is here.
        commands: reaches them.
    """

    def __init__(self, registry: WorkerRegistry, commands: CommandSender) -> None:
        self._registry, self._commands = registry, commands
        self._waiting: list[_Wanted] = []  # for a learner of the player
        self._asked: dict[int, tuple[Worker, _Wanted]] = {}  # by command id

    def ask(
        self,
        player_id: str,
        for_id: str,
        then: Callable[[Mapping[str, Tree], Version], None],
        failed: Callable[[str], None],
    ) -> None:
        """Ask for the weights of a player, as soon as a learner of it is here.

        Args:
            player_id: of the player.
            for_id: of the one that is to have them.
            then: called with them.
            failed: called with why there are none.
        """
        self._waiting.append(_Wanted(player_id, for_id, then, failed, state_reader()))
        self.look()

    def look(self) -> None:
        """Ask learners that have come for the weights that are waited for."""
        waiting, self._waiting = self._waiting, []
        for wanted in waiting:
            learners = self._registry.learners_of(wanted.player_id)
            if not learners:
                self._waiting.append(wanted)
                continue
            snapshot = training_pb2.Snapshot(module_id=wanted.player_id, whole=True)
            command_id = self._commands.pool.submit(learners[0], snapshot)
            self._asked[command_id] = learners[0], wanted

    def take(self, command_id: int, chunk: bytes, last: bool) -> bool:
        """A learner's answer. Returns whether it was one about a player's weights.

        Raises:
            ValueError: it is not these weights.
        """
        if command_id not in self._asked:
            return False
        _, wanted = self._asked[command_id]
        if last:
            del self._asked[command_id]
        if wanted.unwanted:
            return True
        try:
            found = _weights(wanted, chunk, last)
        except ValueError as error:
            self._asked.pop(command_id, None)
            wanted.failed(f"its learner did not send its weights: {error}")
            raise
        if found is not None:
            wanted.then(*found)
        return True

    def abandoned(self, command_id: int) -> bool:
        """A learner did not answer. Returns whether it was asked for weights, which another one may
        send, unless the player was reset meanwhile."""
        if command_id not in self._asked:
            return False
        _, wanted = self._asked.pop(command_id)
        if wanted.has_others and not wanted.unwanted:
            wanted.failed("its learner sent no weights, and others have begun anew")
        elif not wanted.unwanted:
            self.ask(wanted.player_id, wanted.for_id, wanted.then, wanted.failed)
        return True

    def was_reset(self, player_id: str) -> None:
        """A player has other weights than those that its learners were asked for."""
        for _, wanted in self._asked.values():
            wanted.has_others = wanted.has_others or wanted.player_id == player_id

    def let_go(self, for_id: str) -> None:
        """A player is not to have any weights any more."""
        self._waiting = [each for each in self._waiting if each.for_id != for_id]
        for _, wanted in self._asked.values():
            wanted.unwanted = wanted.unwanted or wanted.for_id == for_id

    def wanted_of(self, player_id: str) -> bool:
        """Whether somebody waits for weights of this player."""
        asked = [wanted for _, wanted in self._asked.values()]
        return any(wanted.player_id == player_id for wanted in (*self._waiting, *asked))


def _weights(
    wanted: _Wanted, chunk: bytes, last: bool
) -> tuple[Mapping[str, Tree], Version] | None:
    """What a learner has sent, once all of it is here.

    Raises:
        ValueError: it is not the weights of the player.
    """
    frame = wanted.reader.feed(chunk)
    if frame is None:
        if last:
            raise ValueError("they ended in the middle")
        return None
    tree = frame.tree.get(DEFAULT_MODULE) if isinstance(frame.tree, Mapping) else None
    if not isinstance(tree, Mapping) or frame.header.module_id != wanted.player_id:
        raise ValueError("something else than the weights of a module")
    return tree, Version.of(frame.header.version)
