"""The sampling of several agents in each environment, compared with that of single agents.

Samplers run in this process alone, without gRPC and without a learner, and act with the default
module. All of them take turns, and time is CPU time, since other work may run. "Beside the
environments" is the time that a sampler spends outside the environments' methods, as a share of the
time inside them. "Dead" is the share of steps in batches that only fill up rows.

With the first weights of a run, poles fall after some 20 steps, and agents whose pole has fallen
wait for the others: some 40 of 64 act in a step. With weights that balance, nearly all of them act,
as they do in a run that has learned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from commands import machine, table

from juggler.envrunner.cartpoles import CartPoles
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.multi_agent.games import GamesInTurn, ParallelGame, TurnBasedGame
from juggler.envrunner.multi_agent.line_up import cast
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.multi_agent_stage import MultiAgentSampler
from juggler.envrunner.multi_agent.pettingzoo_games import find_game, native
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.envrunner.multi_agent.vector_turns import VectorTurns
from juggler.envrunner.rounds import TrainedResult
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import RLModule

STEPS = 32
ROW_AGE = 4


class Clock:
    """The time that environments take for themselves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, env: Any) -> Any:
        """Time the methods of an environment from now on."""
        for name in ("reset", "step", "last"):
            if hasattr(env, name):
                setattr(env, name, self._timed(getattr(env, name)))
        return env

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            result = method(*args, **kwargs)
            self.seconds += time.process_time() - began
            return result

        return timed


#: Plays a round and returns how many steps were collected, and how many their batches have.
Play = Callable[[], tuple[int, int]]


def module_for(spaces: tuple[Any, Any], balances: bool) -> RLModule:
    """The default module, with its first weights or with some that balance CartPole's pole."""
    module = build_module(ModuleConfig().module, *spaces, {})
    if balances:
        weights = dict(module.named_parameters())
        with torch.no_grad():
            for weight in weights.values():
                weight.zero_()
            # One unit of each layer sees which way the pole falls: the same work as with others.
            weights["encoder.0.weight"][0] = torch.tensor([0.02, 0.06, 0.6, 0.2])
            weights["encoder.2.weight"][0, 0] = 1.0
            weights["policy_head.weight"][:, 0] = torch.tensor([-200.0, 200.0])
    return module


def single_agents(clock: Clock, balances: bool = False) -> Play:
    config = EnvRunnerConfig(env="CartPole-v1", envs_per_runner=64, fragment_steps=STEPS)
    env = make_vector_env(config)
    spaces = env.single_observation_space, env.single_action_space
    connectors, to_env = build_runner_pipelines(ConnectorsConfig.parse({}), *spaces)
    policy = Actor(module_for(spaces, balances), 64, STEPS, 0, to_env, connectors)
    sampler = Sampler(clock.watch(env), policy, STEPS, 0)

    def play() -> tuple[int, int]:
        batch = sampler.sample((0, 0)).batch
        return batch.live_steps, batch.live.size

    return play


def several_agents(envs: MultiAgentEnvs, modules: int, balances: bool = False) -> Play:
    """The agents are shared out evenly among modules."""
    names = [f"module_{m}" for m in range(modules)]
    count = len(envs.agents)
    played_by = {agent: names[i * modules // count] for i, agent in enumerate(envs.agents)}
    players = {}
    for name, role in cast(envs, played_by, names).items():
        spaces = role.spaces.observation_space, role.spaces.action_space
        connectors, to_env = build_runner_pipelines(ConnectorsConfig.parse({}), *spaces)
        policy = Actor(module_for(spaces, balances), 1, 0, 0, to_env, connectors)
        players[name] = ModuleSlots(role, envs.num_envs, envs.agents, policy, STEPS, ROW_AGE)
    sampler = MultiAgentSampler(envs, players, STEPS, 0)
    versions = dict.fromkeys(names, Version(0, 0))

    def play() -> tuple[int, int]:
        steps, room = 0, 0
        for collected in sampler.sample(names, versions).modules.values():
            assert isinstance(collected, TrainedResult)
            if collected.batch is not None:
                steps, room = steps + collected.batch.live_steps, room + collected.batch.live.size
        return steps, room

    return play


def cartpoles(clock: Clock, modules: int, balances: bool = False) -> Play:
    envs = VectorTurns(clock.watch(CartPoles(16, 4)), "CartPoles")
    return several_agents(envs, modules, balances)


def games(clock: Clock, name: str) -> Play:
    made = [clock.watch(native(find_game(name)())) for _ in range(16)]
    kind = TurnBasedGame if hasattr(made[0], "last") else ParallelGame
    return several_agents(GamesInTurn([kind(env, i) for i, env in enumerate(made)], name), 1)


SINGLE = "CartPole, 64 × 1"
BALANCING = ", balancing"
CASES: dict[str, Callable[[Clock], Play]] = {
    SINGLE: single_agents,
    SINGLE + BALANCING: lambda clock: single_agents(clock, True),
    "CartPoles, 16 × 4, one module" + BALANCING: lambda clock: cartpoles(clock, 1, True),
    "CartPoles, 16 × 4, two modules" + BALANCING: lambda clock: cartpoles(clock, 2, True),
    "CartPoles, 16 × 4, one module": lambda clock: cartpoles(clock, 1),
    "CartPoles, 16 × 4, two modules": lambda clock: cartpoles(clock, 2),
    "connect_four_v3, 16": lambda clock: games(clock, "pettingzoo:classic/connect_four_v3"),
    "simple_spread_v3, 16": lambda clock: games(clock, "pettingzoo:mpe2/simple_spread_v3"),
}


def turn(play: Play, clock: Clock, seconds: float) -> tuple[float, float, float]:
    """Play for some seconds -> (steps per second, time beside the environments, dead steps)."""
    steps, room, clock.seconds = 0, 0, 0.0
    began, over = time.process_time(), time.perf_counter() + seconds
    while time.perf_counter() < over:
        made, places = play()
        steps, room = steps + made, room + places
    taken = time.process_time() - began
    return steps / taken, taken / clock.seconds - 1, 1 - steps / room if room else 0.0


def base(name: str) -> str:
    """The case of single agents with which a case is compared."""
    return SINGLE + BALANCING if name.endswith(BALANCING) else SINGLE


def spread(values: list[float], form: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} - {high:{form}})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clocks = {name: Clock() for name in CASES}
    plays = {name: make(clocks[name]) for name, make in CASES.items()}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CASES}
    for at in range(1 + given.turns):
        for name, play in plays.items():
            measured = turn(play, clocks[name], given.seconds)
            if at:  # the first turn warms up
                found[name].append(measured)
    rates = {name: [rate for rate, *_ in each] for name, each in found.items()}
    rows = [
        [
            name,
            spread(rates[name], ",.0f"),
            spread(
                [mine / other for mine, other in zip(rates[name], rates[base(name)], strict=True)],
                ".2f",
            ),
            spread([beside for _, beside, _ in found[name]], ".2f"),
            spread([dead for *_, dead in found[name]], ".2%"),
        ]
        for name in CASES
    ]
    print(machine())
    head = ["", "steps/s", "of 64 × 1", "beside the environments", "dead"]
    print(table("Several agents", head, rows))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
