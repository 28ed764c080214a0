"""An EnvRunner whose environments are those of simulators that dial it."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from types import FrameType
from typing import Any

from gymnasium import Space

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.datasets.sampled_episodes import SampledEpisodes
from juggler.envrunner.deliveries import Deliveries
from juggler.envrunner.environments.seeding import module_seeds, seed_process
from juggler.envrunner.finiteness import NonFinite
from juggler.envrunner.info_numbers import to_messages
from juggler.envrunner.learner_streams import LearnerStreams
from juggler.envrunner.process import index_of, prepare_process, report_slow_streams, step_back
from juggler.envrunner.program import EnvRunnerProgram, GatewayAddress
from juggler.envrunner.rounds import RequestedRound
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup, may_play
from juggler.envrunner.stage import OwnCode
from juggler.gateway import transport
from juggler.gateway.asked_round import AskedRound, SlowRound
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.player import Player
from juggler.gateway.served_module import ServedModule
from juggler.gateway.session_manager import GatewaySettings
from juggler.runtime.acting.actor import Actor
from juggler.runtime.actors import calls
from juggler.runtime.actors.attachment import Attachment, Command, Detached
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.endpoints import join_address, split_address
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.setups import from_json
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.actors.worker import CommandLoop, Contact, attach_and_run
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

#: How often to look for weights that a request waits for.
_LOOK_SECONDS = 0.005
#: Rows that may begin: as many as there are agents.
_ANY = 1 << 40


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


class GatewayRunner:
    """Takes part in a run as any EnvRunner does, once simulators have told the spaces of each
    module's agents.

    Commands come in the process's first thread and are carried out in the gateway's turns.

    Where simulators may have several agents, no row of one waits for rows of another: while any
    round is open, the agents of all its modules begin rows as they like. A round is over when every
    module has a batch, or one has two; then each hands over what it has.
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
        self._said: set[str] = set()  # to the driver, by the streams of any module
        self._gateway_address = gateway
        self._own_code = OwnCode(module_factory, own_connectors)
        self._loop = CommandLoop(attachment, inbox)
        self._loop.on(training_pb2.Setup, self._setup)
        self._loop.on(training_pb2.Learners, self._learners)
        self._loop.on(training_pb2.SampleRequest, self._sample)
        self._server: GatewayServer | None = None
        # By the driver: the command's id, and the setup.
        self._told: tuple[int, EnvRunnerSetup] | None = None
        self._modules: dict[str, ServedModule] = {}
        self._deliveries = Deliveries(attachment)
        self._round = RequestedRound()  # that comes
        self._new: deque[AskedRound] = deque()  # from the first thread
        self._asked: deque[AskedRound] = deque()  # whose weights are here
        self._slow_round = SlowRound()

    def run(self) -> str:
        report_slow_streams(self._attachment, self._index, self._contact)
        try:
            return self._loop.run()
        finally:
            self._deliveries.settle([module.streams for module in self._modules.values()])

    def close(self) -> None:
        with ExitStack() as stack:  # an error of one module leaves no recording of another open
            for module in self._modules.values():
                stack.callback(module.close)
            if self._server is not None:
                self._server.close("the run is over, or lost this gateway")
            if self._contact.health is not None:
                self._contact.health.ready(False)

    # -- commands, in the first thread ----------------------------------------------------------

    def _setup(self, command_id: int, setup: training_pb2.Setup) -> None:
        """The reply follows when simulators have told the spaces."""
        told = from_json(setup.config, EnvRunnerSetup)
        config = told.env_runner
        for module_id, seed in self._seeds(told, setup.seed).items():
            settled = self._deliveries.settled
            streams = LearnerStreams(
                module_id, self._index, self._attachment, self._contact, settled, self._said
            )
            self._modules[module_id] = ServedModule(streams, told.modules[module_id], seed)
        self._told = command_id, told
        seed_process(setup.seed)
        tls = read_tls(None) if self._contact.local else self._contact.tls
        token = read_token(None, tls) if self._contact.local else self._contact.token
        first = next(iter(told.modules.values()))
        settings = GatewaySettings(
            max_batch=config.gateway_max_batch,
            max_wait=config.gateway_max_wait_ms / 1000,
            run_id=self._attachment.run_id,
            fragment_steps=config.fragment_steps,
            refuses_logged=_why_not_logged(first),
            agents={agent: may_play(said)[0] for agent, said in told.agents.items()},
            rows=config.envs_per_runner,
        )
        busy = self._attachment.busy  # a policy that hangs shows itself as an environment does
        carrier = transport.make_transport(token)
        self._server = GatewayServer(carrier, self, settings, self._failed, busy)
        if (why := transport.why_slow()) and not calls.why_slow():  # else it has been said
            self._attachment.report(training_pb2.Note(text=why))
        address = self._server.start(self._address(), tls, self._gateway_address.insecure)
        text = f"takes simulators at {address}; waits for the first one"
        self._attachment.report(training_pb2.Note(text=text))

    @staticmethod
    def _seeds(told: EnvRunnerSetup, seed: int) -> dict[str, int]:
        """By module, the seed of its noise."""
        seeds = module_seeds(seed, len(told.modules)) if told.agents else [seed]
        return dict(zip(told.modules, seeds, strict=True))

    def _address(self) -> str:
        """The gateway's address. Each local gateway has its own port or path."""
        address, number = self._gateway_address.address, self._index * self._contact.local
        if address.startswith("unix:"):
            return f"{address}-{number}" if number else address
        host, port = split_address(address)
        return join_address(host, port + number if port else port)

    def _learners(self, _: int, message: training_pb2.Learners) -> attach_pb2.Done:
        """Dial the learners that train a module now, and let go of those that no longer do."""
        if (module := self._modules.get(message.module_id)) is not None:
            module.streams.connect(message.learners)
        return attach_pb2.Done()

    def _sample(self, command_id: int, request: training_pb2.SampleRequest) -> None:
        if request.module_id not in self._modules:
            raise ValueError(
                f"asked for a batch of module {request.module_id!r}, and this gateway acts with "
                f"{', '.join(map(repr, self._modules))}"
            )
        if not self._round.add(command_id, request):
            return  # others of the round follow
        requests, self._round = self._round.requests, RequestedRound()
        self._new.append(AskedRound(requests, time.monotonic()))
        if self._server is not None:
            self._server.wake()

    def _failed(self, error: BaseException) -> None:
        self._inbox.put(Detached.by(error))

    # -- called by the server, within `at_work` ---------------------------------------------------

    def prepare(
        self, module_id: str, agents: int, observation_space: Space[Any], action_space: Space[Any]
    ) -> Player:
        """Build the player of a module. With the last one, tell the driver the spaces."""
        assert self._told is not None
        command_id, told = self._told
        config = told.env_runner
        player = self._modules[module_id].prepare(
            observation_space,
            action_space,
            config.envs_per_runner * agents,
            config.fragment_steps,
            self._own_code,
            self._recorded(config, observation_space, action_space),
        )
        missing = [each for each, module in self._modules.items() if module.player is None]
        if missing:
            text = f"has agents of module {module_id}; waits for those of {', '.join(missing)}"
            self._attachment.report(training_pb2.Note(text=text))
            return player
        step_back()
        if self._contact.health is not None:
            self._contact.health.ready(True)
        ready = [module.ready for module in self._modules.values()]
        self._attachment.reply(command_id, training_pb2.Ready(modules=ready))
        return player

    def _recorded(
        self, config: EnvRunnerConfig, observation_space: Space[Any], action_space: Space[Any]
    ) -> SampledEpisodes | None:
        """What takes the episodes that are recorded, if the configuration says so."""
        if not config.record:
            return None

        def tell(text: str) -> None:
            self._attachment.report(training_pb2.Note(text=text, warning=True))

        worker = self._attachment.worker_id
        return SampledEpisodes(config, worker, observation_space, action_space, None, tell)

    def wanted(self, module_id: str) -> int:
        module = self._modules[module_id]
        assert module.player is not None
        asked = sum(1 for each in self._asked if each.is_for(module_id))
        if self._has_several_agents:
            return _ANY if asked else 0
        return asked * module.rows - module.complete - module.player.environments.rows_begun

    def holds_up(self, module_id: str) -> bool:
        """A module without a share in the open rounds holds nobody up."""
        return not (self._has_several_agents and self._asked)

    @property
    def _has_several_agents(self) -> bool:
        assert self._told is not None
        return bool(self._told[1].agents)

    def tell(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        note = training_pb2.Note(text=text, warning=warning)
        note.simulators.connected, note.simulators.environments = simulators, environments
        self._attachment.report(note)

    def go_on(self) -> None:
        for module in self._modules.values():
            module.take_weights()
        while self._new and self._new[0].can_begin(self._modules):
            self._begin(self._new.popleft())
        while self._asked and self._asked[0].is_over(self._modules):
            self._hand_over(self._asked.popleft())
        assert self._server is not None
        if text := self._slow_round.look(self._asked, self._modules):
            here = self._server.connected()
            self.tell(f"{text}; environments of simulators: {here[1]:,}", False, *here)

    def patience(self) -> float:
        return _LOOK_SECONDS if self._new else 1.0

    def _begin(self, asked: AskedRound) -> None:
        """Answer those requests whose learners are gone, and begin to record for the others."""
        assert self._told is not None
        left: dict[int, training_pb2.SampleRequest] = {}
        for command_id, request in asked.requests.items():
            if self._modules[request.module_id].streams.sender(request.learner) is None:
                self._deliveries.no_learner(command_id, request)
                continue
            seed = None
            if request.HasField("seed"):
                seed = self._seeds(self._told[1], request.seed)[request.module_id]
            self._modules[request.module_id].begin(request, seed)
            left[command_id] = request
        if left:
            self._asked.append(AskedRound(left, asked.at))

    def _hand_over(self, asked: AskedRound) -> None:
        """Send each batch to its learner; the receipts follow when they are there.

        Raises:
            NonFinite: steps of a module are lost. All requests are answered.
        """
        assert self._server is not None
        broken: NonFinite | None = None
        self._tell_notes()
        told = False  # how episodes of environments ended: one receipt of a round has it
        for command_id, request in asked.requests.items():
            started, module = time.perf_counter(), self._modules[request.module_id]
            receipt, batch, error = module.hand_over(request)
            sender = module.streams.sender(request.learner)
            receipt.counts.update(self._server.counted)
            here = receipt.simulators
            here.connected, here.environments = self._server.connected()
            self._deliveries.has_spent(self._server.seconds)
            self._deliveries.spent({"frames": time.perf_counter() - started})
            if error is not None:
                self._deliveries.answer(command_id, receipt, "nonfinite", str(error))
                broken = error
                continue
            if sender is None:
                why = f"no learner {request.learner}"
                self._deliveries.answer(command_id, receipt, "learner_lost", why)
                continue
            if not told:
                env_ended, told = self._server.take_env_ended(), True
                receipt.env_returns.extend(episode[0] for episode in env_ended)
                receipt.env_lengths.extend(episode[1] for episode in env_ended)
                receipt.infos.extend(to_messages(self._server.take_infos()))
            if batch is None:
                self._deliveries.answer(command_id, receipt)
            else:
                self._deliveries.send(command_id, request, receipt, batch, sender)
        for module_id, module in self._modules.items():
            if module.player is not None and not asked.is_for(module_id):
                module.player.take_ended()  # in no receipt: nobody counts them
        if broken is not None:
            raise broken

    def _tell_notes(self) -> None:
        """Tell people how modules act; of those with the same class, and of several gateways, one
        speaks for all."""
        notes: list[training_pb2.Note] = []
        for module in self._modules.values():
            notes.extend(note for note in module.take_notes() if note not in notes)
        for note in notes if self._index == 0 else ():
            self._attachment.report(note)


def _why_not_logged(told: ActingSetup) -> str:
    """For simulators: why recordings of other policies are not learned from; "": they are."""
    if told.off_policy:
        return ""
    return (
        f"algorithm = {told.algorithm!r} learns from what its own newest policies did, and "
        "from nothing that another policy did: train with impala or appo, whose V-trace makes up "
        "for the difference, or act with this run's policy"
    )


def policy_in(frame: FrameType | None) -> str:
    """Return what a thread of a gateway does, for people, from its innermost frame."""
    while frame is not None:
        if frame.f_code is Actor.act.__code__:
            return f"inference by {type(frame.f_locals['self'].module).__name__}"
        frame = frame.f_back
    return "the gateway"
