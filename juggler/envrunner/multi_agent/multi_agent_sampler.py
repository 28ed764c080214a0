"""Samples rounds from environments with several agents and modules."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from juggler.envrunner.agent_returns import AgentReturns, add_returns
from juggler.envrunner.environments.seeding import module_seeds
from juggler.envrunner.finiteness import NonFiniteBatch, check_return
from juggler.envrunner.multi_agent.agent_infos import AgentInfos
from juggler.envrunner.multi_agent.line_up import LineUps
from juggler.envrunner.multi_agent.module_slots import ModuleSlots, merged_actions
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
from juggler.envrunner.rounds import FrozenResult, PlayedRound, TrainedResult
from juggler.runtime.episodes.version import Version


class MultiAgentSampler:
    """Steps N environments in which modules act, and records their steps.

    Each agent fills rows of T steps at its own pace. Rows and episodes continue from one round to
    the next.

    Args:
        envs: N environments.
        modules: the modules that act, by module id; together they play all agents. The roles of a
            module with several may have any names.
        steps: environment steps of a round.
        seed: of the environments, of the policies' noise, and of line-ups.
        line_ups: decides which modules play each episode; None: each module always plays its
            agents.

    Raises:
        EnvironmentFailed: here, in `reset` or in `sample`.
    """

    def __init__(
        self,
        envs: MultiAgentEnvs,
        modules: Mapping[str, ModuleSlots],
        steps: int,
        seed: int,
        line_ups: LineUps | None = None,
    ) -> None:
        self._line_ups = line_ups
        self._envs, self._modules, self._steps = envs, dict(modules), steps
        self._infos = AgentInfos(envs.num_envs, envs.agents, steps)
        self._turn: Turn | None = None
        self._taken = False  # the modules have recorded the last turn
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Restart with this seed; running episodes and rows are dropped."""
        seeds = module_seeds(seed, len(self._modules))
        for slots, own in zip(self._modules.values(), seeds, strict=True):
            slots.policy.seed(own)
            slots.forget()
        if self._line_ups is not None:
            self._line_ups.reset(seed)
        self._infos.restart()
        self._turn, self._taken = self._envs.reset(seed), False

    def add(self, module_id: str, slots: ModuleSlots) -> None:
        """Let another module be in line-ups from now on."""
        slots.deactivate()
        self._modules[module_id] = slots

    def remove(self, module_id: str) -> None:
        """Remove a module that no running episode has."""
        del self._modules[module_id]

    def sample(self, recorded: Collection[str], versions: Mapping[str, Version]) -> PlayedRound:
        """Play one round.

        Args:
            recorded: ids of the modules whose steps are recorded.
            versions: of the weights of each module that is trained. Other modules only play.

        Raises:
            EnvironmentFailed: an environment failed.
            NonFiniteBatch: an agent of a module that only plays got a reward that is not finite.
            LineUpError: an episode has no line-up.
            RuntimeError: the last round failed or lost steps, and `reset` was not called.
        """
        started = time.perf_counter()
        turn, self._turn = self._turn, None
        if turn is None:
            raise RuntimeError("the last round failed half-way: call reset first")
        seconds: dict[str, float] = defaultdict(float)
        env_returns: list[float] = []
        env_lengths: list[int] = []
        environments: list[int] = []  # of these episodes
        for module_id, version in versions.items():
            self._modules[module_id].begin(version)
        agent_returns: AgentReturns = {}
        if not self._taken:
            self._process(turn, recorded)
            self._taken = True
        for t in range(self._steps):
            before = time.perf_counter()
            actions = self._act(turn, recorded)
            between = time.perf_counter()
            turn = self._envs.step(actions)
            seconds["inference"] += between - before
            seconds["environment"] += time.perf_counter() - between
            self._infos.see(turn, t)
            if len(turn.over):
                add_returns(agent_returns, self._envs.agents, turn.agent_returns)
                environments += turn.over.tolist()
                env_returns += turn.env_returns.tolist()
                env_lengths += turn.env_lengths.tolist()
                if self._line_ups is not None:
                    self._line_ups.ended(turn.over, turn.agent_returns, turn.env_lengths)
            self._process(turn, recorded)
        finishing = time.perf_counter()
        infos = self._infos.advance()
        results: dict[str, TrainedResult | NonFiniteBatch] = {}
        others: dict[str, FrozenResult] = {}
        for module_id, slots in self._modules.items():
            if module_id in recorded:
                results[module_id] = slots.result()
            elif module_id in versions:
                slots.skip()
            else:
                others.setdefault(slots.role.module_id, FrozenResult()).add(slots.played())
        if any(isinstance(result, NonFiniteBatch) for result in results.values()):
            env_returns, env_lengths, agent_returns, infos = [], [], {}, {}
        else:
            # These also sum rewards that no recorded step has.
            for environment, total in zip(environments, env_returns, strict=True):
                check_return(environment, total)
            self._turn = turn
        seconds["frames"] = time.perf_counter() - finishing
        seconds["connectors"] = time.perf_counter() - started - sum(seconds.values())
        ended = env_returns, env_lengths, others, agent_returns
        return PlayedRound(results, seconds, *ended, infos=infos)

    def _process(self, turn: Turn, recorded: Collection[str]) -> None:
        line_up = None
        if self._line_ups is not None and len(turn.began):
            line_up = self._line_ups.begin(turn.began)
        for module_id, slots in self._modules.items():
            if line_up is None and not slots.is_seated:
                continue
            critic = turn.critics.get(slots.critic_sees)
            group = turn.groups[slots.role.group]
            slots.receive(group, module_id in recorded, line_up, critic)

    def _act(self, turn: Turn, recorded: Collection[str]) -> list[Any]:
        """Return the actions of all agents that act next, by group."""
        parts: list[list[tuple[ModuleSlots, Any]]] = [[] for _ in turn.groups]
        for module_id, slots in self._modules.items():
            if len(slots.acting):
                acted = slots.act(module_id in recorded)
                parts[slots.role.group].append((slots, acted))
        groups = zip(turn.groups, self._envs.groups, parts, strict=True)
        return [merged_actions(turn, group.action_space, part) for turn, group, part in groups]
