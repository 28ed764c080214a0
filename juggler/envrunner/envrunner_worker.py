"""The EnvRunner process: samples, sends batches, reports receipts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from juggler.envrunner.datasets.dataset_writer import RecordedWhilePlayed, SampledEpisodes, spec_of
from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.environments.find_environment import VectorEnvironment
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.environments.vector import environment_in, make_vector_env
from juggler.envrunner.environments.video import record_videos
from juggler.envrunner.envrunner_program import EnvRunnerProgram
from juggler.envrunner.evaluation import Goal
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.learner_streams import LearnerStreams
from juggler.envrunner.sampling_worker import SamplingWorker, prepare_process, step_back
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.envrunner.stage import SingleAgentStage, Stage, UserCode
from juggler.runtime.actors.attachment import Attachment, Contact
from juggler.runtime.actors.worker import Inbox, attach_and_run
from juggler.runtime.connectors.mergeable_state import from_bytes
from juggler.runtime.datasets.dataset import Dataset
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


def build_stage(
    setup: EnvRunnerSetup,
    seed: int,
    env_factory: Any,
    own_code: UserCode,
    frozen: FrozenWeights,
    worker_id: str,
    index: int,
    report: Callable[[str], None],
) -> Stage:
    """Make the environments, and the modules that act in them.

    Args:
        env_factory: makes the environments; None: the name in `setup` does.
        report: logs a problem with the recorded data set.
    """
    with ExitStack() as undo:
        stage: Stage
        if setup.agents:
            # Imported here, because a run of environments with one agent does not need it.
            from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
            from juggler.envrunner.multi_agent.multi_agent_stage import MultiAgentStage

            envs = make_multi_agent_envs(
                setup.env_runner, env_factory, critics_see=setup.critics_see
            )
            undo.callback(envs.close)
            stage = MultiAgentStage(setup, envs, seed, own_code, frozen)
            step_back()
        else:
            # One agent: its vector samples faster than games do.
            env: VectorEnvironment
            if setup.env_runner.dataset:
                recorded = Dataset(setup.env_runner.dataset)
                env = RecordedEnvs(recorded, setup.env_runner.envs_per_runner)
            else:
                env = make_vector_env(setup.env_runner, env_factory, index)
                # Around masks, so that a data set has them, too.
                if setup.env_runner.record:
                    spaces = env.single_observation_space, env.single_action_space
                    spec = spec_of(setup.env_runner, env_factory)
                    own = setup.env_runner, worker_id, *spaces, spec, report
                    env = RecordedWhilePlayed(env, SampledEpisodes(*own))
            undo.callback(env.close)
            stage = SingleAgentStage(setup, env, seed, own_code)
            step_back(env)
        undo.pop_all()
        return stage


_MOST_STEPS = 3000  # of an episode


def film(
    command: training_pb2.Evaluate,
    trees: Mapping[str, Tree],
    setup: EnvRunnerSetup,
    env_factory: Any,
    own_code: UserCode,
    warn: Callable[[str], None],
    progresses: Callable[[], None],
) -> None:
    """Record an episode of the evaluated checkpoint.

    A problem is logged, and the evaluation still counts.
    """
    directory, seed, several = Path(command.video), command.seed, bool(setup.agents)
    config = replace(setup.env_runner, envs_per_runner=1, vectorize="sync", record="")
    try:
        paths = [directory / "episode.mp4"]
        factory = record_videos(config, env_factory, [paths], several_agents=several)
        alone = replace(setup, env_runner=config)
        stage = build_stage(alone, seed, factory, own_code, FrozenWeights(), "", 0, warn)
        try:
            stage.load_trees(trees)
            most = min(command.most_steps or _MOST_STEPS, _MOST_STEPS)
            stage.evaluate(1, seed, lambda *_: progresses(), most_steps=most, goal=None)
        finally:
            stage.close()  # finishes the video
    # It cannot be rendered, the disk or ffmpeg fails, or the environment itself does.
    except (ValueError, OSError, EnvironmentFailed) as error:
        warn(f"could not record {directory.name}: {error}")


def main(program: EnvRunnerProgram) -> None:
    """Attach to the driver, and carry out its commands."""
    own_code, contact = prepare_process(program), program.contact
    attach_and_run(
        contact,
        program.role,
        lambda attachment, inbox: EnvRunner(attachment, inbox, contact, *own_code),
    )


class EnvRunner(SamplingWorker):
    """Samples with its own environments, built by the driver's Setup command."""

    def __init__(
        self,
        attachment: Attachment,
        inbox: Inbox,
        contact: Contact,
        env_factory: Any = None,
        module_factory: Any = None,
        own_connectors: Any = None,
    ) -> None:
        own_code = UserCode(module_factory, own_connectors)
        super().__init__(attachment, inbox, contact, own_code, environment_in)
        self._env_factory = env_factory
        self._loop.on(training_pb2.Evaluate, self._evaluate)
        self._setup_received: EnvRunnerSetup | None = None
        self._stage: Stage | None = None
        self._rounds = 0  # played so far
        self._idle_since = time.perf_counter()

    def close(self) -> None:
        if self._contact.health is not None:
            self._contact.health.ready(False)
        for streams in self._streams.values():
            streams.close()
        if self._stage is not None:
            self._stage.close()

    # -- commands -------------------------------------------------------------------------------

    def _begin(self, command_id: int, setup: EnvRunnerSetup, seed: int) -> training_pb2.Ready:
        if setup.env_runner.simulator:
            raise ValueError(
                f"the environments of this run are simulators, which gateways start: run `juggler "
                f"envrunner --gateway {setup.env_runner.gateway}`"
            )
        own = self._env_factory, self._own_code, self._frozen
        worker = self._attachment.worker_id, self._index, self._warn
        self._setup_received, self._stage = setup, build_stage(setup, seed, *own, *worker)
        if self._contact.health is not None:
            self._contact.health.ready(True)
        return training_pb2.Ready(modules=self._stage.ready())

    def _admit_player(self, module_id: str, acting: ActingSetup) -> None:
        assert self._stage is not None
        self._stage.add_player(module_id, acting)

    def _drop_player(self, module_id: str) -> None:
        assert self._stage is not None
        self._stage.remove_player(module_id)

    def _play(self, requests: Mapping[int, training_pb2.SampleRequest]) -> None:
        """Play a round, and send what was collected."""
        started = time.perf_counter()
        self._deliveries.spent({"waiting": started - self._idle_since})
        self._play_round(requests)
        self._idle_since = time.perf_counter()

    def _play_round(self, requests: Mapping[int, training_pb2.SampleRequest]) -> None:
        assert self._stage is not None
        started = time.perf_counter()
        for request in requests.values():
            if request.line_ups:
                self._stage.assign(request.line_ups)
        collected = {
            command_id: request
            for command_id, request in requests.items()
            if self._can_collect(command_id, request)
        }
        # Without a learner there is nothing to sample for.
        if not collected:
            return
        self._update_others({request.module_id for request in collected.values()})
        for request in collected.values():
            if request.connector_state:
                state = from_bytes(request.connector_state)
                self._stage.set_connector_state(request.module_id, state)
        seeds = [each.seed for each in collected.values() if each.HasField("seed")]
        if seeds:
            self._stage.reset(seeds[0])
        # Modules of a round may have weights of different versions.
        versions = {
            module_id: streams.version or Version(0, 0)
            for module_id, streams in self._streams.items()
        }
        # The wait for weights ends here.
        sampling = time.perf_counter()
        self._rounds += 1
        try:
            played = self._stage.play({each.module_id for each in collected.values()}, versions)
        except Exception as error:
            if isinstance(error, EnvironmentFailed):
                error.in_round(self._rounds)
            # The command loop answers the last request of the round with the failure.
            for command_id, request in collected.items():
                if command_id != max(requests):
                    self._deliveries.answer(command_id, self._receipt(request))
            raise
        encoding = time.perf_counter()
        self._deliveries.spent({"waiting": sampling - started, **played.seconds})
        if self._index == 0:  # all EnvRunners have the same environments and modules
            for note in played.notes:
                self._attachment.report(note)
        self._deliver(collected, played)
        self._deliveries.spent({"frames": time.perf_counter() - encoding})

    def _can_collect(self, command_id: int, request: training_pb2.SampleRequest) -> bool:
        """Wait for a request's weights; answer it if its learner is gone."""
        streams = self._streams[request.module_id]
        at_least = Version.of(request.at_least)
        if streams.sender(request.learner) and self._act_on(streams, at_least):
            return True
        self._deliveries.no_learner(command_id, request)
        return False

    def _update_others(self, collected: set[str]) -> None:
        """Load the newest received weights into modules that collect nothing."""
        for module_id, streams in self._streams.items():
            if module_id not in collected and streams.subscribed:
                self._act_on(streams, Version(0, 0))

    def _evaluate(self, _: int, command: training_pb2.Evaluate) -> training_pb2.Evaluation:
        assert self._stage is not None
        trees = self._frozen.pop_checkpoint()
        self._stage.load_trees(trees)
        # The same seed plays the same episodes, even after others.
        seed_process(command.seed)
        goal = Goal(command.goal.mean, command.goal.best) if command.HasField("goal") else None
        played = self._stage.evaluate(
            command.episodes,
            command.seed,
            lambda *_: self._attachment.progresses(),
            most_steps=command.most_steps,
            goal=goal,
        )
        # After the evaluation, since a film may fail.
        if command.video:
            assert self._setup_received is not None
            own = self._env_factory, self._own_code, self._warn
            film(command, trees, self._setup_received, *own, self._attachment.progresses)
        return played.message(command.version)

    # -- parts ----------------------------------------------------------------------------------

    def _act_on(self, streams: LearnerStreams, at_least: Version) -> bool:
        """Let a module act with its newest weights; False: no learner."""

        # A learner that leaves during the wait will never send weights.
        changes = (training_pb2.Learners, training_pb2.RemovePlayer)
        gone = partial(self._is_waiting, streams, *changes)
        return streams.act_on(at_least, gone, partial(self._load, streams.module_id))

    def _load(self, module_id: str, weights: Tree) -> None:
        assert self._stage is not None
        self._stage.load(module_id, weights)
