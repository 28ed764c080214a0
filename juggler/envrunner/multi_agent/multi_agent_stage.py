"""Environments with several agents, in which one or more modules act."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.evaluation import Goal, PlayedEpisodes, load_checkpoint
from juggler.envrunner.multi_agent.casting import cast
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.sampler import MultiAgentSampler
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.envrunner.multi_agent.whole_episodes import play_whole_episodes
from juggler.envrunner.paced.gathered_policy import GatheredPolicy
from juggler.envrunner.rounds import PlayedRound
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.envrunner.stage import ActingParts, OwnCode
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

    Raises:
        ValueError: the agents of the environments and of the setup do not fit.
    """

    def __init__(
        self, setup: EnvRunnerSetup, envs: MultiAgentEnvs, seed: int, own_code: OwnCode
    ) -> None:
        self._envs, self._steps = envs, setup.env_runner.fragment_steps
        self._warned = False
        self._parts: dict[str, ActingParts] = {}
        self._modules: dict[str, ModuleSlots] = {}
        for module_id, role in cast(envs, setup.agents, setup.modules).items():
            acting, spaces = setup.modules[module_id], role.spaces
            parts = ActingParts.build(
                acting, spaces.observation_space, spaces.action_space, own_code
            )
            policy = GatheredPolicy(parts.module, parts.connectors, parts.module_to_env, seed)
            self._parts[module_id] = parts
            self._modules[module_id] = ModuleSlots(
                role,
                envs.num_envs,
                envs.agents,
                policy,
                parts.connectors,
                self._steps,
                acting.row_age,
            )
        seed_process(seed)  # as it is done where everything begins anew
        self._sampler = MultiAgentSampler(envs, self._modules, self._steps, seed)

    def ready(self) -> list[training_pb2.Ready.Module]:
        return [
            self._parts[module_id].ready(module_id, slots.most_rows, self._steps)
            for module_id, slots in self._modules.items()
        ]

    def load(self, module_id: str, weights: Tree) -> None:
        self._modules[module_id].policy.load(weights)

    def set_connector_state(self, module_id: str, state: State) -> None:
        self._modules[module_id].connectors.set_state(state)

    def load_checkpoint(self, path: Path) -> Version:
        into = {
            module_id: (slots.policy, slots.connectors)
            for module_id, slots in self._modules.items()
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
        return play_whole_episodes(
            self._envs, modules, episodes, seed, watch, most_steps=most_steps, goal=goal
        )

    def close(self) -> None:
        self._envs.close()
