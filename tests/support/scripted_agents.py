"""Scripted environments with several agents, their log, and samplers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from juggler.envrunner.multi_agent.line_up import LineUps, cast
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.multi_agent_stage import MultiAgentSampler
from juggler.envrunner.multi_agent.turns import AgentGroup, GroupTurn, MultiAgentEnvs, Turn
from juggler.envrunner.rounds import TrainedResult
from juggler.envrunner.setup import may_play
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.rl_module import RLModule
from support.episode_views import episodes_of

THREE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
FOUR = spaces.Box(-np.inf, np.inf, (4,), np.float32)


@dataclass
class Happening:
    """What one environment step brings.

    Attributes:
        acts: agents that act next.
        rewards: by agent, whether it acted or not.
        ends: by agent, "terminated", "truncated" or "both".
        over: the episode of the environment.
    """

    acts: list[str]
    rewards: dict[str, float] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    over: bool = False


#: From the environment, its episode and the step in it, to what happens; step 0 is the reset.
Script = Callable[[int, int, int], Happening]


@dataclass
class LoggedEpisode:
    """One episode of one agent, as the environment saw it.

    Attributes:
        observations: at each action, and at the end if it ended.
        at: environment steps, over all episodes, before each action.
        actions: what came.
        given: environment step and reward, for every reward.
        end: "terminated", "truncated", "both"; "": still running.
        before: rewards before the first action.
    """

    observations: list[np.ndarray] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    given: list[tuple[int, float]] = field(default_factory=list)
    end: str = ""
    before: float = 0.0

    def rewards(self) -> list[float]:
        """By action, the sum of rewards up to the next one."""
        borders = [*self.at[1:], float("inf")]
        return [
            sum(reward for when, reward in self.given if begin < when <= end)
            for begin, end in zip(self.at, borders, strict=True)
        ]


class ScriptedAgents:
    """N environments; observations are [slot, episode, step, ...] and zeros.

    Args:
        script: what happens.
        agents: by name, the space of its observations.

    Attributes:
        log: episodes by slot, in order; those in which an agent never acted are not there.
        closed: whether it was closed.
    """

    def __init__(self, num_envs: int, agents: dict[str, spaces.Box], script: Script) -> None:
        self.num_envs, self.agents, self._script = num_envs, tuple(agents), script
        by_space: dict[Any, list[str]] = defaultdict(list)
        for agent, space in agents.items():
            by_space[space.shape].append(agent)
        self.groups = tuple(
            AgentGroup(tuple(names), agents[names[0]], spaces.Discrete(3))
            for names in by_space.values()
        )
        self.critic_spaces: dict[str, spaces.Space[Any]] = {}
        self._spaces = agents
        self.closed = False
        self.reset(0)

    def reset(self, seed: int) -> Turn:
        self.log: dict[int, list[LoggedEpisode]] = defaultdict(list)
        self._now = [0] * self.num_envs  # environment steps over all episodes
        self._episode, self._step = [0] * self.num_envs, [0] * self.num_envs
        self._acting: list[list[str]] = []
        self._running: dict[int, LoggedEpisode] = {}
        self._pending: dict[int, float] = defaultdict(float)  # rewards since the last action
        self._returns = [0.0] * self.num_envs
        self._agent_returns: dict[int, float] = defaultdict(float)  # by slot
        self._acted: set[int] = set()
        books = _Books()
        for env in range(self.num_envs):
            self._acting.append(self._script(env, 0, 0).acts)
            self._show(env, books)
        return self._turn(books, list(range(self.num_envs)), [], [], [], [])

    def step(self, actions: Sequence[Any]) -> Turn:
        self._log_actions(actions)
        books, began = _Books(), []
        over: list[int] = []
        returns: list[float] = []
        lengths: list[int] = []
        agent_returns: list[list[float]] = []
        for env in range(self.num_envs):
            self._now[env] += 1
            self._step[env] += 1
            happens = self._script(env, self._episode[env], self._step[env])
            for agent, reward in happens.rewards.items():
                slot = self._slot(env, agent)
                self._returns[env] += reward
                self._agent_returns[slot] += reward
                if slot in self._running:
                    self._running[slot].given.append((self._now[env], reward))
                    self._pending[slot] += reward
            for agent, end in happens.ends.items():
                self._end(self._slot(env, agent), end, books)
            self._acting[env] = happens.acts
            if happens.over:
                assert not any(self._slot(env, agent) in self._running for agent in self.agents)
                over.append(env)
                returns.append(self._returns[env])
                lengths.append(self._step[env])
                slots = [self._slot(env, agent) for agent in self.agents]
                got = [self._agent_returns.pop(slot, 0.0) for slot in slots]
                acted = [slot in self._acted for slot in slots]
                agent_returns.append(
                    [each if a else math.nan for each, a in zip(got, acted, strict=True)]
                )
                self._acted.difference_update(slots)
                self._episode[env] += 1
                self._step[env], self._returns[env] = 0, 0.0
                began.append(env)
                self._acting[env] = self._script(env, self._episode[env], 0).acts
            self._show(env, books)
        return self._turn(books, began, over, returns, lengths, agent_returns)

    def returns(self) -> Any:
        slots = range(self.num_envs * len(self.agents))
        each = np.array([self._agent_returns.get(slot, 0.0) for slot in slots])  # [N * A]
        return np.array(self._returns), each.reshape(self.num_envs, -1)

    def overdue(self, steps: int) -> str:
        return ""

    def close(self) -> None:
        self.closed = True

    def observation(self, slot: int, episode: int, step: int) -> np.ndarray:
        space = self._spaces[self.agents[slot % len(self.agents)]]
        seen = np.zeros(space.shape, np.float32)
        seen[:3] = slot, episode, step
        return seen

    def _slot(self, env: int, agent: str) -> int:
        return env * len(self.agents) + self.agents.index(agent)

    def _log_actions(self, actions: Sequence[Any]) -> None:
        for group, given in zip(self.groups, actions, strict=True):
            at = 0
            for env in range(self.num_envs):
                for agent in group.agents:
                    if agent in self._acting[env]:
                        slot = self._slot(env, agent)
                        episode = self._running[slot]
                        episode.actions.append(int(given[at]))
                        at += 1
            assert at == len(given)

    def _show(self, env: int, books: _Books) -> None:
        for agent in sorted(self._acting[env], key=self.agents.index):
            slot = self._slot(env, agent)
            first = slot not in self._running
            if first:
                self._running[slot] = LoggedEpisode(before=self._agent_returns[slot])
                self.log[slot].append(self._running[slot])
                self._acted.add(slot)
            episode = self._running[slot]
            seen = self.observation(slot, len(self.log[slot]) - 1, len(episode.at))
            episode.observations.append(seen)
            episode.at.append(self._now[env])
            books.acting[slot] = seen, first, 0.0 if first else self._pending[slot]
            self._pending[slot] = 0.0

    def _end(self, slot: int, end: str, books: _Books) -> None:
        if slot not in self._running:
            return
        episode = self._running.pop(slot)
        last = self.observation(slot, len(self.log[slot]) - 1, len(episode.at))
        episode.observations.append(last)
        episode.end = end
        books.ended[slot] = last, self._pending[slot], end != "truncated"
        self._pending[slot] = 0.0

    def _turn(
        self,
        books: _Books,
        began: list[int],
        over: list[int],
        returns: list[float],
        lengths: list[int],
        agent_returns: list[list[float]],
    ) -> Turn:
        groups = []
        for group in self.groups:
            mine = [self.agents.index(agent) for agent in group.agents]
            shape = self._spaces[group.agents[0]].shape
            acting = [slot for slot in sorted(books.acting) if slot % len(self.agents) in mine]
            ended = [slot for slot in sorted(books.ended) if slot % len(self.agents) in mine]
            shown = [books.acting[slot] for slot in acting]
            lasts = [books.ended[slot] for slot in ended]
            groups.append(
                GroupTurn(
                    acting=np.array(acting, np.intp),
                    observations=np.array([each[0] for each in shown], np.float32).reshape(
                        -1, *shape
                    ),
                    first=np.array([each[1] for each in shown], np.bool_),
                    rewards=np.array([each[2] for each in shown], np.float64),
                    ended=np.array(ended, np.intp),
                    last_observations=np.array([each[0] for each in lasts], np.float32).reshape(
                        -1, *shape
                    ),
                    last_rewards=np.array([each[1] for each in lasts], np.float64),
                    terminated=np.array([each[2] for each in lasts], np.bool_),
                )
            )
        return Turn(
            tuple(groups),
            np.array(began, np.intp),
            np.array(over, np.intp),
            np.array(returns, np.float64),
            np.array(lengths, np.intp),
            np.array(agent_returns, np.float64).reshape(-1, len(self.agents)),
        )


class _Books:
    """What is told at the end of a step, by slot."""

    def __init__(self) -> None:
        self.acting: dict[int, tuple[np.ndarray, bool, float]] = {}
        self.ended: dict[int, tuple[np.ndarray, float, bool]] = {}


def in_turn(agents: Sequence[str], length: int) -> Script:
    """Agents in turn; the last move gives +1, others get -1."""

    def script(env: int, episode: int, step: int) -> Happening:
        if step == length + env:
            mover = agents[(step - 1) % len(agents)]
            rewards = {agent: 1.0 if agent == mover else -1.0 for agent in agents}
            return Happening([], rewards, dict.fromkeys(agents, "terminated"), over=True)
        return Happening([agents[step % len(agents)]], dict.fromkeys(agents, 0.25 * step))

    return script


def at_random(agents: Sequence[str], seed: int) -> Script:
    """Any agents act, get rewards, and die; episodes end in any way."""
    known: dict[tuple[int, int, int], Happening] = {}

    def script(env: int, episode: int, step: int) -> Happening:
        if (env, episode, step) not in known:
            known[env, episode, step] = _drawn(env, episode, step)
        return known[env, episode, step]

    def _drawn(env: int, episode: int, step: int) -> Happening:
        rng = np.random.default_rng((seed, env, episode, step))
        dead = {a for s in range(1, step) for a in script(env, episode, s).ends}
        alive = [agent for agent in agents if agent not in dead]
        if step == 0:
            return Happening([agent for agent in alive if rng.random() < 0.7] or alive[:1])
        rewards = {a: float(rng.integers(-8, 9)) / 4 for a in alive if rng.random() < 0.8}
        kinds = ("terminated", "truncated", "both")
        ends = {a: str(rng.choice(kinds)) for a in alive if rng.random() < 0.12}
        left = [agent for agent in alive if agent not in ends]
        if not left or rng.random() < 0.08:
            rest = str(rng.choice(kinds))
            return Happening([], rewards, {a: ends.get(a, rest) for a in alive}, over=True)
        acts = [agent for agent in left if rng.random() < 0.6] or left[:1]
        return Happening(acts, rewards, ends)

    return script


AGENTS = ("red", "green", "blue")


def random_world(seed: int, num_envs: int = 3) -> ScriptedAgents:
    shown = {"red": THREE, "green": THREE, "blue": FOUR}
    return ScriptedAgents(num_envs, shown, at_random(AGENTS, seed))


TWO_MODULES = {"red": "reds", "green": "reds", "blue": "blues"}


class Remembering(RLModule):
    """Its state is a decaying sum of observations, used in outputs."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space, {})
        self.register_buffer("unused", torch.zeros(1))

    def get_initial_state(self) -> Any:
        return {"sum": torch.full((3,), 0.5)}

    def _forward(self, batch: Any) -> Any:
        seen = batch["observations"][..., :3]  # [B, T, 3]
        total, sums = batch["states"]["sum"], []
        for t in range(seen.shape[1]):
            total = 0.5 * total + seen[:, t]  # [B, 3]
            sums.append(total)
        outputs = torch.stack(sums, 1)  # [B, T, 3]
        return {"action_dist_inputs": torch.sin(outputs), "states": {"sum": total}}


