"""Policy: maps an environment's observations to its actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from juggler.policies.observed import Observed
from juggler.runtime.connectors.acting_graph import ActingGraph, to_onnx
from juggler.runtime.connectors.env_to_module import Contexts, EnvToModule
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS, OBSERVATIONS
from juggler.runtime.modules.distributions.categorical import Categorical
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import from_tree, to_tree, tree_map


@dataclass(frozen=True, slots=True, eq=False)
class PolicyState:
    """What a policy knows of running episodes. It is never changed."""

    rows: int | None  # N for a batch; None for a single episode
    module: Any  # [N, ...] arrays; {}: the module has no state
    contexts: Contexts  # of the last step
    chosen: Any  # [N, ...] arrays: what the module chose at the last step


class Policy:
    """A module and everything between it and an environment.

        policy = juggler.load_policy("runs/demo")
        action, state = policy.act(observation)  # an episode begins
        action, state = policy.act(observation, state)  # and goes on

    Filters use what they had learned at the checkpoint and learn nothing here. Actions are those of
    the environment that the policy was trained in: clipped, rescaled and in its dtypes.

    Args:
        module: the module, which is put into evaluation mode.
        env_to_module: connectors, with what they have learned.
        module_to_env: likewise.
        observation_space: of one environment.
        action_space: of one environment.
        seed: seed of exploration.

    Attributes:
        module: the module.
        observation_space: space of what `act` takes, including an action mask.
        action_space: space of what `act` returns.
        remembers: whether `state` makes a difference; otherwise it is None.
        uses_rewards: whether `act` needs the reward of the step before.

    Raises:
        ValueError: the spaces have action masks that do not fit the actions.
    """

    def __init__(
        self,
        module: RLModule,
        env_to_module: EnvToModule,
        module_to_env: ModuleToEnv,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        seed: int = 0,
    ) -> None:
        self.module = module.eval()
        self._acting = ArrayModule(module, shared=True)
        self.env_to_module, self.module_to_env = env_to_module, module_to_env
        self.observation_space, self.action_space = observation_space, action_space
        self.contexts = {
            name: each for name, each in env_to_module.contexts.items() if each.for_acting
        }
        self.uses_rewards = any(each.uses_rewards for each in self.contexts.values())
        self.remembers = bool(self.contexts or module.get_initial_state())
        self._observed = Observed(observation_space, action_space)
        self._generator = torch.Generator()
        self.seed(seed)

    def __repr__(self) -> str:
        module = type(self.module).__name__
        return f"Policy({module}, {self.observation_space} -> {self.action_space})"

    def seed(self, seed: int) -> None:
        """Reset the noise of exploration."""
        self._generator.manual_seed(seed)

    def act(
        self,
        observation: Any,
        state: PolicyState | None = None,
        explore: bool = False,
        *,
        reward: ArrayLike | None = None,
        mask: Any = None,
        first: ArrayLike | None = None,
    ) -> tuple[Any, PolicyState | None]:
        """The action for an observation, or the actions for a batch.

        A batch has one more dimension in front, [N, ...], in every part of the observation, as
        Gymnasium's vectors of environments give it; rows are environments.

        Args:
            observation: a value of `observation_space`, or a batch.
            state: what the last call returned; None: an episode begins (in every row).
            explore: draw the action as in training, instead of taking the most likely one.
            reward: the environment's reward for the last action; [N] for a batch. Ignored by
                policies that do not use it (see `uses_rewards`).
            mask: info["action_mask"], if the environment gives its masks there.
            first: [N], for a batch: which rows begin an episode, whatever their `state`.

        Returns:
            The action, as the environment takes it, or a batch of actions, as a vector of
                environments takes them; and the state to pass with the next observation.

        Raises:
            ValueError: an argument is invalid; says what is expected.
        """
        observations, batch = self._observed(observation, mask)  # [N, ...]
        rows = 1 if batch is None else batch
        begins = self._begins(state, batch, first)  # [N]
        contexts = self._advanced(state, rows, reward, begins)
        seen = contexts.see(self.env_to_module(observations), begins)  # [N, ...]
        chosen, memory = self._chosen(seen, state, rows, begins, explore)  # [N, ...]
        sent = self.module_to_env(tree_map(np.copy, chosen))
        after = PolicyState(batch, memory, contexts, chosen) if self.remembers else None
        return (sent if batch is not None else self._only(sent)), after

    def probabilities(self, observation: Any, *, mask: Any = None) -> NDArray[np.float32]:
        """The probability of each action where the policy explores.

        Args:
            observation: a value of `observation_space`, or a batch, as for `act`.
            mask: as for `act`.

        Returns:
            [A] for the A actions of a Discrete space, from its `start` on; [N, A] for a batch.

        Raises:
            ValueError: the policy remembers, its actions are not those of a Discrete space, or an
                argument is invalid.
        """
        if self.remembers:
            raise ValueError("the probabilities of a policy that remembers depend on its state")
        observations, batch = self._observed(observation, mask)  # [N, ...]
        seen = self.env_to_module(observations)  # [N, ...]
        with torch.inference_mode():
            outputs = self.module.forward_exploration({OBSERVATIONS: tree_map(torch.tensor, seen)})
            distribution = None
            if ACTION_DIST_INPUTS in outputs and ACTIONS not in outputs:
                distribution = self.module.action_distribution()(outputs[ACTION_DIST_INPUTS])
            if not isinstance(distribution, Categorical):
                raise ValueError(f"{self!r} has no probabilities of single actions to tell")
            probabilities: NDArray[np.float32] = distribution.log_probs.exp().numpy()  # [N, A]
        return probabilities[0] if batch is None else probabilities

    def export_onnx(self, path: str | Path) -> Path:
        """Write the policy as an ONNX model, for programs without Python or PyTorch.

        The model acts for a batch of N environments, which may be any number, as
        `act(explore=False)` does, connectors included. It keeps nothing between its calls: what
        the policy remembers goes in and out.

        Inputs, each with a leading dimension [N]:

        - "observation", or "observation/key" for each part of a Dict or Tuple, in the dtypes of
          the observation space; an action mask is the part "action_mask";
        - if the policy remembers, "first" (bool): which rows begin an episode; and "state/…": what
          the last call returned, or anything in a row that begins an episode;
        - if it uses rewards, "reward" (float32): what came for the last action.

        Outputs: "action", or "action/key" for each part, as the environment takes it; and
        "next_state/…" for each "state/…".

        Raises:
            ValueError: a connector takes no tensors, torch cannot export the module, or a package
                is missing; says which.
        """
        graph = ActingGraph(
            self.module,
            self.env_to_module,
            self.module_to_env,
            self.observation_space,
            self.action_space,
        )
        program = to_onnx(graph)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        program.save(str(path), external_data=False)
        return path

    def _begins(
        self, state: PolicyState | None, batch: int | None, first: ArrayLike | None
    ) -> NDArray[np.bool_]:
        """Which rows begin an episode [N]."""
        rows = 1 if batch is None else batch
        if not isinstance(state, PolicyState | None):
            raise ValueError(f"state must be what the last `act` returned, or None: not {state!r}")
        if state is not None and state.rows != batch:
            raise ValueError(
                f"the state is of {_sized(state.rows)}, and the observation of {_sized(batch)}"
            )
        if first is None:
            return np.full(rows, state is None)
        begins = np.array(first, np.bool_)
        if begins.shape != (batch,):
            raise ValueError(
                f"first has shape {list(begins.shape)}: expected "
                + (f"[{batch}]" if batch is not None else "none but for a batch; pass state=None")
            )
        return begins | (state is None)

    def _advanced(
        self,
        state: PolicyState | None,
        rows: int,
        reward: ArrayLike | None,
        begins: NDArray[np.bool_],
    ) -> Contexts:
        """The contexts of connectors before this step."""
        if state is None:
            return Contexts(self.contexts)
        rewards = np.zeros(rows)  # [N]
        if reward is not None:
            rewards = np.asarray(reward, np.float64).reshape(-1)  # [N]
            if rewards.shape != (rows,):
                raise ValueError(f"reward has {rewards.size} numbers: expected {rows}")
        elif self.uses_rewards and not begins.all():
            users = [name for name, each in self.contexts.items() if each.uses_rewards]
            raise ValueError(
                f"connector {users[0]!r} shows the policy its last reward: pass reward="
            )
        contexts = state.contexts.copy()
        contexts.acted(state.chosen, rewards)
        return contexts

    def _chosen(
        self,
        seen: Any,
        state: PolicyState | None,
        rows: int,
        begins: NDArray[np.bool_],
        explore: bool,
    ) -> tuple[Any, Any]:
        """The module's choice [N, ...], and its state after it."""
        acting = self._acting
        memory = acting.initial_states(rows)  # [N, ...]
        if memory and state is not None:
            memory = acting.restarted(state.module, begins)  # [N, ...]
        if not explore:
            chosen, _, after = acting.infer(seen, memory)
            return chosen, after
        noise = None
        if acting.draws and acting.distribution is not None:
            noise = acting.distribution.draw_noise((rows,), self._generator).numpy()  # [N, M]
        chosen, _, after = acting.explore(seen, memory, noise)
        return chosen, after

    def _only(self, actions: Any) -> Any:
        """The only action of a batch of one."""
        tree = to_tree(self.action_space, actions)
        return from_tree(self.action_space, tree_map(_first, tree))


def _first(array: Sequence[Any]) -> Any:
    return array[0]


def _sized(rows: int | None) -> str:
    return "a single episode" if rows is None else f"a batch of {rows}"
