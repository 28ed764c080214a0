"""Games of several agents with drawn episodes and expected results.

None of them needs PettingZoo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv, VectorStep

AGENTS = ("ann", "bob", "cy")
OBSERVATION = spaces.Box(-np.inf, np.inf, (3,), np.float64)
ACTION = spaces.Box(-np.inf, np.inf, (), np.float64)
Kind = Literal["parallel", "turns", "some"]


@dataclass
class Step:
    """One step of an episode.

    Attributes:
        there: the agents before the step.
        acting: those of them that act.
        rewards: of this step.
        terminated, truncated: agents whose episode ends with it.
    """

    there: list[str]
    acting: list[str]
    rewards: dict[str, float]
    terminated: set[str] = field(default_factory=set)
    truncated: set[str] = field(default_factory=set)


Episode = list[Step]


def drawn(seed: int, kind: Kind, episodes: int = 6) -> list[Episode]:
    """Episodes with late agents, early deaths, and turns."""
    rng = np.random.default_rng(seed)
    return [_episode(rng, kind) for _ in range(episodes)]


def _episode(rng: np.random.Generator, kind: Kind) -> Episode:
    waiting = list(rng.permutation(AGENTS))
    there = [str(waiting.pop()) for _ in range(rng.integers(1, 4))]
    steps: Episode = []
    while there:
        acting = list(there)
        if kind == "turns":
            acting = [there[len(steps) % len(there)]]
        elif kind == "some":
            acting = [a for a in there if rng.random() < 0.5] or [there[0]]
        step = Step(list(there), acting, {a: float(rng.normal()) for a in there})
        for agent in list(there):
            if rng.random() < 0.2:
                how = rng.integers(3)
                if how != 1:
                    step.terminated.add(agent)
                if how != 0:
                    step.truncated.add(agent)
                there.remove(agent)
        if waiting and there and rng.random() < 0.3:
            there.append(str(waiting.pop()))
        steps.append(step)
    return steps


def shown(episode: int, step: int, agent: str) -> np.ndarray:
    """What an agent sees."""
    return np.array([episode, step, AGENTS.index(agent)], np.float64)


def answer(observation: np.ndarray) -> float:
    """The action for what an agent sees, which the games check."""
    return float(observation @ [100, 10, 1])


class _Scripted:
    possible_agents = AGENTS

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.episodes = episodes
        self.number = -1
        self.agents: list[str] = []
        self.seeds: list[int | None] = []
        self.closed = False

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return OBSERVATION

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return ACTION

    def close(self) -> None:
        self.closed = True

    def _begin(self, seed: int | None) -> None:
        self.seeds.append(seed)
        self.number += 1
        self.at = 0
        self.agents = list(self.script[0].there)

    @property
    def script(self) -> Episode:
        return self.episodes[self.number % len(self.episodes)]

    def _see(self, agent: str) -> np.ndarray:
        return shown(self.number, self.at, agent)

    def _play(self) -> Step:
        step = self.script[self.at]
        self.at += 1
        return step

    def _newcomers(self) -> list[str]:
        if self.at == len(self.script):
            return []
        return [a for a in self.script[self.at].there if a not in self.script[self.at - 1].there]


class ScriptedParallel(_Scripted):
    """A scripted game as PettingZoo's Parallel; idle agents see nothing."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self._begin(seed)
        seen = {agent: self._see(agent) for agent in self.script[0].acting}
        return {**seen, "common": "extra"}, {agent: {} for agent in seen}

    def step(self, actions: dict[str, Any]) -> Any:
        acting = self.script[self.at].acting
        assert actions == {agent: answer(self._see(agent)) for agent in acting}
        step = self._play()
        done = step.terminated | step.truncated
        before = self.agents
        self.agents = [a for a in before if a not in done] + self._newcomers()
        acts_next = self.script[self.at].acting if self.agents else []
        seen = {agent: self._see(agent) for agent in {*done, *acts_next}}
        return (
            {**seen, "common": "extra"},
            {**step.rewards, "common": 7.0},
            {agent: agent in step.terminated for agent in {*seen, *acting}},
            {agent: agent in step.truncated for agent in {*seen, *acting}},
            {agent: {} for agent in seen},
        )


