"""Environments with one agent, in which one module acts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from gymnasium.vector import VectorEnv

from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.device_sampler import DeviceSampler, why_on_host
from juggler.envrunner.environments.accepted_vector import tensors_on
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.evaluation import Goal, PlayedEpisodes, evaluate, load_trees
from juggler.envrunner.rounds import PlayedRound, TrainedResult
from juggler.envrunner.sampler import NonFiniteBatch, Sampler
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.envrunner.stage import ActingParts, Stage, UserCode
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


class SingleAgentStage(Stage):
    """A vector of environments with one agent each.

    Args:
        setup: names one module.
        env: N environments.
        seed: of this worker.
        own_code: may be used in the setup.
    """

    def __init__(
        self,
        setup: EnvRunnerSetup,
        env: VectorEnv[Any, Any, Any],
        seed: int,
        own_code: UserCode,
    ) -> None:
        ((self._module_id, acting),) = setup.modules.items()
        if seen := setup.critics_see:
            raise ValueError(
                f"critic_sees = {seen[0]!r}: the environment has one agent, whose value function "
                "sees its observation; leave it out"
            )
        self._env, self._steps = env, setup.env_runner.fragment_steps
        observation_space, action_space = env.single_observation_space, env.single_action_space
        self._parts = ActingParts.build(acting, observation_space, action_space, own_code)
        module, module_to_env = self._parts.module, self._parts.module_to_env
        connectors = self._parts.connectors
        self._notes: list[training_pb2.Note] = []
        # On the host if anything around the environments needs arrays.
        device = tensors_on(env)
        if device and (why := why_on_host(env, connectors, module_to_env, device)):
            text = f"each step of the environments is copied from {device} to the host: {why}"
            self._notes = [training_pb2.Note(text=text, warning=False)]
            device = None
        shape = env.num_envs, self._steps
        self._policy = Actor(module, *shape, seed, module_to_env, connectors, device=device)
        self._policy.require_log_probabilities()
        seed_process(seed)  # as in every fresh start
        make_sampler = Sampler if device is None else DeviceSampler
        self._sampler = make_sampler(env, self._policy, self._steps, seed)

    def ready(self) -> list[training_pb2.Ready.Module]:
        return [self._parts.ready(self._module_id, self._env.num_envs, self._steps)]

    def load(self, module_id: str, weights: Tree) -> None:
        self._policy.load(self._parts.as_here(weights))

    def set_connector_state(self, module_id: str, state: State) -> None:
        self._parts.connectors.set_state(state)

    def load_trees(self, trees: Mapping[str, Tree]) -> None:
        load_trees(trees, {self._module_id: (self._policy, self._parts.connectors)})

    def reset(self, seed: int) -> None:
        seed_process(seed)
        self._sampler.reset(seed)

    def play(self, recorded: Collection[str], versions: Mapping[str, Version]) -> PlayedRound:
        version = versions[self._module_id]
        try:
            fragment = self._sampler.sample(version)
        except NonFiniteBatch as error:
            return PlayedRound({self._module_id: error}, {})
        # Returns in a data set are not returns of the trained policy.
        plays = not isinstance(self._env, RecordedEnvs)
        result = TrainedResult(
            fragment.batch,
            version,
            fragment.episode_returns if plays else [],
            fragment.episode_lengths if plays else [],
            fragment.connector_delta,
        )
        notes, self._notes = [*self._notes, *self._policy.take_notes()], []
        recorded = {self._module_id: result}
        return PlayedRound(recorded, fragment.seconds, notes=notes, infos=fragment.infos)

    def evaluate(
        self,
        episodes: int,
        seed: int,
        watch: Callable[[int, int], None],
        *,
        most_steps: int,
        goal: Goal | None,
    ) -> PlayedEpisodes:
        return evaluate(
            self._env,
            self._policy,
            episodes,
            seed,
            watch,
            most_steps=most_steps,
            goal=goal,
        )

    def close(self) -> None:
        self._env.close()
