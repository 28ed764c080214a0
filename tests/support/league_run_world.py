"""A run with a league, whose workers are the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from google.protobuf import any_pb2

from juggler.driver.league.builder import LeagueBuilder
from juggler.driver.league.builders import give_builder
from juggler.driver.workers.league_run import LeagueRun
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.checkpoints.checkpoint import Checkpoint, read
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import attach_pb2, training_pb2
from support.worker_events_world import WorkersWorld


@dataclass(kw_only=True)
class Asked(LeagueBuilder):
    """Asks for what the test wants."""

    wanted: ClassVar[list[Any]] = []
    fails: ClassVar[bool] = False

    def build(self, results: Any) -> list[Any]:
        wanted, self.wanted[:] = list(self.wanted), []
        return wanted

    def match(self, results: Any) -> Any:
        if type(self).fails:
            raise KeyError("nobody")
        return super().match(results)


class World(WorkersWorld):
    """A league of one main, with one learner and one EnvRunner.

    Args:
        directory: of the run.
        keys: as of `WorkersWorld`.
    """

    def __init__(self, directory: Path, **keys: Any) -> None:
        table = {"builder": give_builder(Asked), "evaluation_probability": 0.0}
        agents = {"row": ["main-0"], "column": ["main-0"]}
        super().__init__(directory, agents=agents, league=table, **keys)
        self.meet()

    @property
    def league(self) -> LeagueRun:
        found = self.parts.league
        assert found is not None
        return found

    def meet(self, module_id: str = "main-0") -> None:
        """The learner of a module has its group."""
        groups = self.asked(self.learner, training_pb2.Group)
        command_id, group = [each for each in groups if each[1].module_id == module_id][-1]
        formed = {"module_id": module_id, "generation": group.generation, "state_hash": 1}
        self.reply(self.learner, command_id, training_pb2.GroupFormed(**formed))

    def want(self, *commands: Any) -> None:
        """The builder is asked, once the main was trained."""
        Asked.wanted.extend(commands)
        self.league.trained("main-0", 1)

    def copies_asked_for(self) -> list[int]:
        """Commands to the learner, the oldest first."""
        return [number for number, _ in self.asked(self.learner, training_pb2.Snapshot)]

    def send_weights(self, command_id: int, module_id: str = "main-0", scale: float = 1) -> None:
        header = training_pb2.StateHeader(module_id=module_id, extra="{}")
        tree = {"default": {"scale": np.full(300, scale, np.float32)}}
        chunks = list(encode_frame(header, tree, digest=True, chunk_bytes=1000))
        for number, chunk in enumerate(chunks):
            last = number == len(chunks) - 1
            self.reply(self.learner, command_id, any_pb2.Any(value=chunk), last=last)

    def take_parts(self, worker: Worker | None = None) -> None:
        """An EnvRunner has what it was sent, part by part."""
        worker = worker or self.runner
        for kind in (training_pb2.Restore, training_pb2.AddPlayer):
            for command_id, _ in self.asked(worker, kind):
                self.reply(worker, command_id, attach_pb2.Done())

    def plays(self, player: str) -> bool:
        return self.league.league.roster.players[player].plays


class Changing(World):
    """A league whose learner and EnvRunner do what they are asked to."""

    def __init__(self, directory: Path, **keys: Any) -> None:
        self.answered: set[int] = set()
        super().__init__(directory, **keys)

    def modules_asked_for(self) -> dict[str, training_pb2.AddModule]:
        return {
            each.module_id: each for _, each in self.asked(self.learner, training_pb2.AddModule)
        }

    def has_been_added(self, player: str) -> None:
        """The learner hosts a player, and the EnvRunner has it."""
        for command_id, module in self.asked(self.learner, training_pb2.AddModule):
            if module.module_id == player:
                ready = training_pb2.ModuleReady(module_id=player)
                self.reply(self.learner, command_id, ready)
        self.meet(player)
        self.take_parts()

    def requests(self) -> list[tuple[int, Any]]:
        """Those that the EnvRunner has not answered."""
        asked = self.asked(self.runner, training_pb2.SampleRequest)
        return [each for each in asked if each[0] not in self.answered]

    def play(self) -> None:
        """Answer all requests that there are now, with 20 steps each."""
        for command_id, request in self.requests():
            self.answered.add(command_id)
            receipt = training_pb2.Receipt(
                module_id=request.module_id,
                batch_id=request.batch_id,
                learner=request.learner,
                live_steps=20,
                version=request.at_least,
            )
            self.reply(self.runner, command_id, receipt)

    def train(self) -> None:
        """Answer all updates that there are now, and what is answered in a word."""
        for worker in (self.runner, self.learner):
            for kind in (training_pb2.Learners, training_pb2.Discard, training_pb2.RemovePlayer):
                for command_id, _ in self.asked(worker, kind):
                    self.reply(worker, command_id, attach_pb2.Done())
        for command_id, update in self.asked(self.learner, training_pb2.Update):
            if command_id not in self.answered:
                self.answered.add(command_id)
                self.made(command_id, update)

    def made(self, command_id: int, update: training_pb2.Update) -> None:
        module = self.parts.core.modules[update.module_id]
        done = training_pb2.UpdateDone(module_id=update.module_id, update_id=update.update_id)
        done.version.generation = update.generation
        done.version.update = module.weights_version.update + 1
        for batch_id in update.batch_ids:
            done.batches.add(batch_id=batch_id, live_steps=20)
        self.reply(self.learner, command_id, done)

    def told_to(self, worker: Worker, kind: Any) -> list[str]:
        return [each.module_id for _, each in self.asked(worker, kind)]

    def told_in_order(self, learner: Worker) -> list[str]:
        """What changes the main's weights at a learner, in the order of the commands."""
        kinds = (training_pb2.Restore, training_pb2.Reset, training_pb2.Group)
        told = [(number, kind) for kind in kinds for number, _ in self.asked(learner, kind)]
        return [kind.__name__ for _, kind in sorted(told, key=lambda each: each[0])]

    def restored(self, learner: Worker) -> list[training_pb2.Restore]:
        """What a learner was sent of states and weights."""
        return [each for _, each in self.asked(learner, training_pb2.Restore)]

    def checkpoint(self, before_the_last: Callable[[], None] = lambda: None) -> Checkpoint:
        """Of the modules whose learners are asked for their states; the first is the last to be
        sent."""
        assert self.parts.checkpointing.begin()
        states = self.asked(self.learner, training_pb2.Snapshot)
        states = [each for each in states if not each[1].whole and each[0] not in self.answered]
        for command_id, asked in reversed(states):
            self.answered.add(command_id)
            if command_id == states[0][0]:
                before_the_last()
            module = self.parts.core.modules[asked.module_id]
            version = module.weights_version.message()
            header = training_pb2.StateHeader(
                module_id=asked.module_id, version=version, extra="{}"
            )
            state = {"default": {"parameters": {"scale": np.ones(3, np.float32)}, "buffers": {}}}
            for chunk in encode_frame(header, state, digest=True):
                self.reply(self.learner, command_id, any_pb2.Any(value=chunk))
        (written,) = self.written.gather(5.0)
        self.snapshots.done(written)
        assert written.path is not None, written.problem
        return read(written.path)


def resumed(
    directory: Path, saved: Checkpoint, kind: type[Changing] = Changing, **keys: Any
) -> Changing:
    """A run that goes on from a checkpoint. Only the main has its learner yet; `keys` are as of
    `World`."""
    again = kind.__new__(kind)
    again.answered = set()
    World.__init__(again, directory, resume=saved, **keys)
    return again
