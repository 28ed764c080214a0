"""An update with a user's own algorithm, before a run begins, to find errors in its loss."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium import Space
from gymnasium.vector import VectorEnv

from juggler.driver.config import RunConfig
from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.finiteness import NonFinite
from juggler.envrunner.multi_agent.casting import cast
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.sampler import MultiAgentSampler
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.envrunner.sampler import Sampler
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.learner import Learner
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.nearest import all_of

_ROUNDS = 10  # until every module should have acted
_MORE_SECONDS = 5.0  # to sample as many steps as an update of the run has


@dataclass(frozen=True, slots=True)
class Built:
    """What stands between the environment and the weights of a module.

    Attributes:
        config: of the module.
        module: its class or factory, or its name.
        critic_space: of what its value function sees beside its agent's observation; None: nothing.
    """

    config: RunConfig
    module: Any
    env_to_module: EnvToModule
    module_to_env: ModuleToEnv
    learner: Learner
    critic_space: Space[Any] | None

    def acting(self) -> RLModule:
        """A module as EnvRunners have it."""
        return build_module(
            self.module,
            self.env_to_module.module_observation_space,
            self.module_to_env.action_space,
            self.config.module.model,
            distribution=self.config.module.distribution,
        )

    def try_update(self, batch: EpisodeBatch, more: Iterator[EpisodeBatch | None]) -> str:
        """Make an update -> what people should know of it; "": nothing.

        Args:
            batch: to learn from. Its numbers are finite, as those of all batches are.
            more: what each further round brings; None: the module has not acted in it. A loss may
                be finite only with several rows, as one is that divides by a deviation over rows;
                so another update is made where the first one is not, if there is more in time.

        Raises:
            ValueError: the gradient of the loss is not finite, with several batches either.
        """
        self.learner.try_out()
        made = self._updated([batch])
        if _not_finite(made):
            batches = [batch, *self._further(batch.live_steps, more)]
            if len(batches) == 1:
                return ""  # a run may give an update more rows, with which it is finite
            made = self._updated(batches)
            if odd := _not_finite(made):
                raise ValueError(
                    f"algorithm {self.config.learner.algorithm!r}: in an update from "
                    f"{_live(batches)} steps, all of whose numbers are finite, {odd}. No update "
                    "with such a loss changes anything: look for a logarithm or a root of 0, or a "
                    "division by 0"
                )
        if made is not None or self.learner.kept_rows() != 0:
            return ""
        return (
            f"algorithm = {self.config.learner.algorithm!r}: `rows` of its replay kept none of the "
            f"{int(batch.live.sum())} steps of a fragment. If it never keeps any, nothing is ever "
            "learned"
        )

    def _further(self, live: int, more: Iterator[EpisodeBatch | None]) -> Iterator[EpisodeBatch]:
        """Yield the batches of a further round, and of others until there are as many live steps as
        an update of the run has; or what there is in time."""
        end = time.monotonic() + _MORE_SECONDS
        for batch in more:
            if batch is not None:
                live += batch.live_steps
                yield batch
            if live >= self.config.learner.batch_size or time.monotonic() >= end:
                return

    def _updated(self, batches: Sequence[EpisodeBatch]) -> Mapping[str, float] | None:
        """The metrics of an update; None: the core's source of data gives nothing yet."""
        return fetch_metrics(self.learner.update_from_episodes(batches)) or None


def can_be_tried(config: RunConfig) -> bool:
    """Whether one module acts for each agent in every episode, and all are trained."""
    return not config.others and all(len(ids) == 1 for ids in config.played_by.values())


def rounds_of_batches(
    config: RunConfig, env: VectorEnvironment | MultiAgentEnvs, built: Mapping[str, Built]
) -> Iterator[dict[str, EpisodeBatch]]:
    """Yield, again and again, what an EnvRunner with this environment would send to the learner of
    each module.

    A module is missing if none of its agents acts in a few rounds.
    """
    steps = config.env_runner.fragment_steps
    if isinstance(env, VectorEnv):
        alone = sampler(built[DEFAULT_MODULE], env, steps)
        while True:
            yield {DEFAULT_MODULE: alone.sample((0, 0)).batch}
    slots = acting_slots(config, env, built, steps)
    games = MultiAgentSampler(env, slots, steps, 0)
    while True:
        yield _sampled(games, slots)


def sampler(built: Built, env: VectorEnvironment, steps: int) -> Sampler:
    """What an EnvRunner samples fragments of so many steps with, where there is one agent."""
    shape = env.num_envs, steps
    policy = Actor(built.acting(), *shape, 0, built.module_to_env, built.env_to_module)
    return Sampler(env, policy, steps, 0)


def acting_slots(
    config: RunConfig, envs: MultiAgentEnvs, built: Mapping[str, Built], steps: int
) -> dict[str, ModuleSlots]:
    """What acts in rounds of so many steps, by module id, if the run `can_be_tried`."""
    modules = {}
    for module_id, role in cast(envs, config.played_by, config.module_ids).items():
        each = built[module_id]
        modules[module_id] = ModuleSlots(
            role,
            envs.num_envs,
            envs.agents,
            Actor(each.acting(), 1, 0, 0, each.module_to_env, each.env_to_module),
            each.env_to_module,
            steps,
            0,
            each.config.module.critic_sees,
            each.critic_space,
        )
    return modules


def _sampled(
    games: MultiAgentSampler, modules: Mapping[str, ModuleSlots]
) -> dict[str, EpisodeBatch]:
    """The next batch of each module."""
    versions = dict.fromkeys(modules, Version(0, 0))
    batches: dict[str, EpisodeBatch] = {}
    for _ in range(_ROUNDS):
        for module_id, result in games.sample(modules.keys(), versions).modules.items():
            if isinstance(result, NonFinite):
                raise result
            if result.batch is not None:
                batches.setdefault(module_id, result.batch)
        if len(batches) == len(modules):
            break
    return batches


def _not_finite(made: Mapping[str, float] | None) -> str:
    """The metrics of an update that are not finite, for people, if no step of the optimizer had a
    finite gradient; "": one had."""
    if made is None or made.get("skipped") != 1.0:
        return ""
    return all_of(f"{name} is {made[name]}" for name in made if not math.isfinite(made[name]))


def _live(batches: Sequence[EpisodeBatch]) -> int:
    return sum(batch.live_steps for batch in batches)
