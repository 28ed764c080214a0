"""An EnvRunner whose environments are those of simulators that dial it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from gymnasium import Space

from juggler.envrunner.deliveries import Deliveries, receipt_for
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.envrunner_worker import (
    index_of,
    prepare_process,
    report_slow_streams,
    step_back,
)
from juggler.envrunner.finiteness import NonFinite, check_finite
from juggler.envrunner.learner_streams import FIRST_WEIGHTS_SECONDS, LearnerStreams
from juggler.envrunner.paced.gathered_policy import GatheredPolicy, policy_in
from juggler.envrunner.paced.rows import oldest_version
from juggler.envrunner.program import EnvRunnerProgram, GatewayAddress
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.envrunner.stage import ActingParts, OwnCode
from juggler.gateway import transport
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.player import Player
from juggler.gateway.session_manager import GatewaySettings
from juggler.runtime.actors.attachment import Attachment, Command, Detached
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.endpoints import split_address
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.setups import from_json
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.actors.worker import CommandLoop, Contact, attach_and_run
from juggler.runtime.connectors.mergeable_state import from_bytes, to_bytes
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams import calls
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

#: How often to look for weights that a request waits for.
_LOOK_SECONDS = 0.005


def main(program: EnvRunnerProgram) -> None:
    """Attach and take simulators until told to stop."""
    own_code, contact = prepare_process(program), program.contact
    gateway = program.gateway
    assert gateway is not None
    attach_and_run(
        contact,
        program.role,
        lambda attachment, inbox: GatewayRunner(attachment, inbox, contact, gateway, *own_code[1:]),
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A sample request without an answer."""

    command_id: int
    request: training_pb2.SampleRequest
    at: float  # seconds of `time.monotonic`


