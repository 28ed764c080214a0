"""The EnvRunner process: sample when asked to, send the batch to its learner, give a receipt."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from gymnasium import Space
from gymnasium.vector import VectorEnv

from juggler.envrunner.behaviour_policy import BehaviourPolicy, require_log_probabilities
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.environments.vector import environment_in, make_vector_env
from juggler.envrunner.evaluation import Goal, evaluate, load_checkpoint
from juggler.envrunner.program import ENVRUNNER, EnvRunnerProgram
from juggler.envrunner.sampler import NonFinite, Sampler
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.runtime.actors.attachment import Attachment
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import EndpointError, why_not_secure
from juggler.runtime.actors.memory import keep_freed_memory
from juggler.runtime.actors.setups import from_json
from juggler.runtime.actors.worker import CommandLoop, Contact, Inbox, attach_and_run
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.mergeable_state import from_bytes, to_bytes
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.acting import strip_to_acting
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.by_name import given_or_named
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.streams.calls import why_slow
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.streams.weights import Weights, WeightsSubscription
from juggler.runtime.wire.frames import Limits
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import attach_pb2, episodes_pb2, training_pb2

#: The longest wait for the first weights of a learner.
FIRST_WEIGHTS_SECONDS = 30.0

_ACKNOWLEDGED_SECONDS = 2.0  # for learners to take what was sent when this worker leaves
_CLOSED_SECONDS = 0.5  # for streams to give it up


class LearnerOutOfReach(ValueError):
    """No weights came from where the learner is said to be."""


def main(program: EnvRunnerProgram) -> None:
    """Attach and work until told to stop."""
    own_code, contact = prepare_process(program), program.contact
    attach_and_run(
        contact,
        program.role,
        lambda attachment, inbox: EnvRunner(attachment, inbox, contact, *own_code),
    )


def prepare_process(program: EnvRunnerProgram) -> tuple[Any, Any, Any]:
    """Set what holds for a whole process -> the program's own code."""
    keep_freed_memory()
    # Small forward passes gain nothing from more threads, and runners share the cores.
    torch.set_num_threads(1)
    if not program.own_code:
        return None, None, None
    own_code: tuple[Any, Any, Any] = cloudpickle.loads(program.own_code)
    return own_code


def step_back(env: VectorEnv[Any, Any, Any] | None = None) -> None:
    """All runners wait for the learner when it waits for a processor: it goes first on a full host.

    For the calling thread, and processes of environments, once they are set up: until then
    everybody waits for them. Heartbeats go first, too.
    """
    niceness = os.nice(10)
    for process in getattr(None if env is None else env.unwrapped, "processes", ()):
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)


