"""The policy that acted in a data set."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from juggler.envrunner.behaviour_policy import BehaviourPolicy
from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.modules.columns import MODULE_STATE
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import tree_map, zeros
from juggler.runtime.wire.trees import Tree


class RecordedPolicy(BehaviourPolicy):
    """Chooses what was recorded. Nobody knows the log-probabilities: they are 0.

    The module itself only keeps its recurrent state, if it has one.

    Args:
        envs: play the data set again.
        module: as in `BehaviourPolicy`.
        steps: likewise.
        seed: likewise.
        module_to_env: maps the policy's actions to the environment's, and back.

    Raises:
        ValueError: a connector of actions cannot map them back.
    """

    def __init__(
        self,
        envs: RecordedEnvs,
        module: RLModule,
        steps: int,
        seed: int,
        module_to_env: ModuleToEnv,
    ) -> None:
        super().__init__(module, envs.num_envs, steps, seed, module_to_env)
        self._envs, self._undo = envs, module_to_env.undo
        self._undo(zeros(envs.single_action_space, (envs.num_envs,)))  # or say why not

    def act(self, observations: Any, step: int, first: NDArray[np.bool_] | None = None) -> Any:
        if self.remembers:
            super().act(observations, step, first)  # for the state after this observation
            self._actions.pop()
        self.chosen = self._undo(self._envs.actions)  # [N, ...]
        self._actions.append(self.chosen)
        return self._envs.actions

    def finish(self) -> tuple[Tree, NDArray[np.float32], dict[str, Tree]]:
        actions: Tree = tree_map(lambda *steps: np.stack(steps, 1), *self._actions)  # [N, T, ...]
        states = {MODULE_STATE: self._row_state} if self.remembers else {}
        return actions, np.zeros((self._rows, self._steps), np.float32), states


def policy_in(
    env: VectorEnv[Any, Any, Any],
    module: RLModule,
    steps: int,
    seed: int,
    module_to_env: ModuleToEnv,
) -> BehaviourPolicy:
    """What acts in environments: the module, or what was recorded there. See `BehaviourPolicy`."""
    if isinstance(env, RecordedEnvs):
        return RecordedPolicy(env, module, steps, seed, module_to_env)
    return BehaviourPolicy(module, env.num_envs, steps, seed, module_to_env)
