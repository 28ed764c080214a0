"""Environments with several agents, in which one or more modules act."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from juggler.envrunner.environments.seeding import module_seeds, seed_process
from juggler.envrunner.evaluation import Goal, PlayedEpisodes, load_checkpoint
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.multi_agent.casting import Role, cast, random_roles
from juggler.envrunner.multi_agent.line_up import line_ups_of
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.sampler import MultiAgentSampler
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.envrunner.multi_agent.whole_episodes import play_whole_episodes
from juggler.envrunner.paced.gathered_policy import GatheredPolicy
from juggler.envrunner.rounds import PlayedRound
from juggler.envrunner.setup import RANDOM, EnvRunnerSetup
from juggler.envrunner.stage import ActingParts, OwnCode
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

_VERY_LONG = 5000  # steps of an environment


class MultiAgentStage:
    """N environments with several agents each.

    Args:
        setup: names the module of each agent.
        envs: the environments.
        seed: of this worker.
        own_code: may be used in the setup.
        frozen: what modules play with that are not trained.

    Raises:
        ValueError: the agents of the environments and of the setup do not fit, or what a module
            plays with is not what the setup says.
    """

    def __init__(
        self,
        setup: EnvRunnerSetup,
        envs: MultiAgentEnvs,
        seed: int,
        own_code: OwnCode,
        frozen: FrozenWeights,
    ) -> None:
        self._envs, self._steps = envs, setup.env_runner.fragment_steps
        self._warned = False
        self._parts: dict[str, ActingParts] = {}  # of the modules that are trained
        self._policies: dict[str, GatheredPolicy] = {}  # likewise
        self._modules: dict[str, ModuleSlots] = {}  # all that act
        for module_id, role in cast(envs, setup.agents, setup.modules).items():
            acting, spaces = setup.modules[module_id], role.spaces
            parts = ActingParts.build(
                acting, spaces.observation_space, spaces.action_space, own_code
            )
            policy = GatheredPolicy(parts.module, parts.connectors, parts.module_to_env, seed)
            if acting.digest:
                frozen.load(module_id, acting.digest, policy, parts.connectors)
            else:
                self._parts[module_id], self._policies[module_id] = parts, policy
            # What is not trained has no use for what its critic saw.
            sees = "observation" if acting.digest else acting.module.critic_sees
            slots = self._slots(role, policy, parts.connectors, acting.row_age, sees)
            self._modules[module_id] = slots
        for role in random_roles(envs, setup.agents):
            self._modules[f"{RANDOM}:{role.group}"] = ModuleSlots.at_random(
                role, envs.num_envs, envs.agents, self._steps, seed
            )
        self._line_ups = line_ups_of(envs.agents, setup.agents, setup.mapping, own_code.classes)
        seed_process(seed)  # as it is done where everything begins anew
        self._sampler = MultiAgentSampler(envs, self._modules, self._steps, seed, self._line_ups)

    def _slots(
        self,
        role: Role,
        policy: GatheredPolicy,
        connectors: EnvToModule,
        row_age: int,
        critic_sees: str,
    ) -> ModuleSlots:
        envs = self._envs
        return ModuleSlots(
            role,
            envs.num_envs,
            envs.agents,
            policy,
            connectors,
            self._steps,
            row_age,
            critic_sees,
            envs.critic_spaces.get(critic_sees),
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

    def load(self, module_id: str, weights: Tree) -> None:
        self._policies[module_id].load(weights)

    def set_connector_state(self, module_id: str, state: State) -> None:
        self._modules[module_id].connectors.set_state(state)

    def load_checkpoint(self, path: Path) -> Version:
        into = {
            module_id: (policy, self._modules[module_id].connectors)
            for module_id, policy in self._policies.items()
        }
        return load_checkpoint(path, into)

    def reset(self, seed: int) -> None:
        seed_process(seed)
        self._sampler.reset(seed)

    def play(self, recorded: Collection[str], versions: Mapping[str, Version]) -> PlayedRound:
        played = self._sampler.sample(recorded, versions)
        return played if self._warned else self._looked_over(played)

    def _looked_over(self, played: PlayedRound) -> PlayedRound:
        """A round, perhaps with a warning. There is one at most: what it says stays true."""
        warning = self._envs.overdue(_VERY_LONG)
        self._warned = bool(warning)
        return replace(played, warning=warning)

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
            slots.policy.seed(own)  # the module that plays at random draws here too
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