class EnvRunner:
    """Environments, a policy, and where batches go. Built by the driver's Setup command."""

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
        self._index = int(attachment.worker_id.rpartition("-")[2])
        self._env_factory = env_factory
        self._module_factory = module_factory
        self._own_connectors = own_connectors
        self._metadata = call_metadata(contact.token, attachment.run_id, attachment.incarnation)
        self._loop = CommandLoop(attachment, inbox)
        self._loop.on(training_pb2.Setup, self._setup)
        self._loop.on(training_pb2.Learners, self._learners)
        self._loop.on(training_pb2.SampleRequest, self._sample)
        self._loop.on(training_pb2.Evaluate, self._evaluate)
        self._env: VectorEnv[Any, Any, Any] | None = None
        self._module_id = ""  # of the module that it acts with, once it is set up
        self._senders: dict[str, tuple[str, EpisodeSender]] = {}  # incarnation, sender
        self._subscription: WeightsSubscription | None = None
        self._subscribed_to = ""  # the learner's incarnation
        self._version: Version | None = None
        # Both are for the threads of the streams too, which settle batches.
        self._lock = threading.Condition()
        self._open: dict[int, tuple[int, training_pb2.Receipt]] = {}  # unsettled, by batch id
        self._seconds: dict[str, float] = defaultdict(float)  # where the time went
        self._idle_since = time.perf_counter()

    def run(self) -> str:
        # One of those that share an installation speaks for all of them.
        first = self._index == 0 or not self._contact.local
        if first and self._attachment.worker_id.startswith(ENVRUNNER) and (why := why_slow()):
            self._attachment.report(training_pb2.Note(text=why))
        try:
            return self._loop.run()
        finally:
            self._settle_open()

    def close(self) -> None:
        if self._contact.health is not None:
            self._contact.health.ready(False)
        for _, sender in self._senders.values():
            sender.close()
        if self._subscription is not None:
            self._subscription.close()
        if self._env is not None:
            self._env.close()

    # -- commands -------------------------------------------------------------------------------

    def _setup(self, command_id: int, setup: training_pb2.Setup) -> training_pb2.Ready | None:
        told = from_json(setup.config, EnvRunnerSetup)
        ((self._module_id, acting),) = told.modules.items()
        seed_process(setup.seed)
        env = make_vector_env(told.env_runner, self._env_factory, self._index)
        self._env = env
        self._connectors, module_to_env, module = self._built(
            acting, env.single_observation_space, env.single_action_space
        )
        rows, steps = env.num_envs, told.env_runner.fragment_steps
        self._policy = BehaviourPolicy(module, rows, steps, setup.seed, module_to_env)
        require_log_probabilities(module, self._policy.knows_log_probabilities)
        seed_process(setup.seed)  # as it is done where everything begins anew
        self._sampler = Sampler(env, self._policy, steps, setup.seed, self._connectors)
        step_back(env)
        if self._contact.health is not None:
            self._contact.health.ready(True)
        ready = training_pb2.Ready.Module(
            module_id=self._module_id,
            observation_space=space_to_message(self._connectors.observation_space),
            action_space=space_to_message(module_to_env.action_space),
            rows=rows,
            steps=steps,
        )
        return training_pb2.Ready(modules=[ready])

    def _learners(self, _: int, message: training_pb2.Learners) -> attach_pb2.Done:
        """Dial the learners that train its module now; let go of those that are no more."""
        if not self._is_of_its_module(message):
            return attach_pb2.Done()
        now = {learner.worker_id: learner for learner in message.learners}
        for worker_id, (incarnation, sender) in list(self._senders.items()):
            if worker_id not in now or now[worker_id].incarnation != incarnation:
                sender.close()
                del self._senders[worker_id]
        for worker_id, learner in now.items():
            if worker_id not in self._senders:
                address, tls = self._reachable(learner), self._contact.tls
                sender = EpisodeSender(address, self._metadata, self._settled, tls)
                self._senders[worker_id] = (learner.incarnation, sender)
        # Every learner of a group has the same weights: readers are spread over them.
        of_ours = self._index % max(1, len(message.learners))
        self._subscribe(message.learners[of_ours] if message.learners else None)
        return attach_pb2.Done()

    def _sample(self, command_id: int, request: training_pb2.SampleRequest) -> None:
        started = time.perf_counter()
        self._spent({"waiting": started - self._idle_since})
        _, sender = self._senders.get(request.learner, ("", None))
        receipt = self._receipt_for(request)
        # Who waits for weights of a learner that is gone meanwhile would wait in vain.
        others = partial(self._loop.waits, training_pb2.Learners, self._is_of_its_module)
        if sender is None or not self._act_on(Version.of(request.at_least), others):
            receipt.dropped = "learner_lost"
            receipt.explanation = f"no learner {request.learner}"
            self._attachment.reply(command_id, receipt)
            return
        assert self._version is not None
        self._learn_from_others(request.connector_state)
        if request.HasField("seed"):
            seed_process(request.seed)
            self._sampler.reset(request.seed)
        sampling = time.perf_counter()
        try:
            fragment = self._sampler.sample(self._version)
        except NonFinite as error:
            receipt.live_steps = error.live_steps
            receipt.dropped, receipt.explanation = "nonfinite", str(error)
            self._attachment.reply(command_id, receipt)
            raise
        encoding = time.perf_counter()
        receipt.live_steps = fragment.batch.live_steps
        receipt.version.CopyFrom(self._version.message())
        receipt.episode_returns.extend(fragment.episode_returns)
        receipt.episode_lengths.extend(fragment.episode_lengths)
        if fragment.connector_delta:
            receipt.connector_delta = to_bytes(fragment.connector_delta)
        with self._lock:
            self._open[request.batch_id] = (command_id, receipt)
        sender.send(self._header(request, receipt), {self._module_id: fragment.batch.to_tree()})
        self._idle_since = time.perf_counter()
        self._spent({"waiting": sampling - started, **fragment.seconds})
        self._spent({"frames": self._idle_since - encoding})

    def _evaluate(self, _: int, command: training_pb2.Evaluate) -> training_pb2.Evaluation:
        assert self._env is not None
        if command.checkpoint:
            version = load_checkpoint(Path(command.checkpoint), self._policy, self._connectors)
            self._version = None  # what the learner publishes has to be loaded again
        elif self._act_on(Version(0, 0), self._loop.over):
            assert self._version is not None
            version = self._version
            self._learn_from_others(command.connector_state)
        else:
            raise RuntimeError("no weights to evaluate: this run has no learner")
        seed_process(command.seed)
        goal = Goal(command.goal.mean, command.goal.best) if command.HasField("goal") else None
        returns, lengths = evaluate(
            self._env,
            self._policy,
            command.episodes,
            command.seed,
            self._connectors,
            lambda *_: self._attachment.progresses(),
            most_steps=command.most_steps,
            goal=goal,
        )
        return training_pb2.Evaluation(
            version=version.message(), episode_returns=returns, episode_lengths=lengths
        )

    # -- parts ----------------------------------------------------------------------------------

    def _built(
        self, told: ActingSetup, observation_space: Space[Any], action_space: Space[Any]
    ) -> tuple[EnvToModule, ModuleToEnv, RLModule]:
        """The connectors on both sides of the module, and the module itself, for acting."""
        connectors, module_to_env = build_runner_pipelines(
            ConnectorsConfig.parse(told.connectors),
            observation_space,
            action_space,
            self._own_connectors,
        )
        module = build_module(
            given_or_named(told.module.module, self._module_factory, self._own_connectors),
            connectors.module_observation_space,
            module_to_env.action_space,
            told.module.model,
            distribution=told.module.distribution,
            check_specs=told.module.check_specs,
        )
        strip_to_acting(module)  # the rest is not sent here
        return connectors, module_to_env, module

    def _receipt_for(self, request: training_pb2.SampleRequest) -> training_pb2.Receipt:
        """An empty one.

        Raises:
            ValueError: the request is for a module that this EnvRunner does not act with.
        """
        if request.module_id != self._module_id:
            raise ValueError(
                f"asked for a batch of module {request.module_id!r}, and acts with "
                f"{self._module_id!r}"
            )
        return training_pb2.Receipt(
            module_id=request.module_id, batch_id=request.batch_id, learner=request.learner
        )

    def _header(
        self, request: training_pb2.SampleRequest, receipt: training_pb2.Receipt
    ) -> episodes_pb2.BatchHeader:
        """Of the batch that the receipt is for."""
        return episodes_pb2.BatchHeader(
            module_id=request.module_id,
            batch_id=request.batch_id,
            envrunner=self._attachment.worker_id,
            generation=request.generation,
            live_steps=receipt.live_steps,
            version=receipt.version,
            permit=request.permit,
        )

    def _is_of_its_module(self, message: training_pb2.Learners) -> bool:
        return message.module_id == self._module_id

    def _reachable(self, learner: training_pb2.Learners.Learner) -> str:
        """The first address that this worker can use: Unix sockets only on the driver's host."""
        for address in learner.addresses:
            if self._contact.local or not address.startswith("unix:"):
                return address
        raise EndpointError(
            f"{learner.worker_id} offers {list(learner.addresses)}, none of which "
            f"{self._attachment.worker_id} can reach: start the learner with --bind HOST:PORT"
        )

    def _subscribe(self, learner: training_pb2.Learners.Learner | None) -> None:
        incarnation = learner.incarnation if learner else ""
        if incarnation == self._subscribed_to:
            return
        if self._subscription is not None:
            self._subscription.close()
        self._subscribed_to, self._subscription = incarnation, None
        if learner is not None:
            self._subscription = WeightsSubscription(
                self._reachable(learner),
                self._metadata,
                self._attachment.worker_id,
                Limits(),
                tls=self._contact.tls,
                module_id=self._module_id,
            )

    def _act_on(self, at_least: Version, over: Callable[[], object]) -> bool:
        """Swap to the newest weights. False where there is no learner, or `over` says something
        before they are there."""
        if self._subscription is None:
            return False
        deadline = time.monotonic() + FIRST_WEIGHTS_SECONDS
        weights = self._subscription.newest
        while weights is None or weights.version < at_least:
            if over():
                return False
            try:
                weights = self._subscription.wait_for(at_least, timeout=0.5)
            except TimeoutError as error:
                # A learner has its first weights before anybody is sent to it, so that these are
                # due at once. Later ones may be long on a slow network: the driver's hang_seconds
                # is their deadline.
                weights = self._subscription.newest
                if weights is None and time.monotonic() > deadline:
                    raise self._out_of_reach(error) from None
        if weights.version != self._version:
            self._swap(weights)
        return True

    def _out_of_reach(self, error: TimeoutError) -> LearnerOutOfReach:
        assert self._subscription is not None
        address = self._subscription.address
        if refused := why_not_secure(address, "learner", self._contact.tls):
            return LearnerOutOfReach(refused)
        return LearnerOutOfReach(
            f"{error} Can this host reach that address? A learner on another host "
            "needs --bind, and --advertise where it is known by another address"
        )

    def _learn_from_others(self, state: bytes) -> None:
        """Take over what the connectors of all EnvRunners have learned, if there is news."""
        if state:
            self._connectors.set_state(from_bytes(state))

    def _swap(self, weights: Weights) -> None:
        self._policy.load(weights.tree[self._module_id])
        self._version = weights.version

    def _spent(self, seconds: Mapping[str, float]) -> None:
        with self._lock:
            for name, spent in seconds.items():
                self._seconds[name] += spent

    def _settle_open(self) -> None:
        """Have a receipt for whatever was sent: the driver is to hear of it before this leaves."""
        with self._lock:
            sent = set(self._open)
            if self._lock.wait_for(lambda: sent.isdisjoint(self._open), _ACKNOWLEDGED_SECONDS):
                return
        for _, sender in self._senders.values():
            sender.close()
        with self._lock:
            self._lock.wait_for(lambda: sent.isdisjoint(self._open), _CLOSED_SECONDS)

    def _settled(self, batch_id: int, dropped: str, explanation: str) -> None:
        with self._lock:
            command_id, receipt = self._open[batch_id]
            receipt.seconds.update(self._seconds)
            receipt.dropped, receipt.explanation = dropped, explanation
            self._attachment.reply(command_id, receipt)
            del self._open[batch_id]
            self._lock.notify_all()