class GatewayRunner:
    """Takes part in a run as any EnvRunner does, once the first simulator has told its spaces.

    Commands come in the process's first thread and are carried out in the gateway's turns.
    """

    def __init__(
        self,
        attachment: Attachment,
        inbox: Mailbox[Command | Detached],
        contact: Contact,
        gateway: GatewayAddress,
        module_factory: Any = None,
        own_connectors: Any = None,
    ) -> None:
        self._attachment = attachment
        attachment.held_up_by = policy_in
        self._inbox = inbox
        self._contact = contact
        self._index = index_of(attachment)
        self._gateway_address = gateway
        self._own_code = OwnCode(module_factory, own_connectors)
        self._loop = CommandLoop(attachment, inbox)
        self._loop.on(training_pb2.Setup, self._setup)
        self._loop.on(training_pb2.Learners, self._learners)
        self._loop.on(training_pb2.SampleRequest, self._sample)
        self._server: GatewayServer | None = None
        self._player: Player | None = None
        # By the driver: the command's id, the seed and the setup.
        self._told: tuple[int, int, EnvRunnerSetup] | None = None
        self._rows = 0
        self._streams: LearnerStreams | None = None  # of its module, once it is set up
        self._deliveries = Deliveries(attachment)
        self._has_weights = False
        self._new: deque[_Asked] = deque()  # from the first thread
        self._asked: deque[_Asked] = deque()  # whose weights are here

    def run(self) -> str:
        report_slow_streams(self._attachment, self._index, self._contact)
        try:
            return self._loop.run()
        finally:
            self._deliveries.settle([self._streams] if self._streams else [])

    def close(self) -> None:
        if self._server is not None:
            self._server.close("the run is over, or lost this gateway")
        if self._contact.health is not None:
            self._contact.health.ready(False)
        if self._streams is not None:
            self._streams.close()

    # -- commands, in the first thread ----------------------------------------------------------

    def _setup(self, command_id: int, setup: training_pb2.Setup) -> None:
        """The reply follows when the first simulator has told the spaces."""
        told = from_json(setup.config, EnvRunnerSetup)
        config = told.env_runner
        ((module_id, acting),) = told.modules.items()  # simulators have one agent
        self._streams = LearnerStreams(
            module_id, self._index, self._attachment, self._contact, self._deliveries.settled
        )
        self._told = command_id, setup.seed, told
        self._rows = config.envs_per_runner
        tls = read_tls(None) if self._contact.local else self._contact.tls
        token = read_token(None, tls) if self._contact.local else self._contact.token
        settings = GatewaySettings(
            max_batch=config.gateway_max_batch,
            max_wait=config.gateway_max_wait_ms / 1000,
            run_id=self._attachment.run_id,
            fragment_steps=config.fragment_steps,
            refuses_logged=_why_not_logged(acting),
        )
        busy = self._attachment.busy  # a policy that hangs shows itself as an environment does
        carrier = transport.make_transport(token)
        self._server = GatewayServer(carrier, self, settings, self._failed, busy)
        if (why := transport.why_slow()) and not calls.why_slow():  # else it has been said
            self._attachment.report(training_pb2.Note(text=why))
        address = self._server.start(self._address(), tls, self._gateway_address.insecure)
        text = f"takes simulators at {address}; waits for the first one"
        self._attachment.report(training_pb2.Note(text=text))

    def _address(self) -> str:
        """The address of this gateway: each gateway of a host has its own port."""
        host, port = split_address(self._gateway_address.address)
        host = f"[{host}]" if ":" in host else host
        return f"{host}:{port + self._index if port else 0}"

    def _learners(self, _: int, message: training_pb2.Learners) -> attach_pb2.Done:
        """Dial the learners that train its module now, and let go of those that no longer do."""
        if self._streams is not None and message.module_id == self._streams.module_id:
            self._streams.connect(message.learners)
        return attach_pb2.Done()

    def _sample(self, command_id: int, request: training_pb2.SampleRequest) -> None:
        if self._streams is None or request.module_id != self._streams.module_id:
            raise ValueError(
                f"asked for a batch of module {request.module_id!r}, and a gateway acts with the "
                "only module that it was set up with"
            )
        self._new.append(_Asked(command_id, request, time.monotonic()))
        if self._server is not None:
            self._server.wake()

    def _failed(self, error: BaseException) -> None:
        self._inbox.put(Detached.by(error))

    # -- called by the server, within `at_work` ---------------------------------------------------

    def prepare(self, observation_space: Space[Any], action_space: Space[Any]) -> Player:
        """Build the player, and tell the driver the spaces."""
        assert self._told is not None
        command_id, seed, told = self._told
        ((module_id, acting),) = told.modules.items()
        seed_process(seed)
        parts = ActingParts.build(acting, observation_space, action_space, self._own_code)
        policy = GatheredPolicy(parts.module, parts.connectors, parts.module_to_env, seed)
        self._player = Player(
            observation_space,
            action_space,
            policy,
            parts.connectors,
            told.env_runner.fragment_steps,
            acting.row_age,
        )
        step_back()
        if self._contact.health is not None:
            self._contact.health.ready(True)
        ready = parts.ready(module_id, self._rows, told.env_runner.fragment_steps)
        self._attachment.reply(command_id, training_pb2.Ready(modules=[ready]))
        return self._player

    def wanted(self) -> int:
        player = self._player
        assert player is not None
        return (
            len(self._asked) * self._rows
            - len(player.environments.rows.complete)
            - player.environments.rows_begun
        )

    def go_on(self) -> None:
        player, streams = self._player, self._streams
        if player is None or streams is None:
            return
        weights = streams.newest
        if weights is not None and (not self._has_weights or weights.version > player.version):
            player.use(weights.tree[streams.module_id], weights.version)
            self._has_weights = True
        while self._new and self._can_begin(player, streams, self._new[0]):
            asked = self._new.popleft()
            if streams.sender(asked.request.learner) is None:
                self._deliveries.no_learner(asked.command_id, asked.request)
                continue
            if asked.request.connector_state:
                player.learn_from_others(from_bytes(asked.request.connector_state))
            if asked.request.HasField("seed"):
                player.seed(asked.request.seed)
            self._asked.append(asked)
        while self._asked and len(player.environments.rows.complete) >= self._rows:
            self._hand_over(player, streams, self._asked.popleft())

    def patience(self) -> float:
        return _LOOK_SECONDS if self._new else 1.0

    def _can_begin(self, player: Player, streams: LearnerStreams, asked: _Asked) -> bool:
        """Whether its weights are here, or its learner is gone."""
        if not streams.subscribed or streams.sender(asked.request.learner) is None:
            return True
        if not self._has_weights and time.monotonic() - asked.at > FIRST_WEIGHTS_SECONDS:
            raise streams.out_of_reach(TimeoutError("no weights came from the learner."))
        return self._has_weights and player.version >= Version.of(asked.request.at_least)

    def _hand_over(self, player: Player, streams: LearnerStreams, asked: _Asked) -> None:
        """Send a batch to its learner; the receipt follows when it is there."""
        started = time.perf_counter()
        request, deliveries = asked.request, self._deliveries
        batch, ended, delta = player.batch(self._rows)
        receipt = receipt_for(request)
        receipt.live_steps = batch.live_steps
        receipt.version.CopyFrom(oldest_version(batch).message())
        receipt.episode_returns.extend(episode[0] for episode in ended)
        receipt.episode_lengths.extend(episode[1] for episode in ended)
        receipt.stale_steps = player.recorder.take_stale()
        try:
            check_finite(batch)
        except NonFinite as error:
            deliveries.answer(asked.command_id, receipt, "nonfinite", str(error))
            raise
        if delta:
            receipt.connector_delta = to_bytes(delta)
        sender = streams.sender(request.learner)
        if sender is None:
            why = f"no learner {request.learner}"
            deliveries.answer(asked.command_id, receipt, "learner_lost", why)
            return
        assert self._server is not None
        receipt.counts.update(self._server.counted)
        deliveries.has_spent(self._server.seconds)
        deliveries.spent({"frames": time.perf_counter() - started})
        deliveries.send(asked.command_id, request, receipt, batch, sender)


def _why_not_logged(told: ActingSetup) -> str:
    """For simulators: why recordings of other policies are not learned from; "": they are."""
    if told.off_policy:
        return ""
    return (
        f"algorithm = {told.algorithm!r} learns from what its own newest policies did, and "
        "from nothing that another policy did: train with impala or appo, whose V-trace makes up "
        "for the difference, or act with this run's policy"
    )