class Forgetful(RLModule):
    """Its outputs depend on the observation alone."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space, {})
        self.register_buffer("unused", torch.zeros(1))

    def _forward(self, batch: Any) -> Any:
        seen = batch["observations"]  # [B, ...], or a Dict with a mask
        seen = seen["observation"] if isinstance(seen, dict) else seen
        return {"action_dist_inputs": torch.sin(seen[..., :3])}


class Scaled(RLModule):
    """Has one weight, `scale`, and deterministically chooses the action of that number."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any = None) -> None:
        super().__init__(observation_space, action_space, model_config or {})
        self.scale = torch.nn.Parameter(torch.zeros(()))

    def _forward(self, batch: Any) -> Any:
        seen = batch["observations"]  # [B, ...]
        chosen = (self.scale.round().long() % 3).expand(len(seen))  # [B]
        return {"action_dist_inputs": 20.0 * torch.nn.functional.one_hot(chosen, 3).float()}


class Halves(Scaled):
    """Chooses each of two actions half of the time."""

    def _forward(self, batch: Any) -> Any:
        return {"action_dist_inputs": torch.zeros(len(batch["observations"]), 2)}


def sampler_of(
    envs: MultiAgentEnvs,
    played_by: Mapping[str, str | Sequence[str]],
    steps: int,
    row_age: int = 1000,
    module: type[RLModule] = Forgetful,
    connectors: dict[str, Any] | None = None,
    seed: int = 3,
    line_ups: LineUps | None = None,
    critic_sees: str = "observation",
) -> MultiAgentSampler:
    ids = list(dict.fromkeys(each for said in played_by.values() for each in may_play(said)))
    modules = {}
    for module_id, role in cast(envs, played_by, ids).items():
        spaces = role.spaces
        env_to_module, module_to_env = build_runner_pipelines(
            ConnectorsConfig.parse(connectors or {}), spaces.observation_space, spaces.action_space
        )
        built = module(env_to_module.module_observation_space, module_to_env.action_space)
        policy = Actor(built, 1, 0, 0, module_to_env, env_to_module)
        modules[module_id] = ModuleSlots(
            role,
            envs.num_envs,
            envs.agents,
            policy,
            steps,
            row_age,
            critic_sees,
            envs.critic_spaces.get(critic_sees),
        )
    return MultiAgentSampler(envs, modules, steps, seed, line_ups)


