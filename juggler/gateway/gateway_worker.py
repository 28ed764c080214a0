"""An EnvRunner whose environments belong to simulators that dial it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.datasets.dataset_writer import SampledEpisodes
from juggler.envrunner.environments.seeding import module_seeds, player_seed
from juggler.envrunner.envrunner_program import EnvRunnerProgram, GatewayAddress
from juggler.envrunner.evaluation import Goal
from juggler.envrunner.finiteness import NonFiniteBatch
from juggler.envrunner.frozen_weights import FrozenWeights, load_tree
from juggler.envrunner.learner_streams import FIRST_WEIGHTS_SECONDS, LearnerStreams
from juggler.envrunner.multi_agent.line_up import AssignedLineUps
from juggler.envrunner.rounds import FrozenResult, TrainedResult
from juggler.envrunner.sampling_worker import SamplingWorker, prepare_process, step_back
from juggler.envrunner.setup import RANDOM, ActingSetup, EnvRunnerSetup
from juggler.envrunner.stage import ActingParts, UserCode, refuse_league
from juggler.gateway.agents import ModuleAssignment
from juggler.gateway.curriculum import Curriculum
from juggler.gateway.episode_log import EpisodeLog, EpisodeWriter
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.module_player import ModulePlayer
from juggler.gateway.session_manager import GatewaySettings
from juggler.gateway.sessions import RESUME_SECONDS, AgentInterface
from juggler.gateway.simulator_evaluation import GreedyEpisodes
from juggler.gateway.simulators import Simulators
from juggler.gateway.transport import Transport
from juggler.runtime.acting.actor import Actor, random_actor
from juggler.runtime.actors.attachment import Attachment, Contact, Detached
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.endpoints import join_address, split_address
from juggler.runtime.actors.tls import read_tls
from juggler.runtime.actors.worker import Inbox, attach_and_run
from juggler.runtime.connectors.mergeable_state import from_bytes
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

#: Why a gateway has not played an evaluation to its end.
NO_SIMULATOR = "no simulator was connected that lets its gateway act"
NO_WEIGHTS = "the league's first player, {!r}, is newer than the checkpoint"
#: How often to check for weights that a request waits for.
_LOOK_SECONDS = 0.005
#: Number of rows that may begin: one per agent, without a limit.
_ANY = 1 << 40


def main(program: EnvRunnerProgram) -> None:
    """Attach, and serve simulators until a stop command."""
    own_code, contact = prepare_process(program), program.contact
    gateway = program.gateway
    assert gateway is not None
    attach_and_run(
        contact,
        program.role,
        lambda attachment, inbox: GatewayRunner(attachment, inbox, contact, gateway, *own_code[1:]),
    )


@dataclass(frozen=True, slots=True)
class AskedRound:
    """The requests of a round, and when it ends."""

    requests: dict[int, training_pb2.SampleRequest]  # requests by command id, one for each module
    at: float  # arrival, in seconds of `time.monotonic`
    # Environment steps at which it ends, because line-ups may leave out one of its modules; None:
    # it ends with its batches.
    until: int | None = None

    @property
    def modules(self) -> list[str]:
        """Ids of its modules."""
        return [each.module_id for each in self.requests.values()]


class GatewayRunner(SamplingWorker):
    """An EnvRunner that is ready once simulators have reported all spaces.

    Commands come in the process's first thread. Requests are carried out in the gateway's turns.

    If simulators may have several agents, no row of one agent waits for rows of another: while any
    round is open, the agents of all its modules may begin rows. A round ends when every module has
    a batch, or one module has two. If line-ups are drawn, it also ends with as many steps as a
    round of an EnvRunner has. Then each module hands over its complete rows.
    """

    slow_seconds = 30.0  # time after which the gateway reports how full a batch is

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
            attachment, inbox, contact, UserCode(module_factory, own_connectors), policy_in
        )
        self._inbox, self._gateway_address = inbox, gateway
        self._server: GatewayServer
        self._simulators: Simulators | None = None  # copies that it started
        self._curriculum = Curriculum()
        self._casting = ModuleAssignment()
        # The id of the Setup command, and the setup.
        self._setup_command: tuple[int, EnvRunnerSetup]
        self._is_ready = False
        self._seed, self._added = 0, 0  # the latter counts players, with former ones
        self._left: dict[str, FrozenResult] = {}  # results of former players, not reported yet
        # By the key of a player, as in `ModuleAssignment`: its setup and its seed.
        self._setups: dict[str, tuple[ActingSetup, int]] = {}
        self._players: dict[str, ServedPlayer] = {}  # players whose spaces are known
        self._new: deque[AskedRound] = deque()  # rounds from the first thread
        self._asked: deque[AskedRound] = deque()  # rounds whose weights are here
        # The current round, its start, and the seconds after which to report it next.
        self._slow: tuple[AskedRound | None, float, float] = (None, 0.0, 0.0)
        self._asked_at = 0.0  # when a simulator that lets the gateway act was last here, in seconds
        # Ids of commands, the commands and their evaluations.
        self._evaluations: deque[tuple[int, training_pb2.Evaluate, GreedyEpisodes]] = deque()
        self._loop.on(training_pb2.Evaluate, self._evaluate)

    def close(self) -> None:
        # After an error of one module, the recordings of all other modules are still closed.
        with ExitStack() as stack:
            for streams in self._streams.values():
                stack.callback(streams.close)
            for player in self._players.values():
                stack.callback(player.close)
            if self._simulators is not None:
                self._simulators.stop_restarting()
                stack.callback(self._simulators.close)  # after the server has sent them the end
            if hasattr(self, "_server"):
                self._server.close("the run is over, or lost this gateway")
            if self._contact.health is not None:
                self._contact.health.ready(False)

    # -- commands, in the first thread ----------------------------------------------------------

    def _setup(self, command_id: int, setup: training_pb2.Setup) -> training_pb2.Ready | None:
        self._steps_trained = setup.steps_trained
        return super()._setup(command_id, setup)

    def _begin(self, command_id: int, setup: EnvRunnerSetup, seed: int) -> None:
        """Listen. The reply follows when simulators have reported their spaces."""
        config, self._seed = setup.env_runner, seed
        self._casting = ModuleAssignment(
            setup.agents,
            mapping=setup.mapping,
            league=setup.league,
            own=self._own_code.classes,
            seed=seed,
        )
        for module_id, own_seed in self._seeds(setup, seed).items():
            self._setups[module_id] = setup.modules[module_id], own_seed
        self._setup_command = command_id, setup
        self._curriculum = Curriculum(seed, config.simulator_parameters, self._steps_trained)
        # A local worker needs no credentials for its driver, but simulators may come from
        # elsewhere.
        tls = read_tls(None) if self._contact.local else self._contact.tls
        token = read_token(None, tls) if self._contact.local else self._contact.token
        first = next(iter(setup.modules.values()))
        settings = GatewaySettings(
            max_batch=config.gateway_max_batch,
            max_wait=config.gateway_max_wait_ms / 1000,
            run_id=self._attachment.run_id,
            fragment_steps=config.fragment_steps,
            refuses_logged=_why_not_logged(first),
            casting=self._casting,
            rows=config.envs_per_runner,
            curriculum=self._curriculum,
            evaluates=setup.evaluates,
        )
        # A policy that hangs is detected like an environment that hangs.
        busy = self._attachment.busy
        transport = Transport(token, config.simulators_per_runner if config.simulator else 0)
        self._server = GatewayServer(transport, self, settings, self._failed, busy)
        address = self._server.start(self._address(), tls, self._gateway_address.insecure)
        self._curriculum.own = transport.loopbacks
        # The first simulator reports the spaces, so nothing is ready until then.
        if not config.simulator:
            self._note(f"takes simulators at {address}; waits for the first one")
            return
        logs = self._gateway_address.logs
        text = f"takes simulators at {address}; starts {config.simulators_per_runner} itself"
        self._note(f"{text}, whose output is in {logs}" if logs else text)
        self._simulators = self._started(config, transport.loopbacks, token)

    def _started(self, config: EnvRunnerConfig, addresses: Sequence[str], token: str) -> Simulators:
        """Start the copies of the simulator, which dial these addresses at once."""
        return Simulators(
            config.simulator,
            addresses,
            self._index * config.simulators_per_runner,
            self._gateway_address.logs,
            token,
            config.step_deadline_seconds,
            self._warn,
            self._failed,
        )

    @staticmethod
    def _seeds(setup: EnvRunnerSetup, seed: int) -> dict[str, int]:
        """Return the seed of each module's noise."""
        seeds = module_seeds(seed, len(setup.modules)) if setup.agents else [seed]
        return dict(zip(setup.modules, seeds, strict=True))

    def _next_seed(self) -> int:
        """Return the seed of a player that the Setup did not name."""
        self._added += 1
        return player_seed(self._seed, self._added - 1)

    def _admit_player(self, module_id: str, acting: ActingSetup) -> None:
        self._of_league()
        if module_id in self._setups:
            raise ValueError(f"a player {module_id!r} is here already")
        with self._server.between_turns():
            self._setups[module_id] = acting, self._next_seed()
            self._casting.players.append(module_id)
            self._server.manager.add_player(module_id)

    def _drop_player(self, module_id: str) -> None:
        league = self._of_league()
        if module_id not in self._casting.players:
            return
        with self._server.between_turns():
            for asked in (each for rounds in (self._new, self._asked) for each in rounds):
                for command_id, request in [*asked.requests.items()]:
                    if request.module_id == module_id:
                        self._deliveries.no_learner(command_id, request)
                        del asked.requests[command_id]
            # With another player, the result would mix two line-ups.
            for _, _, evaluation in self._evaluations:
                if module_id in evaluation.actors:
                    evaluation.given_up = f"player {module_id!r} left the league"
            self._casting.players.remove(module_id)
            trained = (each for each in self._casting.players if each in self._streams)
            league.forget(module_id, next(trained))
            self._forget_left(league)

    def _of_league(self) -> AssignedLineUps:
        if self._casting.league is None:
            refuse_league()
        return self._casting.league

    def _forget_left(self, league: AssignedLineUps) -> None:
        """Delete removed players that no running episode has."""
        for module_id in league.pop_left():
            del self._setups[module_id]
            left = self._players.pop(module_id, None)
            if left is not None and left.streams is None:
                self._left.setdefault(left.module_id, FrozenResult()).add(left.played())
            self._server.manager.remove_player(module_id)

    def _address(self) -> str:
        """Return its address, separate for each local gateway."""
        address, number = self._gateway_address.address, self._index * self._contact.local
        if address.startswith("unix:"):
            return f"{address}-{number}" if number else address
        host, port = split_address(address)
        return join_address(host, port + number if port else port)

    def _play(self, requests: Mapping[int, training_pb2.SampleRequest]) -> None:
        line_ups = [each for request in requests.values() for each in request.line_ups]
        if line_ups:
            with self._server.between_turns():
                self._of_league().assign(line_ups, self._casting.players)
        self._new.append(AskedRound(dict(requests), time.monotonic()))
        self._server.wake()

    def _evaluate(
        self, command_id: int, command: training_pb2.Evaluate
    ) -> training_pb2.Evaluation | None:
        """Start or cancel the evaluation of a checkpoint."""
        if not command.episodes:
            with self._server.between_turns():
                for _, other, evaluation in self._evaluations:
                    if other.checkpoint == command.checkpoint:
                        evaluation.given_up = "the driver has cancelled it"
            self._server.wake()
            return training_pb2.Evaluation()
        trees = self._frozen.pop_checkpoint()
        # A league's player may have come after the checkpoint.
        league = self._casting.league
        if league is not None and league.first not in trees:
            return training_pb2.Evaluation(why_fewer=NO_WEIGHTS.format(league.first))
        goal = Goal(command.goal.mean, command.goal.best) if command.HasField("goal") else None
        # Built in this thread, because simulators must not wait for it.
        actors = {
            key: player.greedy_actor(trees.get(player.module_id))
            for key, player in [*self._players.items()]  # the gateway may add one
            if self._evaluates(player)
        }
        evaluation = GreedyEpisodes(actors, command.episodes, command.most_steps, goal)
        with self._server.between_turns():
            for key, player in self._players.items():
                # It has just come.
                if player.is_frozen and self._evaluates(player) and key not in actors:
                    actors[key] = player.greedy_actor(None)
            self._evaluations.append((command_id, command, evaluation))
        self._server.wake()
        return None

    def _evaluates(self, player: ServedPlayer) -> bool:
        """Return whether evaluations play with this player."""
        league = self._casting.league
        return player.module_id != RANDOM if league is None else player.module_id == league.first

    def _continue_evaluation(self) -> None:
        """Start the next evaluation, or report a finished one."""
        evaluations, now = self._server.manager.evaluations, time.monotonic()
        command_id, command, evaluation = self._evaluations[0]
        if self._server.manager.sessions.asking or evaluations.running is None:
            self._asked_at = now
        # The driver waits for an answer, which no simulator might ever complete.
        if now > self._asked_at + RESUME_SECONDS:
            evaluation.given_up = NO_SIMULATOR
        if evaluations.running is None:
            evaluations.begin(evaluation)
        elif evaluations.end() is not None:
            self._evaluations.popleft()
            answer = evaluation.played.message(command.version)
            answer.why_fewer = evaluation.given_up
            self._attachment.reply(command_id, answer)

    def _failed(self, error: BaseException) -> None:
        self._inbox.put(Detached.by(error))

    # -- called by the server, within `at_work` ---------------------------------------------------

    def prepare(self, key: str, agents: int, interface: AgentInterface) -> ServedPlayer:
        """Build a player; after the last one, report to the driver."""
        command_id, setup = self._setup_command
        config = setup.env_runner
        acting: ActingSetup | None
        if key in self._setups:
            module_id, (acting, seed) = key, self._setups[key]
        else:
            assert key.startswith(f"{RANDOM}:"), f"no module is set up for {key}"
            module_id, acting, seed = RANDOM, None, self._next_seed()
        # Modules have different spaces, so each player records its own data set.
        episodes, worker = None, self._attachment.worker_id
        if config.record:
            episodes = SampledEpisodes(config, worker, *interface.spaces, None, self._warn)
        # Without streams to learners, its steps are played and not collected.
        player = self._players[key] = ServedPlayer(
            module_id,
            interface,
            setup=acting,
            streams=self._streams.get(key),
            seed=seed,
            rows=config.envs_per_runner * agents,
            steps=config.fragment_steps,
            own_code=self._own_code,
            frozen=self._frozen,
            episodes=episodes,
        )
        if player.is_frozen and self._evaluates(player):
            # Its first agent may come during an evaluation, or while one waits.
            for _, _, evaluation in self._evaluations:
                actor = evaluation.actors[key] = player.greedy_actor(None)
                if evaluation is self._server.manager.evaluations.running:
                    player.evaluate(actor)
        # Rounds need each trained module, so all of them are reported together.
        trained = [each for each in setup.modules if each in self._streams]
        missing = [each for each in trained if each not in self._players]
        if missing:
            self._note(f"has agents of module {module_id}; waits for those of {', '.join(missing)}")
        elif not self._is_ready:
            self._is_ready = True
            step_back()
            if self._contact.health is not None:
                self._contact.health.ready(True)
            ready = [self._players[each].ready for each in trained]
            self._attachment.reply(command_id, training_pb2.Ready(modules=ready))
        return player

    def wanted(self, key: str) -> int | None:
        player = self._players[key]
        asked = sum(key in each.modules for each in self._asked)
        # With several agents, steps wait only between rounds.
        if self._casting.table:
            between = None if self._asked else 0
            return _ANY if asked else between
        return asked * player.most_rows - len(player.rows.complete) - player.rows_begun

    def report_line(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        note = training_pb2.Note(text=text, warning=warning)
        note.simulators.connected, note.simulators.environments = simulators, environments
        self._attachment.report(note)

    def after_turn(self) -> None:
        for player in self._players.values():
            player.load_newest_weights()
        if self._evaluations:
            self._continue_evaluation()
        if self._simulators is not None:
            for session in self._simulators.check(self._server.manager.sessions.by_id.values()):
                self._server.manager.lose(session)
        while self._new and self._can_begin(self._new[0]):
            self._begin_round(self._new.popleft())
        # Weights arrive in another thread, without a call of `wake`.
        if self._new:
            self._server.wake(_LOOK_SECONDS)
        while self._asked and self._is_over(self._asked[0]):
            self._finish(self._asked.popleft())
        if self._casting.league is not None:
            self._forget_left(self._casting.league)
        self._report_slow_batch()

    # -- rounds -----------------------------------------------------------------------------------

    def _can_begin(self, asked: AskedRound) -> bool:
        """Return whether its requests have their weights, or have no learner."""
        for request in asked.requests.values():
            player = self._players.get(request.module_id)
            if player is None:
                return False
            streams = self._streams[request.module_id]
            if not streams.subscribed or streams.sender(request.learner) is None:
                continue
            if player.has_weights and player.version >= Version.of(request.at_least):
                continue
            if not player.has_weights and time.monotonic() - asked.at > FIRST_WEIGHTS_SECONDS:
                raise streams.out_of_reach(TimeoutError("no weights arrived from the learner."))
            return False
        return True

    def _begin_round(self, asked: AskedRound) -> None:
        """Start to collect for the requests that have a learner."""
        config, until = self._setup_command[1].env_runner, None
        left: dict[int, training_pb2.SampleRequest] = {}
        for command_id, request in asked.requests.items():
            if self._streams[request.module_id].sender(request.learner) is None:
                self._deliveries.no_learner(command_id, request)
                continue
            player = self._players[request.module_id]
            if request.connector_state:
                player.policy.connectors.set_state(from_bytes(request.connector_state))
            if request.HasField("seed"):
                seeds = self._seeds(self._setup_command[1], request.seed)
                player.policy.seed(seeds[request.module_id])
            self._curriculum.follow(request.steps_trained)
            left[command_id] = request
        # A line-up may leave out a module, whose batch would then never be complete.
        if self._casting.draws:
            before = self._asked[-1].until if self._asked else None  # rounds follow each other
            until = before or self._server.manager.env_steps
            until += config.envs_per_runner * config.fragment_steps
        if left:
            self._asked.append(AskedRound(left, asked.at, until))

    def _is_over(self, asked: AskedRound) -> bool:
        """Return whether its batches are complete, or its steps are done."""
        if asked.until is not None and self._server.manager.env_steps >= asked.until:
            return True
        players = [self._players[each] for each in asked.modules]
        batches = [len(each.rows.complete) // each.most_rows for each in players]
        return all(each >= 1 for each in batches) or any(each >= 2 for each in batches)

    def _finish(self, asked: AskedRound) -> None:
        """Send each batch to its learner. The receipts follow.

        Raises:
            NonFiniteBatch: steps of a module are lost. All requests are answered.
        """
        started = time.perf_counter()
        # How modules act, once per class, from the first gateway.
        notes = [note for each in self._players.values() for note in each.policy.take_notes()]
        for at, note in enumerate(notes):
            if self._index == 0 and note not in notes[:at]:
                self._attachment.report(note)
        results = {each: self._players[each].result() for each in asked.modules}
        # The driver counts results of modules without a request with this round.
        others, self._left = self._left, {}
        for module_id, player in self._players.items():
            if player.streams is None:
                others.setdefault(player.module_id, FrozenResult()).add(player.played())
            elif module_id not in results:
                player.pop_ended()  # not in this round: dropped
        league = self._casting.league
        matches = [] if league is None else league.pop_ended()
        played = replace(
            self._server.manager.pop_played(), modules=results, others=others, matches=matches
        )
        self._deliveries.has_spent(self._server.seconds)
        self._deliveries.spent({"frames": time.perf_counter() - started})
        self._deliver(asked.requests, played)

    def _receipt(self, request: training_pb2.SampleRequest) -> training_pb2.Receipt:
        receipt = super()._receipt(request)
        receipt.counts.update(self._server.counted)
        if self._simulators is not None:
            receipt.counts["simulator_restarts"] = self._simulators.restarts
        here = receipt.simulators
        here.connected, here.environments = self._server.manager.guests.here()
        return receipt

    def _report_slow_batch(self) -> None:
        """Report how full a slow batch is, at growing intervals."""
        asked = self._asked[0] if self._asked else None
        before, since, report_after = self._slow
        now = time.monotonic()
        if asked is None or asked is not before:
            self._slow = asked, now, self.slow_seconds
        elif (waited := now - since) >= report_after:
            self._slow = asked, since, 2 * waited
            parts = []
            for module_id in asked.modules:
                player = self._players[module_id]
                size = player.most_rows * player.rows.steps
                complete = player.rows.columns["lengths"][player.rows.complete]
                # Rows that are being filled count, too.
                filling = player.of["step"][player.of["row"] >= 0]
                steps = min(int(complete.sum() + filling.sum()), size)
                whose = "" if len(asked.requests) == 1 else f" of module {module_id}"
                parts.append(f"{steps:,} of {size:,} steps{whose}")
            text = f"has {', '.join(parts)} of its next batch after {waited:.0f} s"
            here = self._server.manager.guests.here()
            self.report_line(f"{text}; environments of simulators: {here[1]:,}", False, *here)


def _why_not_logged(setup: ActingSetup) -> str:
    """Return why recordings of other policies are refused, for simulators."""
    if setup.off_policy:
        return ""
    return (
        f"algorithm = {setup.algorithm!r} learns from what its own newest policies did, and "
        "from nothing that another policy did: train with impala or appo, whose V-trace makes up "
        "for the difference, or act with this run's policy"
    )


def policy_in(frame: FrameType | None) -> str:
    """Describe what a gateway's thread does, from its innermost frame."""
    while frame is not None:
        if frame.f_code is Actor.act.__code__:
            return f"inference by {type(frame.f_locals['self'].module).__name__}"
        frame = frame.f_back
    return "the gateway"


class ServedPlayer(ModulePlayer):
    """Plays with a module of the run, trained or not.

    Args:
        module_id: id of the module; `random` draws its actions.
        setup: setup of the module; None: of `random`.
        streams: streams to and from the module's learners; None: it is not trained.
        rows: rows of a batch, one for each of its agents in each environment.
        episodes: the data set for recorded episodes; None: they are not recorded.

    Attributes:
        most_rows: maximum rows of a batch.
        has_weights: weights of a learner have arrived.

    Raises:
        ValueError: the frozen weights do not fit the setup.
    """

    def __init__(
        self,
        module_id: str,
        interface: AgentInterface,
        *,
        setup: ActingSetup | None,
        streams: LearnerStreams | None,
        seed: int,
        rows: int,
        steps: int,
        own_code: UserCode,
        frozen: FrozenWeights,
        episodes: SampledEpisodes | None,
    ) -> None:
        spaces = interface.spaces
        self._build: Callable[[], ActingParts]
        self._parts: ActingParts
        if setup is None:
            policy, row_age = random_actor(*spaces, seed), 0
        else:
            # An evaluation of a checkpoint builds the same parts again.
            self._build = partial(ActingParts.build, setup, *spaces, own_code)
            parts, row_age = self._build(), setup.row_age
            self._parts = parts
            policy = Actor(parts.module, 1, 0, seed, parts.module_to_env, parts.connectors)
            if setup.digest:
                frozen.load(module_id, setup.digest, policy)
        super().__init__(interface, policy, steps, row_age)
        self.module_id, self.streams, self.most_rows = module_id, streams, rows
        self.has_weights = False
        self._writer = None if episodes is None else EpisodeWriter(episodes)
        if self._writer is not None:
            self.episode_log = EpisodeLog(policy, spaces[1], self._writer.add)

    def close(self) -> None:
        """Complete the recorded data set."""
        if self._writer is not None:
            self._writer.close()

    def greedy_actor(self, tree: Tree | None) -> Actor:
        """Return an actor that plays a checkpoint in the same spaces.

        Args:
            tree: the module's part of the checkpoint; None: the module is not trained.

        Raises:
            ValueError: the tree is missing, or does not fit the module.
        """
        if tree is None and self.streams is not None:
            raise ValueError(f"the checkpoint to play has no weights of module {self.module_id!r}")
        parts = self._build()
        connectors = parts.connectors if tree is not None else self._connectors
        actor = Actor(parts.module, 1, 0, 0, parts.module_to_env, connectors)
        if tree is None:
            actor.load(self.policy.weights())
        else:
            load_tree(self.module_id, tree, actor)
        return actor

    @property
    def is_frozen(self) -> bool:
        """Whether it has weights, and no learner."""
        return self.streams is None and self.module_id != RANDOM

    @property
    def ready(self) -> training_pb2.Ready.Module:
        """Message that reports a trained module to the driver."""
        return self._parts.ready(self.module_id, self.most_rows, self.rows.steps)

    def load_newest_weights(self) -> None:
        """Load the newest weights that have arrived."""
        weights = None if self.streams is None else self.streams.newest
        if weights is None:
            return
        if not self.has_weights or weights.version > self.version:
            tree: Any = weights.tree
            self.load(self._parts.as_here(tree[self.module_id]), weights.version)
            self.has_weights = True

    def result(self) -> TrainedResult | NonFiniteBatch:
        """Return the batch of a round: the oldest complete rows."""
        self.drop_stale()
        return self.pop_batch(self.most_rows)

    def played(self) -> FrozenResult:
        """Return an untrained module's steps and episodes since the last call."""
        return FrozenResult(self.new("steps"), *self.pop_ended())
