"""The EnvRunner process: sample when asked to, send the batch to its learner, give a receipt."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from juggler.envrunner.agent_returns import has_metrics_by_agent, to_messages
from juggler.envrunner.deliveries import Deliveries, receipt_for, tell_round
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.environments.vector import environment_in
from juggler.envrunner.evaluation import Goal
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.filming import film
from juggler.envrunner.finiteness import NonFinite
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.learner_streams import LearnerStreams
from juggler.envrunner.process import index_of, prepare_process, report_slow_streams
from juggler.envrunner.program import EnvRunnerProgram
from juggler.envrunner.rounds import PlayedRound, Recorded, RequestedRound
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.envrunner.stage import OwnCode, Stage
from juggler.envrunner.stage_building import build_stage
from juggler.runtime.actors.attachment import Attachment
from juggler.runtime.actors.setups import from_json
from juggler.runtime.actors.worker import CommandLoop, Contact, Inbox, attach_and_run
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.checkpoints.frozen import playing_trees
from juggler.runtime.connectors.mergeable_state import check, from_bytes, to_bytes
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


def main(program: EnvRunnerProgram) -> None:
    """Attach and work until told to stop."""
    own_code, contact = prepare_process(program), program.contact
    attach_and_run(
        contact,
        program.role,
        lambda attachment, inbox: EnvRunner(attachment, inbox, contact, *own_code),
    )


class EnvRunner:
    """Environments, the modules that act in them, and where batches go.

    It is built by the driver's Setup command.
    """

    def __init__(
        self,
        attachment: Attachment,
        inbox: Inbox,
        contact: Contact,
        env_factory: Any = None,
        module_factory: Any = None,
        own_connectors: Any = None,
    ) -> None:
        self._attachment = attachment
        attachment.held_up_by = environment_in
        self._contact = contact
        self._index = index_of(attachment)
        self._said: set[str] = set()  # to the driver, by the streams of any module
        self._env_factory = env_factory
        self._own_code = OwnCode(module_factory, own_connectors)
        self._loop = CommandLoop(attachment, inbox)
        self._loop.on(training_pb2.Restore, self._restore)
        self._loop.on(training_pb2.Setup, self._setup)
        self._loop.on(training_pb2.Learners, self._learners)
        self._loop.on(training_pb2.SampleRequest, self._sample)
        self._loop.on(training_pb2.Evaluate, self._evaluate)
        self._loop.on(training_pb2.AddPlayer, self._add_player)
        self._loop.on(training_pb2.RemovePlayer, self._remove_player)
        self._frozen = FrozenWeights()
        self._told: EnvRunnerSetup | None = None
        self._stage: Stage | None = None
        self._tells_agents = False  # what each of them got
        self._modules: dict[str, LearnerStreams] = {}
        self._deliveries = Deliveries(attachment)
        self._round = RequestedRound()
        self._rounds = 0  # played so far
        self._idle_since = time.perf_counter()

    def run(self) -> str:
        report_slow_streams(self._attachment, self._index, self._contact)
        try:
            return self._loop.run()
        finally:
            for command_id, request in self._round.requests.items():
                self._deliveries.no_learner(command_id, request)  # the others will not come
            self._deliveries.settle(self._modules.values())

    def close(self) -> None:
        if self._contact.health is not None:
            self._contact.health.ready(False)
        for streams in self._modules.values():
            streams.close()
        if self._stage is not None:
            self._stage.close()

    # -- commands -------------------------------------------------------------------------------

    def _restore(self, _: int, part: training_pb2.Restore) -> attach_pb2.Done:
        """A part of what a module plays with: one that is not trained, or one of a checkpoint."""
        self._frozen.take(part)
        return attach_pb2.Done()

    def _setup(self, command_id: int, setup: training_pb2.Setup) -> training_pb2.Ready | None:
        told = from_json(setup.config, EnvRunnerSetup)
        seed_process(setup.seed)
        own = self._env_factory, self._own_code, self._frozen
        worker = self._attachment.worker_id, self._index, self._warn
        self._told, self._stage = told, build_stage(told, setup.seed, *own, *worker)
        self._tells_agents = has_metrics_by_agent(told.agents)
        for module_id, acting in told.modules.items():
            self._acts_with(module_id, acting)
        if self._contact.health is not None:
            self._contact.health.ready(True)
        return training_pb2.Ready(modules=self._stage.ready())

    def _add_player(self, _: int, command: training_pb2.AddPlayer) -> attach_pb2.Done:
        assert self._stage is not None
        acting = from_json(command.config, ActingSetup)
        self._stage.add_player(command.module_id, acting)
        self._acts_with(command.module_id, acting)
        return attach_pb2.Done()

    def _remove_player(self, _: int, command: training_pb2.RemovePlayer) -> attach_pb2.Done:
        assert self._stage is not None
        self._stage.remove_player(command.module_id)
        if (streams := self._modules.pop(command.module_id, None)) is not None:
            streams.close()
        return attach_pb2.Done()

    def _learners(self, _: int, message: training_pb2.Learners) -> attach_pb2.Done:
        """Dial the learners that train a module now, and let go of those that no longer do."""
        if streams := self._modules.get(message.module_id):
            streams.connect(message.learners)
        return attach_pb2.Done()

    def _sample(self, command_id: int, request: training_pb2.SampleRequest) -> None:
        if request.module_id not in self._modules:
            raise ValueError(
                f"asked for a batch of module {request.module_id!r}, and acts with "
                f"{', '.join(map(repr, self._modules))}"
            )
        if not self._round.add(command_id, request):
            return  # others of the round follow
        requests, self._round = self._round.requests, RequestedRound()
        started = time.perf_counter()
        self._deliveries.spent({"waiting": started - self._idle_since})
        self._play(requests)
        self._idle_since = time.perf_counter()

    def _play(self, requests: Mapping[int, training_pb2.SampleRequest]) -> None:
        """Play a round, and hand over what was recorded.

        Args:
            requests: by command id.
        """
        assert self._stage is not None
        started = time.perf_counter()
        for request in requests.values():
            if request.line_ups:
                self._stage.assign(request.line_ups)
        recorded = {
            command_id: request
            for command_id, request in requests.items()
            if self._can_record(command_id, request)
        }
        if not recorded:
            return
        self._update_others({request.module_id for request in recorded.values()})
        for request in recorded.values():
            if request.connector_state:
                state = from_bytes(request.connector_state)
                self._stage.set_connector_state(request.module_id, state)
        seeds = [each.seed for each in recorded.values() if each.HasField("seed")]
        if seeds:
            self._stage.reset(seeds[0])
        versions = {
            module_id: streams.version or Version(0, 0)
            for module_id, streams in self._modules.items()
        }
        sampling = time.perf_counter()
        self._rounds += 1
        try:
            played = self._stage.play({each.module_id for each in recorded.values()}, versions)
        except Exception as error:
            if isinstance(error, EnvironmentFailed):
                error.in_round(self._rounds)
            # The command loop answers the last request of the round with the failure.
            for command_id, request in recorded.items():
                if command_id != max(requests):
                    self._deliveries.answer(command_id, receipt_for(request))
            raise
        encoding = time.perf_counter()
        self._deliveries.spent({"waiting": sampling - started, **played.seconds})
        if self._index == 0:  # all EnvRunners have the same environments and modules
            for note in played.notes:
                self._attachment.report(note)
        self._hand_over(recorded, played)
        self._deliveries.spent({"frames": time.perf_counter() - encoding})

    def _can_record(self, command_id: int, request: training_pb2.SampleRequest) -> bool:
        """Wait for the weights of a request. If its learner is gone, answer it."""
        streams = self._modules[request.module_id]
        at_least = Version.of(request.at_least)
        if streams.sender(request.learner) and self._act_on(streams, at_least):
            return True
        self._deliveries.no_learner(command_id, request)
        return False

    def _update_others(self, recorded: set[str]) -> None:
        """Let modules that are not recorded act with the newest weights that they have."""
        for module_id, streams in self._modules.items():
            if module_id not in recorded and streams.subscribed:
                self._act_on(streams, Version(0, 0))

    def _hand_over(
        self, requests: Mapping[int, training_pb2.SampleRequest], played: PlayedRound
    ) -> None:
        """Send each batch to its learner, and answer the requests for which there is none.

        Raises:
            NonFinite: steps of a module are lost. All requests are answered.
        """
        broken: NonFinite | None = None
        told = False  # what came of the round itself is in one of its receipts
        for command_id, request in requests.items():
            result = played.modules[request.module_id]
            receipt = receipt_for(request)
            if isinstance(result, NonFinite):
                receipt.live_steps = result.live_steps
                self._deliveries.answer(command_id, receipt, "nonfinite", str(result))
                broken = result
                continue
            if not told:
                tell_round(receipt, played, by_agent=self._tells_agents)
                told = True
            self._send(command_id, request, receipt, result)
        if broken is not None:
            raise broken

    def _send(
        self,
        command_id: int,
        request: training_pb2.SampleRequest,
        receipt: training_pb2.Receipt,
        result: Recorded,
    ) -> None:
        receipt.version.CopyFrom(result.version.message())
        receipt.episode_returns.extend(result.episode_returns)
        receipt.episode_lengths.extend(result.episode_lengths)
        receipt.stale_steps = result.stale_steps
        if result.connector_delta:
            receipt.connector_delta = to_bytes(result.connector_delta)
        sender = self._modules[request.module_id].sender(request.learner)
        assert sender is not None  # no command came between
        if result.batch is None:
            self._deliveries.answer(command_id, receipt)
            return
        receipt.live_steps = result.batch.live_steps
        self._deliveries.send(command_id, request, receipt, result.batch, sender)

    def _evaluate(self, _: int, command: training_pb2.Evaluate) -> training_pb2.Evaluation:
        assert self._stage is not None
        trees: Mapping[str, Tree] = {}
        if command.checkpoint:
            trees, version = self._checkpoint(command)
            self._stage.load_trees(trees)
            for streams in self._modules.values():
                streams.version = None  # what the learner publishes has to be loaded again
        else:
            version = self._use_newest(command.connector_state)
        seed_process(command.seed)
        goal = Goal(command.goal.mean, command.goal.best) if command.HasField("goal") else None
        played = self._stage.evaluate(
            command.episodes,
            command.seed,
            lambda *_: self._attachment.progresses(),
            most_steps=command.most_steps,
            goal=goal,
        )
        if command.video:
            assert self._told is not None
            own = self._env_factory, self._own_code, self._warn
            film(command, trees, self._told, *own, self._attachment.progresses)
        return training_pb2.Evaluation(
            version=version.message(),
            episode_returns=played.returns,
            episode_lengths=played.lengths,
            agent_returns=to_messages(played.agent_returns),
        )

    # -- parts ----------------------------------------------------------------------------------

    def _acts_with(self, module_id: str, acting: ActingSetup) -> None:
        if not acting.digest:  # the others have no learner
            settled, contact = self._deliveries.settled, self._contact
            self._modules[module_id] = LearnerStreams(
                module_id, self._index, self._attachment, contact, settled, self._said
            )

    def _checkpoint(self, command: training_pb2.Evaluate) -> tuple[Mapping[str, Tree], Version]:
        """What the modules of a checkpoint play with, and its version."""
        if command.HasField("version"):
            return self._frozen.take_all(), Version.of(command.version)
        saved = read(command.checkpoint)
        return playing_trees(saved), Version(*saved.version)

    def _warn(self, text: str) -> None:
        self._attachment.report(training_pb2.Note(text=text, warning=True))

    def _act_on(self, streams: LearnerStreams, at_least: Version) -> bool:
        """Let a module act with its newest weights. False where they cannot come any more."""

        # Who waits for weights of a learner that is gone meanwhile would wait in vain.
        told = (training_pb2.Learners, training_pb2.RemovePlayer)
        gone = partial(self._is_told, streams, *told)
        return streams.act_on(at_least, gone, partial(self._load, streams.module_id))

    def _is_told(self, streams: LearnerStreams, *kinds: type[Any]) -> bool:
        """Whether a command of these kinds about a module waits, or the loop should end."""
        mine = streams.module_id
        return any(self._loop.waits(kind, lambda said: said.module_id == mine) for kind in kinds)

    def _load(self, module_id: str, weights: Tree) -> None:
        assert self._stage is not None
        self._stage.load(module_id, weights)

    def _use_newest(self, connector_state: bytes) -> Version:
        """Let all modules act with their newest weights -> the oldest version among them.

        Args:
            connector_state: of an Evaluate command.

        Raises:
            RuntimeError: there is no learner.
        """
        assert self._stage is not None
        versions = []
        for module_id, streams in self._modules.items():
            load = partial(self._load, module_id)
            let_go = partial(self._is_told, streams, training_pb2.RemovePlayer)
            if streams.act_on(Version(0, 0), let_go, load) and streams.version:
                versions.append(streams.version)
        if not versions:
            raise RuntimeError("no weights to evaluate: this run has no learner")
        learned = from_bytes(connector_state) if connector_state else {}
        for module_id in self._modules:
            if state := check(learned.get(module_id, {})):
                self._stage.set_connector_state(module_id, state)
        return min(versions)
