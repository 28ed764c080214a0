"""Learning players that come and go during a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from juggler.driver.checkpoint.first_weights import FirstWeights
from juggler.driver.checkpoint.snapshots import state_reader
from juggler.driver.league.commands import INITIAL
from juggler.driver.league.roster import Player
from juggler.driver.league_players import RESETS, module_of
from juggler.runtime.actors.worker import worker_seed
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.checkpoints.weights import WEIGHTS, weights_of
from juggler.runtime.connectors.mergeable_state import State, connector_state
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.frames import FrameReader
from juggler.runtime.wire.trees import Path as TreePath
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import training_pb2

if TYPE_CHECKING:
    from juggler.driver.run_parts import RunParts
    from juggler.driver.workers.league_run import LeagueRun


class LeagueLearners:
    """Adds, resets and retires learning players.

    A player begins with new weights, with the weights of a frozen player, or with the current
    weights of another learning player. It has the settings of the player that it descends from, or
    of the first player with its role.
    """

    def __init__(
        self,
        parts: RunParts,
        league: LeagueRun,
        resume: Checkpoint | None,
        beginning: Mapping[str, FirstWeights],
    ) -> None:
        self._first, self._seed = parts.config.module_ids, parts.config.driver.seed
        self._core, self._registry, self._trained = parts.core, parts.registry, parts.trained
        self._progress, self._beginning, self._league = parts.progress, beginning, league
        self._roster, self._weights = league.league.roster, league.weights
        if resume is not None:
            resets = resume.counters.get(RESETS, {})
            for player in self._roster.learners():
                player_id = player.player_id
                if player_id not in resume.module_ids:
                    self._restart_player(player, resume)
                elif resume.version_of(player_id)[0] < resets.get(player_id, 0):
                    self._repeat_reset(player)

    def add(self, player_id: str) -> None:
        """Train a player, unless it was there from the start."""
        source = self._roster.players[player_id].source
        if player_id in self._core.modules:
            return
        if self._is_here(source):
            self._train(player_id, self._first_weights(player_id, source))
        elif source in self._core.modules:
            then = partial(self._train_with, player_id, source)
            self._weights.ask(source, player_id, then, partial(self._cannot, player_id))
        else:
            self._cannot(player_id, f"{source!r} has no weights here to start from")

    def must_fit(self, player_id: str, source: str) -> None:
        """Check that a player can be `reset` to these weights."""
        first = self._first_weights(player_id, source)
        if source != INITIAL and first and (other := self._other_network(player_id, first)):
            raise ValueError(f"{player_id} cannot be reset to {source}: {other}")

    def reset(self, player_id: str, source: str) -> None:
        """Give a player other weights, a new optimizer and new schedules.

        Args:
            source: INITIAL, or the id of a frozen player that is ready.
        """
        self._weights.was_reset(player_id)
        self._trained.reset(player_id, *self._new_life(player_id, source))

    def resets(self) -> dict[str, int]:
        """Return generations of players' first weights after their last resets."""
        last = {
            each.player_id: self._trained.learners[each.player_id].last_reset
            for each in self._roster.learners()
            if each.player_id in self._trained.learners
        }
        return {player_id: reset.generation for player_id, reset in last.items() if reset}

    def retire(self, player_id: str) -> None:
        """Stop training a player."""
        if player_id in self._core.modules:
            self._trained.remove(player_id)
            self._progress.message(f"league: {player_id} has left, and no longer learns", "info")

    def forget_settled(self) -> None:
        """Forget players that have left, unless a worker waits for their weights."""
        needed = self.needed()
        for player_id in self._trained.settled():
            if player_id not in needed and not self._weights.wanted_of(player_id):
                self._trained.forget(player_id)

    def needed(self) -> set[str]:
        """Return sources of players that have had no learner yet.

        A checkpoint is missing these players, so a resumed run needs their sources.
        """
        begun = {module.module_id for module in self._core.in_checkpoints()}
        return {each.source for each in self._roster.learners() if each.player_id not in begun}

    def _train_with(
        self, player_id: str, source: str, weights: Mapping[str, Tree], _: Version
    ) -> None:
        learned = self._trained.connectors[source].merged
        self._train(player_id, _copied(player_id, weights, learned, source))

    def _train(self, player_id: str, first: FirstWeights | None) -> None:
        model = self._roster.modelled_on(player_id, self._first)
        if first and (other := self._other_network(player_id, first)):
            return self._cannot(player_id, other)
        try:
            self._trained.add(player_id, model, first)
        except ValueError as error:
            return self._cannot(player_id, str(error))
        begins_with = first.text if first else "new weights"
        self._progress.message(f"league: {player_id} is new, and learns from {begins_with}", "info")

    def _cannot(self, player_id: str, why: str) -> None:
        self._progress.message(f"league: {player_id} cannot learn: {why}", "warning")
        self._league.removed(player_id)

    def _other_network(self, player_id: str, first: FirstWeights) -> str:
        """Describe how weights do not fit a player's network, or ""."""
        if not first.whole:
            return ""
        model, known = self._roster.modelled_on(player_id, self._first), self._registry.frozen
        copies = (
            known[each.player_id]
            for each in self._roster.present()
            if each.player_id in known
            and each.parent
            and self._roster.modelled_on(each.parent, self._first) == model
        )
        if (copy := next(copies, None)) is None:
            return ""
        own, given = _shapes(copy.tree[WEIGHTS]), _shapes(first.weights)
        for path in {**own, **given}:
            has, gets = own.get(path, "nothing"), given.get(path, "nothing")
            if has != gets:
                return (
                    f"{first.text} are of another network: at {'.'.join(path)!r}, {player_id} "
                    f"has {has}, and these weights have {gets}"
                )
        return ""

    def _new_life(self, player_id: str, source: str) -> tuple[int, FirstWeights | None]:
        """Return seed and first weights of a player that is reset."""
        life = self._roster.players[player_id].life
        seed = worker_seed(self._seed, player_id, index=life)
        first = self._first_weights(player_id, source)
        if first is not None:
            words = f"league: {player_id}, reset to {first.text}"
            first = replace(first, source=words, selectable=False)
        return seed, first

    def _is_here(self, source: str) -> bool:
        """Return whether no learner has to be asked for these weights."""
        return source == INITIAL or self._module(source) in self._registry.frozen

    def _first_weights(self, player_id: str, source: str) -> FirstWeights | None:
        """Return weights that are here for a player; None: new weights."""
        if source == INITIAL:
            return self._beginning.get(self._roster.modelled_on(player_id, self._first))
        frozen = self._registry.frozen[self._module(source)]
        learned = connector_state(frozen.checkpoint, frozen.source)
        return _copied(player_id, frozen.tree[WEIGHTS], learned, source)

    def _module(self, source: str) -> str:
        """Return the module of a player that another one copies."""
        player = self._roster.players.get(source)
        return source if player is None else module_of(player)

    def _restart_player(self, player: Player, resume: Checkpoint) -> None:
        """Start a player that is missing from the checkpoint."""
        player_id, source = player.player_id, player.source
        first = None
        if self._is_here(source):
            first = self._first_weights(player_id, source)
        elif source in resume.module_ids:
            weights, learned = weights_of(resume)[source], connector_state(resume, source)
            first = _copied(player_id, weights, learned, source)
        else:
            self._progress.message(
                f"league: {player_id} starts again with new weights, since the weights of {source} "
                "are not in the checkpoint",
                "warning",
            )
        if first is not None:
            self._trained.begin_with(player_id, first)

    def _repeat_reset(self, player: Player) -> None:
        """Repeat a reset that happened after the checkpoint's state."""
        player_id, source = player.player_id, player.reset_to
        if not self._is_here(source):
            has_left = self._roster.players[source].retired
            why = f"{source} has been retired" if has_left else f"the weights of {source} are lost"
            text = f"is reset to its first weights, since {why}"
            self._progress.message(f"league: {player_id} {text}", "warning")
            source = INITIAL
        self._trained.reset_first(player_id, *self._new_life(player_id, source))


