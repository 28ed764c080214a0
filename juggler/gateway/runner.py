"""An EnvRunner whose environments are those of simulators that dial it."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from gymnasium import Space

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.envrunner_worker import (
    FIRST_WEIGHTS_SECONDS,
    EnvRunner,
    prepare_process,
    step_back,
)
from juggler.envrunner.finiteness import NonFinite, check_finite
from juggler.envrunner.program import Door, EnvRunnerProgram
from juggler.gateway import transport
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.gathered_policy import GatheredPolicy, policy_in
from juggler.gateway.player import Player
from juggler.gateway.session_manager import GatewaySettings
from juggler.runtime.actors.attachment import Attachment, Command, Detached
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.endpoints import split_address
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.actors.worker import Contact, attach_and_run
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.mergeable_state import from_bytes, to_bytes
from juggler.runtime.episodes.batch import DEFAULT_MODULE, EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.acting import strip_to_acting
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.streams import calls
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

#: How often to look for weights that a request waits for.
_LOOK_SECONDS = 0.005


def main(program: EnvRunnerProgram) -> None:
    """Attach and take simulators until told to stop."""
    own_code, contact, door = prepare_process(program), program.contact, program.door
    assert door is not None
    attach_and_run(
        contact,
        program.role,
        lambda attachment, inbox: GatewayRunner(attachment, inbox, contact, door, *own_code[1:]),
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A sample request without an answer."""

    command_id: int
    request: training_pb2.SampleRequest
    at: float  # seconds of `time.monotonic`