class Collected:
    """What came of many rounds, by module."""

    def __init__(self, sampler: MultiAgentSampler) -> None:
        self.sampler = sampler
        self.batches: dict[str, list[EpisodeBatch]] = defaultdict(list)
        self.ended: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.env_ended: list[tuple[float, int]] = []
        self.stale: dict[str, int] = defaultdict(int)

    def play(self, *collected: str, update: int = 0) -> dict[str, TrainedResult]:
        versions = {module_id: Version(1, update) for module_id in self.sampler._modules}
        played = self.sampler.sample(set(collected), versions)
        assert set(played.modules) == set(collected)
        for module_id, result in played.modules.items():
            assert isinstance(result, TrainedResult), result
            if result.batch is not None:
                EpisodeBatch.from_tree(result.batch.to_tree())  # as the learner checks it
                self.batches[module_id].append(result.batch)
            self.ended[module_id] += zip(
                result.episode_returns, result.episode_lengths, strict=True
            )
            self.stale[module_id] += result.stale_steps
        self.env_ended += zip(played.env_returns, played.env_lengths, strict=True)
        return dict(played.modules)  # type: ignore[arg-type]


def by_slot(batches: list[EpisodeBatch]) -> dict[tuple[int, int], list[tuple[Any, ...]]]:
    """Live steps by (slot, episode), in the order of batches."""
    found: dict[tuple[int, int], list[tuple[Any, ...]]] = defaultdict(list)
    for batch in batches:
        for row in sorted(episodes_of(batch), key=lambda each: each.offset):
            observations: Any = row.observations
            for t in range(len(row)):
                last = t == len(row) - 1
                slot, episode, step = observations[t][:3].astype(int).tolist()
                assert step == row.offset + t
                after = row.last_observation if last else observations[t + 1]
                found[slot, episode].append(
                    (
                        step,
                        int(np.asarray(row.actions)[t]),
                        float(row.rewards[t]),
                        row.terminated and last,
                        row.truncated and last,
                        np.asarray(after),
                    )
                )
    return found