def _shapes(weights: Tree) -> dict[TreePath, str]:
    """Return the shapes of arrays, for people, by path."""
    return {path: f"shape {list(array.shape)}" for path, array in flatten(weights)}


def _copied(player_id: str, weights: Any, learned: State, source: str) -> FirstWeights:
    """Make first weights from another player's weights and connectors."""
    text = f"the weights of {source}"
    words = f"league: {player_id}, new with {text}"
    return FirstWeights(weights, True, text, words, learned=learned)


@dataclass(slots=True, eq=False)
class _Wanted:
    """A request for a player's weights."""

    player_id: str  # the player with the weights
    for_id: str  # the player that will get them
    then: Callable[[Mapping[str, Tree], Version], None]  # called with the weights
    failed: Callable[[str], None]  # called with the reason if there are none
    reader: FrameReader[training_pb2.StateHeader]  # joins the learner's answers
    # The player was reset since: only the same learner can send them
    has_others: bool = False


class LeagueWeights:
    """Asks learners for weights of players until one answers."""

    def __init__(self, parts: RunParts) -> None:
        self._registry, self._commands = parts.registry, parts.commands
        self._waiting: list[_Wanted] = []  # for a learner of the player
        self._asked: dict[int, _Wanted] = {}  # by command id

    def ask(
        self,
        player_id: str,
        for_id: str,
        then: Callable[[Mapping[str, Tree], Version], None],
        failed: Callable[[str], None],
    ) -> None:
        """Ask for a player's weights once it has a learner.

        Args:
            for_id: the player that will get them.
            then: called with the weights.
            failed: called with the reason if there are none.
        """
        self._waiting.append(_Wanted(player_id, for_id, then, failed, state_reader()))
        self.check()

    def check(self) -> None:
        """Ask new learners for the requested weights."""
        waiting, self._waiting = self._waiting, []
        for wanted in waiting:
            learners = self._registry.learners_of(wanted.player_id)
            if not learners:
                self._waiting.append(wanted)
                continue
            snapshot = training_pb2.Snapshot(module_id=wanted.player_id, whole=True)
            command_id = self._commands.pool.submit(learners[0], snapshot)
            self._asked[command_id] = wanted

    def receive(self, command_id: int, chunk: bytes, last: bool) -> None:
        """Handle a learner's answer."""
        if (wanted := self._asked.get(command_id)) is None:
            return  # the weights are no longer needed
        if last:
            del self._asked[command_id]
        if (frame := wanted.reader.feed(chunk)) is not None:
            tree: Any = frame.tree
            if DEFAULT_MODULE in tree:
                wanted.then(tree[DEFAULT_MODULE], Version.of(frame.header.version))
            else:
                wanted.failed("its learner has no weights by name")

    def abandoned(self, command_id: int) -> None:
        """Ask again for weights that a learner did not send."""
        if (wanted := self._asked.pop(command_id, None)) is None:
            return
        if wanted.has_others:
            wanted.failed("its learner sent no weights, and other learners have restarted")
        else:
            self.ask(wanted.player_id, wanted.for_id, wanted.then, wanted.failed)

    def was_reset(self, player_id: str) -> None:
        """Note that a player was reset after its weights were requested."""
        for wanted in self._asked.values():
            wanted.has_others = wanted.has_others or wanted.player_id == player_id

    def cancel(self, for_id: str) -> None:
        """Cancel the requests for a player."""
        self._waiting = [each for each in self._waiting if each.for_id != for_id]
        asked = self._asked.items()
        self._asked = {number: each for number, each in asked if each.for_id != for_id}

    def wanted_of(self, player_id: str) -> bool:
        """Return whether weights of this player are requested."""
        wanted = (*self._waiting, *self._asked.values())
        return any(each.player_id == player_id for each in wanted)
