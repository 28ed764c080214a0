"""Gateways without a run: nothing is collected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymnasium import Space

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.evaluation import PlayedEpisodes
from juggler.envrunner.setup import RANDOM
from juggler.gateway.agents import ModuleAssignment, module_of
from juggler.gateway.curriculum import Curriculum
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.module_player import ModulePlayer
from juggler.gateway.session_manager import GatewaySettings
from juggler.gateway.sessions import AgentInterface
from juggler.gateway.simulator_evaluation import GreedyEpisodes
from juggler.gateway.simulators import Simulators
from juggler.gateway.transport import Transport
from juggler.runtime.acting.actor import Actor, random_actor
from juggler.runtime.connectors.pipelines import EnvToModule, ModuleToEnv
from juggler.runtime.modules.rl_module import RLModule

LOOK_SECONDS = 0.1
#: Its name in the refusal of simulators that act by themselves.
ALONE = "a gateway without a run"
#: A module and its connectors, from its id and spaces.
PartsOf = Callable[[str, Space[Any], Space[Any]], tuple[RLModule, EnvToModule, ModuleToEnv]]


class StandaloneGateway:
    """The `GatewayWork` of a gateway that collects no steps.

    Attributes:
        over: set once the gateway may end.
        failure: an error that ended it.
    """

    server: GatewayServer

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report, self.over = report, threading.Event()
        self.failure: BaseException | None = None

    def wanted(self, key: str) -> int | None:
        return None

    def report_line(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        self.report(text)

    def failed(self, error: BaseException) -> None:
        self.failure = error
        self.over.set()


class _Evaluation(StandaloneGateway):
    """Plays the episodes of an evaluation with the modules of a checkpoint."""

    copies: Simulators | None = None

    def __init__(
        self, parts_of: PartsOf, episodes: int, steps: int, report: Callable[[str], None]
    ) -> None:
        super().__init__(report)
        self.episodes = GreedyEpisodes({}, episodes, 0, None, everywhere=True)
        self._parts_of, self._steps = parts_of, steps

    def prepare(self, key: str, agents: int, interface: AgentInterface) -> ModulePlayer:
        if (module_id := module_of(key)) == RANDOM:
            return ModulePlayer(interface, random_actor(*interface.spaces), self._steps, 0)
        # Episodes that begin after those of the evaluation do not count. The module plays them,
        # too, because its actions may be in a space without a distribution that ships.
        policy, greedy = (
            Actor(module, 1, 0, 0, module_to_env, connectors)
            for module, connectors, module_to_env in (
                self._parts_of(module_id, *interface.spaces) for _ in range(2)
            )
        )
        player = ModulePlayer(interface, policy, self._steps, 0)
        player.evaluate(greedy)
        return player

    def report_line(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        if warning:
            self.report(text)

    def after_turn(self) -> None:
        manager = self.server.manager
        for session in self.copies.check(manager.sessions.by_id.values()) if self.copies else ():
            manager.lose(session)
        if self.episodes.is_over:
            self.over.set()

    def steps(self) -> int:
        """Return the number of steps of each environment so far."""
        with self.server.between_turns():
            counts, together = self.server.counts(), self.server.manager.env_steps
        return int((together or counts["steps"]) / max(1.0, counts["environments"]))


def evaluate_with_copies(
    config: EnvRunnerConfig,
    agents: Mapping[str, str | Sequence[str]],
    mapping: str,
    parts_of: PartsOf,
    episodes: int,
    seed: int,
    steps_trained: int,
    report: Callable[[str], None],
    watch: Callable[[int, int], None],
) -> PlayedEpisodes:
    """Play the first episodes that copies of a simulator begin, without exploration.

    Args:
        mapping: name of the function that draws line-ups; "": none.
        steps_trained: decides about scheduled parameters of episodes.
        report: called with warnings, and with the ends of copies, in any thread.
        watch: called now and then with the number of finished episodes and of steps so far.

    Raises:
        SimulatorFailed: a copy keeps ending.
    """
    curriculum = Curriculum(seed, config.simulator_parameters, steps_trained)
    settings = GatewaySettings(
        config.gateway_max_batch,
        config.gateway_max_wait_ms / 1000,
        "an evaluation",
        config.fragment_steps,
        casting=ModuleAssignment(agents, mapping=mapping, seed=seed, remote_only=ALONE),
        curriculum=curriculum,
    )
    # Only copies on this host dial it, so it needs neither token nor TLS.
    transport = Transport("", config.simulators_per_runner)
    work = _Evaluation(parts_of, episodes, config.fragment_steps, report)
    work.server = GatewayServer(transport, work, settings, work.failed)
    work.server.manager.evaluations.begin(work.episodes)
    work.server.start("127.0.0.1:0", None, False)
    curriculum.own = addresses = transport.loopbacks
    deadline = config.step_deadline_seconds
    copies = Simulators(config.simulator, addresses, 0, "", "", deadline, report, work.failed)
    work.copies = copies
    # Copies learn about the end from the server before they are killed.
    try:
        while not work.over.wait(LOOK_SECONDS):
            watch(len(work.episodes.played.returns), work.steps())
    finally:
        copies.stop_restarting()
        work.server.close("the evaluation has ended")
        copies.close()
    if work.failure is not None:
        raise work.failure
    return work.episodes.played