class ScriptedTurns(_Scripted):
    """A scripted game as PettingZoo's AEC; finished agents come first."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self._begin(seed)
        self.seen = np.zeros(3)  # what any agent sees is written here
        self.infos: dict[str, Any] = {agent: {} for agent in AGENTS}
        self.open = dict.fromkeys(AGENTS, 0.0)
        self.terminations = dict.fromkeys(AGENTS, False)
        self.truncations = dict.fromkeys(AGENTS, False)
        self._select()

    def _see(self, agent: str) -> np.ndarray:
        self.seen[:] = super()._see(agent)
        return self.seen

    def _select(self) -> None:
        done = [a for a in self.agents if self.terminations[a] or self.truncations[a]]
        if done:
            self.agent_selection = done[0]
        elif self.agents:
            (self.agent_selection,) = self.script[self.at].acting

    def last(self) -> tuple[Any, ...]:
        agent = self.agent_selection
        ends = self.terminations[agent], self.truncations[agent]
        return self._see(agent), self.open[agent], *ends, self.infos[agent]

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            assert action is None
            self.agents.remove(agent)
        else:
            assert action == answer(self._see(agent))
            self.open[agent] = 0.0
            step = self._play()
            for each, reward in step.rewards.items():
                self.open[each] += reward
            for each in step.terminated:
                self.terminations[each] = True
            for each in step.truncated:
                self.truncations[each] = True
            self.agents += self._newcomers()
        self._select()


class ScriptedVector(MultiAgentVectorEnv):
    """Several scripted games as one vector, whose arrays are its own memory."""

    def __init__(self, num_envs: int, scripts: Sequence[Sequence[Episode]]) -> None:
        self.num_envs = num_envs
        self.agents = AGENTS
        self.observation_space, self.action_space = OBSERVATION, ACTION
        self.games = [_Scripted(episodes) for episodes in scripts]
        shape = (num_envs, len(AGENTS))
        self.seen = np.full((*shape, 3), np.nan)
        self.rewards = np.zeros(shape)
        self.terminated, self.truncated, self.acting = np.zeros((3, *shape), bool)
        self.seeds: list[int | None] = []

    def reset(self, seed: int | None, which: np.ndarray) -> Any:
        self.seeds.append(seed)
        for i in np.flatnonzero(which):
            self.games[i]._begin(None)
            self._show(i)
            self.rewards[i], self.terminated[i], self.truncated[i] = np.nan, True, True
        return self.seen, self.acting

    def step(self, actions: Any) -> VectorStep:
        for i, game in enumerate(self.games):
            for a, agent in enumerate(AGENTS):
                acts = agent in game.script[game.at].acting
                assert actions[i, a] == (answer(game._see(agent)) if acts else 0)
            step = game._play()
            self.rewards[i] = [step.rewards.get(agent, 0) for agent in AGENTS]
            self.terminated[i] = [agent in step.terminated for agent in AGENTS]
            self.truncated[i] = [agent in step.truncated for agent in AGENTS]
            self._show(i)
        return VectorStep(self.seen, self.rewards, self.terminated, self.truncated, self.acting)

    def _show(self, i: int) -> None:
        game = self.games[i]
        over = game.at == len(game.script)
        acting = [] if over else game.script[game.at].acting
        self.acting[i] = [agent in acting for agent in AGENTS]
        self.seen[i] = [game._see(agent) for agent in AGENTS]


@dataclass
class Played:
    """What one agent did in one episode of its environment.

    Attributes:
        seen: at each of its actions, and at the end.
        rewards: of each of its actions.
        terminated: None while the episode goes on.
        before: rewards before its first action.
    """

    seen: list[list[float]]
    rewards: list[float]
    terminated: bool | None = None
    before: float = 0.0


def expected(episodes: Sequence[Episode], agent: str, count: int) -> list[Played]:
    """An agent's steps in a script's first episodes, added by hand."""
    played = []
    for number in range(count):
        mine = Played([], [])
        script = episodes[number % len(episodes)]
        for at, step in enumerate(script):
            if agent in step.acting:
                mine.seen.append(shown(number, at, agent).tolist())
                mine.rewards.append(0.0)
            if mine.rewards:
                mine.rewards[-1] += step.rewards.get(agent, 0.0)
            else:
                mine.before += step.rewards.get(agent, 0.0)
            if agent in step.terminated | step.truncated:
                mine.seen.append(shown(number, at + 1, agent).tolist())
                mine.terminated = agent in step.terminated
                break
        if mine.rewards:
            played.append(mine)
    return played


def play(envs: MultiAgentEnvs, seed: int, steps: int) -> tuple[dict[int, list[Played]], list[Turn]]:
    """Play, and note what each slot did, its unfinished episode last."""
    slots = envs.num_envs * len(envs.agents)
    played: dict[int, list[Played]] = {slot: [] for slot in range(slots)}
    turns = [envs.reset(seed)]
    for _ in range(steps):
        (group,) = turns[-1].groups
        turns.append(envs.step([group.observations @ [100, 10, 1]]))
    for turn in turns:
        (group,) = turn.groups
        assert (np.diff(group.acting) > 0).all()
        assert (np.diff(group.ended) > 0).all()
        ends = zip(
            group.ended.tolist(),
            group.last_observations.tolist(),
            group.last_rewards.tolist(),
            group.terminated.tolist(),
            strict=True,
        )
        for slot, seen, reward, terminated in ends:
            mine = played[slot][-1]
            assert mine.terminated is None
            mine.seen.append(seen)
            mine.rewards.append(reward)
            mine.terminated = terminated
        acts = zip(
            group.acting.tolist(),
            group.observations.tolist(),
            group.first.tolist(),
            group.rewards.tolist(),
            strict=True,
        )
        for slot, seen, first, reward in acts:
            if first:
                assert not played[slot] or played[slot][-1].terminated is not None
                played[slot].append(Played([seen], [], before=reward))
            else:
                played[slot][-1].seen.append(seen)
                played[slot][-1].rewards.append(reward)
    return played, turns
