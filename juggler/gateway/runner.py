"""An EnvRunner whose environments are those of simulators that dial it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from gymnasium import Space

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.datasets.sampled_episodes import SampledEpisodes
from juggler.envrunner.deliveries import tell_round
from juggler.envrunner.environments.seeding import module_seeds, player_seed
from juggler.envrunner.evaluation import Goal
from juggler.envrunner.finiteness import NonFinite
from juggler.envrunner.multi_agent.assigned_line_ups import AssignedLineUps
from juggler.envrunner.process import prepare_process, step_back
from juggler.envrunner.program import EnvRunnerProgram, GatewayAddress
from juggler.envrunner.rounds import Played, PlayedRound
from juggler.envrunner.sampling_worker import SamplingWorker
from juggler.envrunner.setup import RANDOM, ActingSetup, EnvRunnerSetup
from juggler.envrunner.stage import OwnCode, refuse_league
from juggler.gateway.agents import Casting
from juggler.gateway.evaluation import GreedyEpisodes
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.player import Player
from juggler.gateway.served_module import ServedModule
from juggler.gateway.session_manager import GatewaySettings
from juggler.gateway.sessions import RESUME_SECONDS
from juggler.gateway.transport import Transport
from juggler.runtime.acting.actor import Actor
from juggler.runtime.actors.attachment import Attachment, Detached
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.endpoints import join_address, split_address
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.actors.worker import Contact, Inbox, attach_and_run
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

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


class GatewayRunner(SamplingWorker):
    """Takes part in a run, once simulators have told all spaces.

    Commands come in the process's first thread. Requests are carried out in the gateway's turns.

    Where simulators may have several agents, no row of one waits for rows of another: while any
    round is open, the agents of all its modules begin rows as they like. A round is over when every
    module has a batch, or one has two; or, where line-ups are drawn, with as many steps as a round
    of an EnvRunner has. Then each hands over what it has.
    """

    def __init__(
        self,
        attachment: Attachment,
        inbox: Inbox,
        contact: Contact,
        gateway: GatewayAddress,
        module_factory: Any = None,
        own_connectors: Any = None,
    ) -> None:
        super().__init__(
            attachment, inbox, contact, OwnCode(module_factory, own_connectors), policy_in
        )
        self._inbox, self._gateway_address = inbox, gateway
        self._server: GatewayServer | None = None
        self._casting = Casting()
        # By the driver: the command's id, and the setup.
        self._told: tuple[int, EnvRunnerSetup] | None = None
        self._is_ready = False
        self._seed, self._added = 0, 0  # players, with former ones
        self._left: dict[str, Played] = {}  # of players that have left, not reported yet
        self._modules: dict[str, ServedModule] = {}  # by the key of the player: see `Casting`
        self._new: deque[AskedRound] = deque()  # from the first thread
        self._asked: deque[AskedRound] = deque()  # whose weights are here
        self._slow_round = SlowRound()
        self._asked_at = 0.0  # when a simulator was last here that lets the gateway act, seconds
        # Commands with their ids, and what is to be played.
        self._evaluations: deque[tuple[int, training_pb2.Evaluate, Tree, Version]] = deque()
        self._loop.on(training_pb2.Evaluate, self._evaluate)

    def close(self) -> None:
        with ExitStack() as stack:  # an error of one module leaves no recording of another open
            for module in self._modules.values():
                stack.callback(module.close)
            if self._server is not None:
                self._server.close("the run is over, or lost this gateway")
            if self._contact.health is not None:
                self._contact.health.ready(False)

    # -- commands, in the first thread ----------------------------------------------------------

    def _begin(self, command_id: int, told: EnvRunnerSetup, seed: int) -> None:
        """Listen. The reply follows when simulators have told the spaces."""
        config, self._seed = told.env_runner, seed
        self._casting = Casting(
            told.agents,
            mapping=told.mapping,
            league=told.league,
            own=self._own_code.classes,
            seed=seed,
        )
        for module_id, own_seed in self._seeds(told, seed).items():
            self._add(module_id, told.modules[module_id], own_seed)
        self._told = command_id, told
        tls = read_tls(None) if self._contact.local else self._contact.tls
        token = read_token(None, tls) if self._contact.local else self._contact.token
        first = next(iter(told.modules.values()))
        settings = GatewaySettings(
            max_batch=config.gateway_max_batch,
            max_wait=config.gateway_max_wait_ms / 1000,
            run_id=self._attachment.run_id,
            fragment_steps=config.fragment_steps,
            refuses_logged=_why_not_logged(first),
            casting=self._casting,
            rows=config.envs_per_runner,
        )
        busy = self._attachment.busy  # a policy that hangs shows itself as an environment does
        self._server = GatewayServer(Transport(token), self, settings, self._failed, busy)
        address = self._server.start(self._address(), tls, self._gateway_address.insecure)
        self._note(f"takes simulators at {address}; waits for the first one")

    @staticmethod
    def _seeds(told: EnvRunnerSetup, seed: int) -> dict[str, int]:
        """By module, the seed of its noise."""
        seeds = module_seeds(seed, len(told.modules)) if told.agents else [seed]
        return dict(zip(told.modules, seeds, strict=True))

    def _add(self, module_id: str, acting: ActingSetup, seed: int) -> None:
        streams = self._streams.get(module_id)
        self._modules[module_id] = ServedModule(module_id, streams, acting, seed, self._frozen)

    def _let_in(self, module_id: str, acting: ActingSetup) -> None:
        self._of_league()
        if module_id in self._modules:
            raise ValueError(f"a player {module_id!r} is here already")
        assert self._server is not None
        with self._server.between_turns():
            self._add(module_id, acting, player_seed(self._seed, self._added))
            self._added += 1
            self._casting.players.append(module_id)
            self._server.manager.let_in(module_id)

    def _let_go(self, module_id: str) -> None:
        league = self._of_league()
        if module_id not in self._casting.players:
            return
        assert self._server is not None
        with self._server.between_turns():
            for asked in (self._new, self._asked):
                for place, each in enumerate(asked):
                    self._answer_for_gone(each, module_id)
                    asked[place] = each.without(module_id)
            self._casting.players.remove(module_id)
            trained = (each for each in self._casting.players if each in self._streams)
            league.forget(module_id, next(trained))
            self._forget_left(league)

    def _answer_for_gone(self, asked: AskedRound, module_id: str) -> None:
        for command_id, request in asked.requests.items():
            if request.module_id == module_id:
                self._deliveries.no_learner(command_id, request)

    def _of_league(self) -> AssignedLineUps:
        if self._casting.league is None:
            refuse_league()
        return self._casting.league

    def _forget_left(self, league: AssignedLineUps) -> None:
        """Forget players that were let go and that no running episode has."""
        assert self._server is not None
        for module_id in league.take_left():
            left = self._modules.pop(module_id)
            if not left.is_trained:
                self._left.setdefault(left.module_id, Played()).add(left.take_played())
            self._server.manager.let_go(module_id)

    def _address(self) -> str:
        """The gateway's address. Each local gateway has its own port or path."""
        address, number = self._gateway_address.address, self._index * self._contact.local
        if address.startswith("unix:"):
            return f"{address}-{number}" if number else address
        host, port = split_address(address)
        return join_address(host, port + number if port else port)

    def _play(self, requests: Mapping[int, training_pb2.SampleRequest]) -> None:
        assert self._server is not None
        line_ups = [each for request in requests.values() for each in request.line_ups]
        if line_ups:
            with self._server.between_turns():
                self._of_league().assign(line_ups, self._casting.players)
        self._new.append(AskedRound(dict(requests), time.monotonic()))
        self._server.wake()

    def _evaluate(self, command_id: int, command: training_pb2.Evaluate) -> None:
        """Have a checkpoint play episodes. The reply follows."""
        assert self._server is not None
        trees, version = self._checkpoint(command)
        with self._server.between_turns():
            self._evaluations.append((command_id, command, trees[DEFAULT_MODULE], version))
        self._server.wake()

    def _go_on_evaluating(self) -> None:
        """Begin with the next evaluation, or answer the one that is over."""
        module = self._modules[DEFAULT_MODULE]
        command_id, command, tree, version = self._evaluations[0]
        assert module.player is not None
        player, now = module.player, time.monotonic()
        assert self._server is not None
        if self._server.manager.sessions.asking or player.evaluation is None:
            self._asked_at = now
        in_vain = now > self._asked_at + RESUME_SECONDS
        if player.evaluation is None:
            goal = Goal(command.goal.mean, command.goal.best) if command.HasField("goal") else None
            about = command.episodes, command.most_steps, goal
            player.evaluate(GreedyEpisodes(module.greedy_actor(tree), *about))
        elif (played := player.take_evaluation(at_once=in_vain)) is not None:
            self._evaluations.popleft()
            answer = training_pb2.Evaluation(
                version=version.message(),
                episode_returns=played.returns,
                episode_lengths=played.lengths,
            )
            self._attachment.reply(command_id, answer)

    def _failed(self, error: BaseException) -> None:
        self._inbox.put(Detached.by(error))

    # -- called by the server, within `at_work` ---------------------------------------------------

    def prepare(
        self, key: str, agents: int, observation_space: Space[Any], action_space: Space[Any]
    ) -> Player:
        """Build a player. With the last one, tell the driver the spaces."""
        assert self._told is not None
        command_id, told = self._told
        config = told.env_runner
        if key not in self._modules:
            assert key.startswith(f"{RANDOM}:"), f"no module is set up for {key}"
            seed = player_seed(self._seed, self._added)
            self._added += 1
            self._modules[key] = ServedModule(RANDOM, None, None, seed, self._frozen)
        player = self._modules[key].prepare(
            observation_space,
            action_space,
            config.envs_per_runner * agents,
            config.fragment_steps,
            self._own_code,
            self._recorded(config, observation_space, action_space),
        )
        trained = {each: self._modules.get(each) for each in told.modules if each in self._streams}
        missing = [each for each, module in trained.items() if module and module.player is None]
        if missing:
            whose = self._modules[key].module_id
            self._note(f"has agents of module {whose}; waits for those of {', '.join(missing)}")
        elif not self._is_ready:
            self._is_ready = True
            step_back()
            if self._contact.health is not None:
                self._contact.health.ready(True)
            ready = [module.ready for module in trained.values() if module]
            self._attachment.reply(command_id, training_pb2.Ready(modules=ready))
        return player

    def _recorded(
        self, config: EnvRunnerConfig, observation_space: Space[Any], action_space: Space[Any]
    ) -> SampledEpisodes | None:
        """What takes the episodes that are recorded, if the configuration says so."""
        if not config.record:
            return None
        worker = self._attachment.worker_id
        return SampledEpisodes(config, worker, observation_space, action_space, None, self._warn)

    def wanted(self, key: str) -> int:
        module = self._modules[key]
        assert module.player is not None
        asked = sum(1 for each in self._asked if each.is_for(key))
        if self._has_several_agents:
            return _ANY if asked else 0
        return asked * module.rows - module.complete - module.player.rows_begun

    def holds_up(self, key: str) -> bool:
        """Whether steps wait for a request; with several agents, only between rounds."""
        return not (self._has_several_agents and self._asked)

    @property
    def _has_several_agents(self) -> bool:
        return bool(self._casting.table)

    def tell(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        note = training_pb2.Note(text=text, warning=warning)
        note.simulators.connected, note.simulators.environments = simulators, environments
        self._attachment.report(note)

    def go_on(self) -> None:
        for module in self._modules.values():
            module.take_weights()
        assert self._server is not None
        if self._evaluations:
            self._go_on_evaluating()
        while self._new and self._new[0].can_begin(self._modules):
            self._begin_round(self._new.popleft())
        while self._asked and self._asked[0].is_over(self._modules, self._server.manager.env_steps):
            self._hand_over(self._asked.popleft())
        if self._casting.league is not None:
            self._forget_left(self._casting.league)
        if text := self._slow_round.look(self._asked, self._modules):
            here = self._server.manager.guests.here()
            self.tell(f"{text}; environments of simulators: {here[1]:,}", False, *here)

    def patience(self) -> float:
        return _LOOK_SECONDS if self._new else 1.0

    def _begin_round(self, asked: AskedRound) -> None:
        """Begin to record for the requests that have a learner."""
        assert self._told is not None
        assert self._server is not None
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
        config, until = self._told[1].env_runner, None
        if self._casting.draws:
            before = self._asked[-1].until if self._asked else None  # rounds follow each other
            until = before or self._server.manager.env_steps
            until += config.envs_per_runner * config.fragment_steps
        if left:
            self._asked.append(AskedRound(left, asked.at, until))

    def _hand_over(self, asked: AskedRound) -> None:
        """Send each batch to its learner. The receipts follow.

        Raises:
            NonFinite: steps of a module are lost. All requests are answered.
        """
        assert self._server is not None
        broken: NonFinite | None = None
        self._tell_notes()
        told = False  # what came of the round itself is in one of its receipts
        for command_id, request in asked.requests.items():
            started, module = time.perf_counter(), self._modules[request.module_id]
            receipt, batch, error = module.hand_over(request)
            sender = module.streams.sender(request.learner)
            receipt.counts.update(self._server.counted)
            here = receipt.simulators
            here.connected, here.environments = self._server.manager.guests.here()
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
                tell_round(receipt, self._take_played(), by_agent=True)
                told = True
            if batch is None:
                self._deliveries.answer(command_id, receipt)
            else:
                self._deliveries.send(command_id, request, receipt, batch, sender)
        for module_id, module in self._modules.items():
            if module.is_trained and module.player and not asked.is_for(module_id):
                module.player.take_ended()  # in no receipt: they are not counted
        if broken is not None:
            raise broken

    def _take_played(self) -> PlayedRound:
        """What came of a round besides its batches."""
        assert self._server is not None
        others, self._left = self._left, {}
        for module in self._modules.values():
            if not module.is_trained:
                others.setdefault(module.module_id, Played()).add(module.take_played())
        league = self._casting.league
        matches = [] if league is None else league.take_ended()
        return replace(self._server.take_played(), others=others, matches=matches)

    def _tell_notes(self) -> None:
        """Report how modules act, once for each class and all gateways."""
        notes: list[training_pb2.Note] = []
        for module in self._modules.values():
            notes.extend(note for note in module.take_notes() if note not in notes)
        for note in notes if self._index == 0 else ():
            self._attachment.report(note)


def _why_not_logged(told: ActingSetup) -> str:
    """Why recordings of other policies are not learned from, for simulators."""
    if told.off_policy:
        return ""
    return (
        f"algorithm = {told.algorithm!r} learns from what its own newest policies did, and "
        "from nothing that another policy did: train with impala or appo, whose V-trace makes up "
        "for the difference, or act with this run's policy"
    )


def policy_in(frame: FrameType | None) -> str:
    """Return what a gateway's thread does, from its innermost frame."""
    while frame is not None:
        if frame.f_code is Actor.act.__code__:
            return f"inference by {type(frame.f_locals['self'].module).__name__}"
        frame = frame.f_back
    return "the gateway"


_TELL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class AskedRound:
    """The requests of a round, and when it ends.

    Attributes:
        requests: by command id, one for each module.
        at: when it came, in seconds of `time.monotonic`.
        until: steps of environments; None: it ends with its batches. Line-ups may leave out one of
            its modules, for which it would wait in vain.
    """

    requests: dict[int, training_pb2.SampleRequest]
    at: float
    until: int | None = None

    def without(self, module_id: str) -> AskedRound:
        """This round without the requests for a module."""
        others = {each: one for each, one in self.requests.items() if one.module_id != module_id}
        return replace(self, requests=others)

    def is_for(self, module_id: str) -> bool:
        """Whether it has a request for a module."""
        return any(each.module_id == module_id for each in self.requests.values())

    def can_begin(self, modules: Mapping[str, ServedModule]) -> bool:
        """Whether the weights of its requests are here, or have no learner.

        Args:
            modules: of the gateway, by id.

        Raises:
            LearnerOutOfReach: no weights came for long.
        """
        each = self.requests.values()
        return all(modules[one.module_id].can_begin(one, self.at) for one in each)

    def is_over(self, modules: Mapping[str, ServedModule], env_steps: int) -> bool:
        """Whether its batches are complete, or its steps are taken.

        Args:
            modules: of the gateway, by id.
            env_steps: of all environments so far.
        """
        if self.until is not None and env_steps >= self.until:
            return True
        asked = [modules[each.module_id] for each in self.requests.values()]
        return all(module.complete >= module.rows for module in asked) or any(
            module.complete >= 2 * module.rows for module in asked
        )

    def fullness(self, modules: Mapping[str, ServedModule]) -> str:
        """For people: how many of its steps are here, of each module."""
        parts = []
        for each in self.requests.values():
            here, all_steps = modules[each.module_id].fullness()
            whose = "" if len(self.requests) == 1 else f" of module {each.module_id}"
            parts.append(f"{here:,} of {all_steps:,} steps{whose}")
        return ", ".join(parts)


class SlowRound:
    """Reports how full a slow batch is, at growing intervals.

    Attributes:
        seconds: to the first time.
    """

    def __init__(self) -> None:
        self.seconds = _TELL_SECONDS
        self._of: AskedRound | None = None
        self._next = 0.0  # seconds since it was begun to wait
        self._since = 0.0

    def look(self, asked: Sequence[AskedRound], modules: Mapping[str, ServedModule]) -> str:
        """What is to be said now, for people; "": nothing.

        Args:
            asked: rounds without an answer, the oldest first.
            modules: of the gateway, by id.
        """
        if not asked:
            self._of = None
            return ""
        now = time.monotonic()
        if asked[0] is not self._of:
            self._of, self._since, self._next = asked[0], now, self.seconds
        waited = now - self._since
        if waited < self._next:
            return ""
        self._next = 2 * waited
        return f"has {asked[0].fullness(modules)} of its next batch after {waited:.0f} s"
