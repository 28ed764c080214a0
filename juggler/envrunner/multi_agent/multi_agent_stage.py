"""Environments with several agents, in which one or more modules act."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from juggler.envrunner.agent_returns import add_returns, has_metrics_by_agent
from juggler.envrunner.environments.seeding import module_seeds, player_seed, seed_process
from juggler.envrunner.evaluation import Goal, PlayedEpisodes, play_whole_episodes
from juggler.envrunner.finiteness import NonFiniteBatch, check_return
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.info_numbers import AgentInfos
from juggler.envrunner.multi_agent.line_up import (
    AssignedLineUps,
    LineUps,
    Role,
    cast,
    line_ups_of,
    random_roles,
)
from juggler.envrunner.multi_agent.module_slots import ModuleSlots, merged_actions
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
from juggler.envrunner.rounds import FrozenResult, PlayedRound, TrainedResult
from juggler.envrunner.setup import RANDOM, ActingSetup, EnvRunnerSetup
from juggler.envrunner.stage import ActingParts, Stage, UserCode, refuse_league
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2


class MultiAgentSampler:
    """Steps N environments in which modules act, and collects their steps.

    Each agent fills rows of T steps at its own pace. Rows and episodes continue from one round to
    the next.

    Args:
        modules: the modules that act, by module id; together they play all agents. The roles of a
            module with several may have any names.
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
        self._envs, self._modules, self._steps = envs, modules, steps
        self._infos = AgentInfos(envs.num_envs, envs.agents, steps)
        self._turn: Turn | None = None
        self._taken = False  # the modules have received the last turn
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

    def sample(self, collected: Collection[str], versions: Mapping[str, Version]) -> PlayedRound:
        """Play one round.

        Args:
            collected: ids of the modules whose steps are collected.
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
        ended: list[tuple[NDArray[Any], ...]] = []  # of turns with which an episode ended
        for module_id, version in versions.items():
            self._modules[module_id].begin(version)
        if not self._taken:
            self._process(turn, collected)
            self._taken = True
        for t in range(self._steps):
            before = time.perf_counter()
            # Only this call is inference; `receive` counts as connectors.
            actions = self._act(turn, collected)
            between = time.perf_counter()
            turn = self._envs.step(actions)
            seconds["inference"] += between - before
            seconds["environment"] += time.perf_counter() - between
            self._infos.see(turn, t)
            if len(turn.over):
                # Not the whole turn, whose observations would fill memory until the round is over.
                ended.append((turn.over, turn.env_returns, turn.env_lengths, turn.agent_returns))
                if self._line_ups is not None:
                    self._line_ups.ended(turn.over, turn.agent_returns, turn.env_lengths)
            self._process(turn, collected)
        # Batches are made after the last step, when rows are known to be complete.
        finishing = time.perf_counter()
        infos = self._infos.advance()
        results, others = self._results(collected, versions)
        played = PlayedRound(results, seconds, others=others)
        # A round that lost steps reports no episodes, and the sampler must be reset.
        if not any(isinstance(result, NonFiniteBatch) for result in results.values()):
            # With many agents, metrics by agent would be most of the receipt.
            by_agent = has_metrics_by_agent(self._envs.agents)
            for over, env_returns, env_lengths, agent_returns in ended:
                if by_agent:
                    add_returns(played.agent_returns, self._envs.agents, agent_returns)
                played.env_returns.extend(env_returns.tolist())
                played.env_lengths.extend(env_lengths.tolist())
                # These also sum rewards that no collected step has.
                for environment, total in zip(over, env_returns, strict=True):
                    check_return(int(environment), float(total))
            played.infos.update(infos)
            self._turn = turn
        seconds["frames"] = time.perf_counter() - finishing
        seconds["connectors"] = time.perf_counter() - started - sum(seconds.values())
        return played

    def _results(
        self, collected: Collection[str], versions: Mapping[str, Version]
    ) -> tuple[dict[str, TrainedResult | NonFiniteBatch], dict[str, FrozenResult]]:
        """Return results of modules that collect, and of untrained ones."""
        results: dict[str, TrainedResult | NonFiniteBatch] = {}
        others: dict[str, FrozenResult] = {}
        for module_id, slots in self._modules.items():
            if module_id in collected:
                results[module_id] = slots.result()
            elif module_id in versions:
                slots.skip()
            else:
                others.setdefault(slots.role.module_id, FrozenResult()).add(slots.played())
        return results, others

    def _process(self, turn: Turn, collected: Collection[str]) -> None:
        line_up = None
        if self._line_ups is not None and len(turn.began):
            line_up = self._line_ups.begin(turn.began)
        for module_id, slots in self._modules.items():
            if line_up is None and not slots.is_seated:
                continue
            critic = turn.critics.get(slots.critic_sees)
            group = turn.groups[slots.role.group]
            slots.receive(group, module_id in collected, line_up, critic)

    def _act(self, turn: Turn, collected: Collection[str]) -> list[Any]:
        """Return the actions of all agents that act next, by group."""
        acted = (
            (slots, slots.act(module_id in collected))
            for module_id, slots in self._modules.items()
            if len(slots.acting)
        )
        return merged_actions(turn, self._envs.groups, acted)


_VERY_LONG = 5000  # steps of an environment


class MultiAgentStage(Stage):
    """N environments with several agents each.

    Raises:
        ValueError: the agents of the environments and of the setup do not fit, or a module's
            weights are not the ones in the setup.
    """

    def __init__(
        self,
        setup: EnvRunnerSetup,
        envs: MultiAgentEnvs,
        seed: int,
        own_code: UserCode,
        frozen: FrozenWeights,
    ) -> None:
        super().__init__()
        self._has_league = setup.league
        self._envs, self._steps = envs, setup.env_runner.fragment_steps
        self._own_code, self._frozen = own_code, frozen
        self._warned = False
        self._modules: dict[str, ModuleSlots] = {}  # all modules that act
        for module_id, role in cast(envs, setup.agents, setup.modules).items():
            self._modules[module_id] = self._built(role, setup.modules[module_id], seed)
        for role in random_roles(envs, setup.agents):
            self._modules[f"{RANDOM}:{role.group}"] = ModuleSlots.at_random(
                role, envs.num_envs, envs.agents, self._steps, seed
            )
        # A league's line-ups come with requests; all others are drawn here.
        self._league: AssignedLineUps | None = None
        self._added = 0  # number of added players
        line_ups: LineUps | None
        if setup.league:
            line_ups = self._league = AssignedLineUps(envs.agents, setup.agents)
        else:
            line_ups = line_ups_of(envs.agents, setup.agents, setup.mapping, own_code.classes)
        self._line_ups, self._seed = line_ups, seed
        seed_process(seed)  # as in every fresh start
        self._sampler = MultiAgentSampler(envs, self._modules, self._steps, seed, self._line_ups)

    def _built(self, role: Role, acting: ActingSetup, seed: int) -> ModuleSlots:
        """Build a module, with its weights if it is not trained."""
        envs, spaces, module_id = self._envs, role.spaces, role.module_id
        parts = ActingParts.build(
            acting, spaces.observation_space, spaces.action_space, self._own_code
        )
        policy = Actor(parts.module, 1, 0, seed, parts.module_to_env, parts.connectors)
        if acting.digest:
            self._frozen.load(module_id, acting.digest, policy)
        else:
            self._parts[module_id], self._policies[module_id] = parts, policy
        # A module that is not trained does not need what its critic sees.
        sees = "observation" if acting.digest else acting.module.critic_sees
        return ModuleSlots(
            role,
            envs.num_envs,
            envs.agents,
            policy,
            self._steps,
            acting.row_age,
            sees,
            envs.critic_spaces.get(sees),
        )

    def ready(self) -> list[training_pb2.Ready.Module]:
        return [
            parts.ready(
                module_id,
                self._modules[module_id].most_rows,
                self._steps,
                self._modules[module_id].critic_space,
            )
            for module_id, parts in self._parts.items()
        ]

    def reset(self, seed: int) -> None:
        seed_process(seed)
        self._sampler.reset(seed)

    def play(self, collected: Collection[str], versions: Mapping[str, Version]) -> PlayedRound:
        played = self._sampler.sample(collected, versions)
        for policy in self._policies.values():
            # Modules of the same class have the same notes.
            played.notes.extend(each for each in policy.take_notes() if each not in played.notes)
        if self._league is not None:
            played = replace(played, matches=self._league.pop_ended())
            self._forget_left(self._league)
        if not self._warned:
            self._check_overdue(played)
        return played

    def assign(self, line_ups: Iterable[training_pb2.LineUp]) -> None:
        self._of_league().assign(line_ups, self._modules)

    def add_player(self, module_id: str, acting: ActingSetup) -> None:
        self._of_league()
        if module_id in self._modules:
            raise ValueError(f"a player {module_id!r} is here already")
        (group,) = self._envs.groups  # players of a league play every agent
        role = Role(module_id, group.agents, 0, group)
        slots = self._built(role, acting, player_seed(self._seed, self._added))
        self._added += 1
        slots.deactivate()
        self._modules[module_id] = slots

    def remove_player(self, module_id: str) -> None:
        league = self._of_league()
        self._parts.pop(module_id, None)
        self._policies.pop(module_id, None)
        if module_id in self._modules:
            league.forget(module_id, next(iter(self._policies)))
            self._forget_left(league)

    def _of_league(self) -> AssignedLineUps:
        if self._league is None:
            refuse_league()
        return self._league

    def _forget_left(self, league: AssignedLineUps) -> None:
        for module_id in league.pop_left():
            del self._modules[module_id]

    def _check_overdue(self, played: PlayedRound) -> None:
        """Add a warning once, if an episode seems endless."""
        if warning := self._envs.overdue(_VERY_LONG):
            self._warned = True
            played.notes.append(training_pb2.Note(text=warning, warning=True))

    def evaluate(
        self,
        episodes: int,
        seed: int,
        watch: Callable[[int, int], None],
        *,
        most_steps: int,
        goal: Goal | None,
    ) -> PlayedEpisodes:
        modules = list(self._modules.values())
        for slots, own in zip(modules, module_seeds(seed, len(modules)), strict=True):
            slots.policy.seed(own)  # including the module that plays at random
        return play_whole_episodes(
            self._envs,
            modules,
            episodes,
            seed,
            watch,
            most_steps=most_steps,
            goal=goal,
            line_ups=self._line_ups,
        )

    def close(self) -> None:
        self._envs.close()