class GatewayRunner(EnvRunner):
    """Takes part in a run as any EnvRunner does, once the first simulator has told its spaces.

    Commands come in the process's first thread and are carried out in the gateway's turns.
    """

    def __init__(
        self,
        attachment: Attachment,
        inbox: Mailbox[Command | Detached],
        contact: Contact,
        door: Door,
        module_factory: Any = None,
        own_connectors: Any = None,
    ) -> None:
        super().__init__(attachment, inbox, contact, None, module_factory, own_connectors)
        attachment.held_up_by = policy_in
        self._inbox = inbox
        self._door = door
        self._server: GatewayServer | None = None
        self._player: Player | None = None
        self._setup_command: tuple[int, training_pb2.Setup] | None = None
        self._rows = 0
        self._has_weights = False
        self._new: deque[_Asked] = deque()  # from the first thread
        self._asked: deque[_Asked] = deque()  # whose weights are here

    def close(self) -> None:
        if self._server is not None:
            self._server.close("the run is over, or lost this gateway")
        super().close()

    # -- commands, in the first thread ----------------------------------------------------------

    def _setup(self, command_id: int, setup: training_pb2.Setup) -> None:
        """The reply follows when the first simulator has told the spaces."""
        config = EnvRunnerConfig(**json.loads(setup.config)["env_runner"])
        self._setup_command = command_id, setup
        self._rows = config.envs_per_runner
        tls = read_tls(None) if self._contact.local else self._contact.tls
        token = read_token(None, tls) if self._contact.local else self._contact.token
        settings = GatewaySettings(
            max_batch=config.gateway_max_batch,
            max_wait=config.gateway_max_wait_ms / 1000,
            run_id=self._attachment.run_id,
            fragment_steps=config.fragment_steps,
            refuses_logged=_why_not_logged(json.loads(setup.config)["wants"]),
        )
        busy = self._attachment.busy  # a policy that hangs shows itself as an environment does
        carrier = transport.make_transport(token)
        self._server = GatewayServer(carrier, self, settings, self._failed, busy)
        if (why := transport.why_slow()) and not calls.why_slow():  # else it has been said
            self._attachment.report(training_pb2.Note(text=why))
        address = self._server.start(self._address(), tls, self._door.insecure)
        text = f"takes simulators at {address}; waits for the first one"
        self._attachment.report(training_pb2.Note(text=text))

    def _address(self) -> str:
        """The address of this gateway: each gateway of a host has its own port."""
        host, port = split_address(self._door.address)
        host = f"[{host}]" if ":" in host else host
        return f"{host}:{port + self._index if port else 0}"

    def _sample(self, command_id: int, request: training_pb2.SampleRequest) -> None:
        self._new.append(_Asked(command_id, request, time.monotonic()))
        if self._server is not None:
            self._server.wake()

    def _failed(self, error: BaseException) -> None:
        self._inbox.put(Detached.by(error))

    # -- called by the server, within `at_work` ---------------------------------------------------

    def prepare(self, observation_space: Space[Any], action_space: Space[Any]) -> Player:
        """Build the player, and tell the driver the spaces."""
        assert self._setup_command is not None
        command_id, setup = self._setup_command
        parts = json.loads(setup.config)
        config = EnvRunnerConfig(**parts["env_runner"])
        module_config = ModuleConfig(**parts["module"])
        seed_process(setup.seed)
        connectors, module_to_env = build_runner_pipelines(
            ConnectorsConfig.parse(parts["connectors"]),
            observation_space,
            action_space,
            self._own_connectors,
        )
        module = build_module(
            self._module_factory or module_config.module,
            connectors.module_observation_space,
            module_to_env.action_space,
            module_config.model,
            distribution=module_config.distribution,
            check_specs=module_config.check_specs,
        )
        strip_to_acting(module)
        policy = GatheredPolicy(module, connectors, module_to_env, setup.seed)
        self._player = Player(
            observation_space,
            action_space,
            policy,
            connectors,
            config.fragment_steps,
            parts["wants"]["max_staleness"],
        )
        step_back()
        if self._contact.health is not None:
            self._contact.health.ready(True)
        ready = training_pb2.Ready(
            observation_space=space_to_message(connectors.observation_space),
            action_space=space_to_message(module_to_env.action_space),
            rows=self._rows,
            steps=config.fragment_steps,
        )
        self._attachment.reply(command_id, ready)
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
        player = self._player
        if player is None:
            return
        subscription = self._subscription  # the first thread may replace it
        weights = None if subscription is None else subscription.newest
        if weights is not None and (not self._has_weights or weights.version > player.version):
            player.use(weights.tree[DEFAULT_MODULE], weights.version)
            self._has_weights = True
        while self._new and self._can_begin(player, self._new[0]):
            asked = self._new.popleft()
            if asked.request.learner not in self._senders:
                self._no_learner(asked)
                continue
            if asked.request.connector_state:
                player.learn_from_others(from_bytes(asked.request.connector_state))
            if asked.request.HasField("seed"):
                player.seed(asked.request.seed)
            self._asked.append(asked)
        while self._asked and len(player.environments.rows.complete) >= self._rows:
            self._hand_over(player, self._asked.popleft())

    def patience(self) -> float:
        return _LOOK_SECONDS if self._new else 1.0

    def _can_begin(self, player: Player, asked: _Asked) -> bool:
        """Whether its weights are here, or its learner is gone."""
        if self._subscription is None or asked.request.learner not in self._senders:
            return True
        if not self._has_weights and time.monotonic() - asked.at > FIRST_WEIGHTS_SECONDS:
            raise self._out_of_reach(TimeoutError("no weights came from the learner."))
        return self._has_weights and player.version >= Version.of(asked.request.at_least)

    def _no_learner(self, asked: _Asked) -> None:
        receipt = training_pb2.Receipt(
            batch_id=asked.request.batch_id,
            learner=asked.request.learner,
            dropped="learner_lost",
            explanation=f"no learner {asked.request.learner}",
        )
        self._attachment.reply(asked.command_id, receipt)

    def _hand_over(self, player: Player, asked: _Asked) -> None:
        """Send a batch to its learner; the receipt follows when it is there."""
        started = time.perf_counter()
        request = asked.request
        batch, ended, delta = player.batch(self._rows)
        receipt = training_pb2.Receipt(
            batch_id=request.batch_id,
            learner=request.learner,
            live_steps=batch.live_steps,
            version=_oldest(batch).message(),
            episode_returns=[episode[0] for episode in ended],
            episode_lengths=[episode[1] for episode in ended],
            stale_steps=player.recorder.take_stale(),
        )
        try:
            check_finite(batch)
        except NonFinite as error:
            receipt.dropped, receipt.explanation = "nonfinite", str(error)
            self._attachment.reply(asked.command_id, receipt)
            raise
        if delta:
            receipt.connector_delta = to_bytes(delta)
        _, sender = self._senders.get(request.learner, ("", None))
        if sender is None:
            receipt.dropped = "learner_lost"
            receipt.explanation = f"no learner {request.learner}"
            self._attachment.reply(asked.command_id, receipt)
            return
        header = episodes_pb2.BatchHeader(
            batch_id=request.batch_id,
            envrunner=self._attachment.worker_id,
            generation=request.generation,
            live_steps=receipt.live_steps,
            version=receipt.version,
            permit=request.permit,
        )
        assert self._server is not None
        receipt.counts.update(self._server.counted)
        with self._lock:
            self._open[request.batch_id] = (asked.command_id, receipt)
            self._seconds.update(self._server.seconds)
            self._seconds["frames"] += time.perf_counter() - started
        sender.send(header, {DEFAULT_MODULE: batch.to_tree()})


def _why_not_logged(wants: dict[str, Any]) -> str:
    """For simulators: why recordings of other policies are not learned from; "": they are."""
    if wants["off_policy"]:
        return ""
    return (
        f"algorithm = {wants['algorithm']!r} learns from what its own newest policies did, and "
        "from nothing that another policy did: train with impala or appo, whose V-trace makes up "
        "for the difference, or act with this run's policy"
    )


def _oldest(batch: EpisodeBatch) -> Version:
    """The oldest weights that acted."""
    generations, updates = batch.segment_generations, batch.segment_updates
    return Version(*min(zip(generations.tolist(), updates.tolist(), strict=True)))
