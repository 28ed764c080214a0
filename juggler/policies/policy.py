"""Policy, a trained module with its connectors, loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from google.protobuf.json_format import ParseDict
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from juggler.envrunner.environments.action_masks import LegalActions, find_non_binary, read_masks
from juggler.runtime.acting.acting_graph import ActingGraph, to_onnx
from juggler.runtime.acting.actor import Actor
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read_or_warn
from juggler.runtime.checkpoints.weights import acting_arrays, module_in
from juggler.runtime.connectors.config import ConnectorsConfig, own_connectors
from juggler.runtime.connectors.leaves import OBSERVATION, holds_masks
from juggler.runtime.connectors.mergeable_state import connector_state
from juggler.runtime.connectors.pipelines import (
    EnvToModule,
    ModuleToEnv,
    OwnClasses,
    build_runner_pipelines,
)
from juggler.runtime.modules.acting_part import (
    acting_names,
    load_weights,
    strip_to_acting,
    weights_of,
)
from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTION_MASK, ACTIONS, OBSERVATIONS
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.modules.distributions.for_space import Categorical
from juggler.runtime.modules.import_by_name import must_be_given_again
from juggler.runtime.modules.module_specs import ModuleFactory, build_module
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.structures import choices_of, from_tree, to_tree, tree_map
from juggler.runtime.wire.trees import Path as TreePath
from juggler.runtime.wire.trees import path_name
from juggler.runtime.wire.v1 import spaces_pb2

Space = gymnasium.Space[Any]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyState:
    """The memory of a policy in running episodes; immutable."""

    rows: int | None  # N for a batch; None for a single episode
    memory: Mapping[str, Any]  # trees [N, ...] by name, as in `RowMemory`


class Policy:
    """A module and everything between it and an environment.

        policy = juggler.load_policy("runs/demo")
        action, state = policy.act(observation)  # an episode begins
        action, state = policy.act(observation, state)  # and continues

    Filters use their state from the checkpoint and learn nothing here. Actions are in the form of
    the training environment: clipped, rescaled and in its dtypes.

    Args:
        module: the module; put into evaluation mode.
        env_to_module: connectors, with their state.
        module_to_env: connectors for actions.
        observation_space: of one environment.
        action_space: of one environment.
        seed: seed of exploration.

    Attributes:
        module: the module.
        observation_space: space of the observations for `act`, including an action mask.
        action_space: space of the actions from `act`.
        remembers: whether `state` matters; otherwise it is None.
        uses_rewards: whether `act` needs the reward of the last step.

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
        self.env_to_module, self.module_to_env = env_to_module, module_to_env
        self.observation_space, self.action_space = observation_space, action_space
        seen = env_to_module.acting_part()
        self.contexts = seen.contexts
        self.uses_rewards = any(each.uses_rewards for each in self.contexts.values())
        self._actor = Actor(module, 1, 1, seed, module_to_env, seen, shared=True)
        self.remembers = self._actor.remembers
        self._observed = Observed(observation_space, action_space)

    def __repr__(self) -> str:
        module = type(self.module).__name__
        return f"Policy({module}, {self.observation_space} -> {self.action_space})"

    def seed(self, seed: int) -> None:
        """Reset the noise of exploration."""
        self._actor.seed(seed)

    def actor(self) -> Actor:
        """Return an actor with this module and noise, and its own memory."""
        return self._actor.with_memory({})

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
        """Return the action for an observation, or the actions for a batch.

        A batch has one more dimension in front, [N, ...], in every part of the observation, as in
        Gymnasium's vector environments; rows are environments.

        Args:
            observation: a value of `observation_space`, or a batch.
            state: the state from the last call; None: an episode begins (in every row).
            explore: draw the action as in training, instead of taking the most likely one.
            reward: the environment's reward for the last action; [N] for a batch. Ignored by
                policies that do not use it (see `uses_rewards`).
            mask: info["action_mask"], if the environment's masks are there.
            first: [N], for a batch: whether each row begins an episode; its `state` is then
                ignored.

        Returns:
            The action for the environment, or a batch of actions for a vector of environments; and
                the state to pass with the next observation.

        Raises:
            ValueError: an argument is invalid; names the expected form.
        """
        observations, batch = self._observed(observation, mask)  # [N, ...]
        begins = self._begins(state, batch, first)  # [N]
        actor = self._actor.with_memory({} if state is None else state.memory)
        if state is not None:
            actor.rewarded(self._rewards(reward, begins))
        seen = self.env_to_module(observations)  # [N, ...]
        sent = actor.act(seen, first=begins, explore=explore, keep=False).sent  # [N, ...]
        after = PolicyState(batch, actor.memory.trees) if self.remembers else None
        return (sent if batch is not None else self._only(sent)), after

    def probabilities(self, observation: Any, *, mask: Any = None) -> NDArray[np.float32]:
        """Return the probability of each action during exploration.

        Args:
            observation: a value of `observation_space`, or a batch, as for `act`.
            mask: as for `act`.

        Returns:
            [A] for the A actions of a Discrete space, starting at `start`; [N, A] for a batch.

        Raises:
            ValueError: the policy remembers, its action space is not Discrete, or an argument is
                invalid.
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
                raise ValueError(f"{self!r} has no probabilities of single actions")
            probabilities: NDArray[np.float32] = distribution.log_probs.exp().numpy()  # [N, A]
        return probabilities[0] if batch is None else probabilities

    def export_onnx(self, path: str | Path) -> Path:
        """Write an ONNX model, for programs without Python or PyTorch.

        The model acts for a batch of any number N of environments, like `act(explore=False)`,
        including connectors. It has no memory: states are inputs and outputs.

        Inputs, each with a leading dimension [N]:

        - "observation", or "observation/key" for each part of a Dict or Tuple, in the dtypes of
          the observation space; an action mask is the part "action_mask";
        - if the policy remembers, "first" (bool): whether each row begins an episode; and
          "state/…": the states from the last call, or any values in a row that begins an episode;
        - if it uses rewards, "reward" (float32): the reward of the last action.

        Outputs: "action", or "action/key" for each part, for the environment; and "next_state/…"
        for each "state/…".

        Raises:
            ValueError: a connector takes no tensors, torch cannot export the module, or a package
                is missing; names it.
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
        """Return a mask [N] of rows that begin an episode."""
        rows = 1 if batch is None else batch
        if not isinstance(state, PolicyState | None):
            raise ValueError(f"state must come from the last `act`, or be None: not {state!r}")
        if state is not None and state.rows != batch:
            raise ValueError(
                f"the state is of {_sized(state.rows)}, and the observation of {_sized(batch)}"
            )
        if first is None:
            return np.full(rows, state is None)
        # A single episode begins with state=None, and takes no mask.
        begins = np.array(first, np.bool_)
        if begins.shape != (batch,):
            raise ValueError(
                f"first has shape {list(begins.shape)}: expected "
                + (f"[{batch}]" if batch is not None else "it only for a batch; pass state=None")
            )
        return begins | (state is None)

    def _rewards(self, reward: ArrayLike | None, begins: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the rewards [N] of the last step."""
        rows = len(begins)
        if reward is not None:
            rewards = np.asarray(reward, np.float64).reshape(-1)  # [N]
            if rewards.shape != (rows,):
                raise ValueError(f"reward has {rewards.size} numbers: expected {rows}")
            return rewards
        if self.uses_rewards and not begins.all():
            users = [name for name, each in self.contexts.items() if each.uses_rewards]
            raise ValueError(
                f"connector {users[0]!r} shows the policy its last reward: pass reward="
            )
        return np.zeros(rows)

    def _only(self, actions: Any) -> Any:
        """Return the only action of a batch of one."""
        tree = to_tree(self.action_space, actions)
        return from_tree(self.action_space, tree_map(lambda array: array[0], tree))


def _sized(rows: int | None) -> str:
    return "a single episode" if rows is None else f"a batch of {rows}"


class Observed:
    """Reads single observations of a space, or batches.

    They are distinguished by the number of dimensions: every part of a batch has one more in front.

    Args:
        space: space of one observation.
        action_space: space of one action of the environment.

    Raises:
        ValueError: the space has action masks that do not fit the actions.
    """

    def __init__(self, space: Space, action_space: Space) -> None:
        self._space, self._action_space = space, action_space
        self._legal = LegalActions.of(space, action_space)

    def __call__(self, observation: Any, mask: Any) -> tuple[Any, int | None]:
        """Read an observation or a batch.

        Args:
            observation: a value of the space, or a batch as in vector environments.
            mask: infos["action_mask"], if the observation does not contain it; or None.

        Returns:
            A tree of newly allocated arrays [N, ...] in the dtypes of the space; and N, or None for
                a single observation, whose tree is a batch of one.

        Raises:
            ValueError: the observation is not in the space; names the expected form.
        """
        if mask is not None:
            observation = self._with_mask(observation, mask)
        found: dict[TreePath, tuple[int, ...]] = {}  # the leading dimension of each leaf, if any
        tree = _read(self._space, observation, (), found)
        # All parts of an observation must agree whether it is a batch.
        leading = set(found.values())
        if len(leading) > 1:
            raise ValueError(
                "the parts of an observation belong to batches of different sizes: "
                + ", ".join(f"{path_name(path)} {list(n) or 'none'}" for path, n in found.items())
            )
        (shape,) = leading
        batch = tree if shape else tree_map(lambda array: array[None], tree)  # [N, ...]
        if self._legal is not None:
            _require_zeros_and_ones(batch[ACTION_MASK], shape)
            self._require_legal(batch[ACTION_MASK])
        return batch, shape[0] if shape else None

    def _with_mask(self, observation: Any, mask: Any) -> dict[str, Any]:
        """Add the mask from an environment's infos, like a run."""
        if not isinstance(self._space, spaces.Dict) or not holds_masks(self._space):
            raise ValueError("mask: this policy's environment gave no action masks; leave it out")
        # An observation that is not a Dict gets its own key.
        keys = self._space.spaces.keys() - {ACTION_MASK}
        by_key = isinstance(observation, Mapping) and (
            keys != {OBSERVATION} or OBSERVATION in observation
        )
        children = dict(observation) if by_key else {OBSERVATION: observation}
        plain = spaces.Dict({key: self._space[key] for key in keys})
        found: dict[TreePath, tuple[int, ...]] = {}
        _read(plain, children, (), found)
        shape = next(iter(found.values()))
        # Infos of a vector have one mask for each environment.
        given, rows = (mask, shape[0]) if shape else ([mask], 1)
        _require_rows(given, rows)
        try:
            masks = read_masks(self._action_space, given, np.arange(rows))  # [N, n]
        except (IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"mask: expected info['action_mask'] of the environment, not {mask!r}"
            ) from error
        _require_zeros_and_ones(masks, shape)  # before they are cast to the dtype of the space
        legal = tree_map(lambda mask: (mask if shape else mask[0]) != 0, masks)  # [N, n] or [n]
        return {**children, ACTION_MASK: legal}

    def _require_legal(self, masks: Any) -> None:
        assert self._legal is not None
        for path, legal in self._legal.has_legal_action(masks):
            if not legal.all():
                which = f" for {path_name(path)}" if path else ""
                row = f" in row {int(legal.argmin())}" if len(legal) > 1 else ""
                raise ValueError(
                    f"the action mask has no legal action{which}{row}: after an episode's end, do "
                    "not ask for an action, or give a mask of ones"
                )


def _require_rows(given: Any, rows: int, where: str = "") -> None:
    """Raise ValueError unless masks have this many rows."""
    if isinstance(given, Mapping):
        for key, masks in given.items():
            _require_rows(masks, rows, f" at {key}")
    elif isinstance(given, Sized) and len(given) != rows:
        raise ValueError(f"mask: there are {len(given)} masks{where} for {rows} observations")


def _require_zeros_and_ones(masks: Any, batch: tuple[int, ...]) -> None:
    """Raise ValueError unless masks [N, ...] are zeros and ones.

    `batch` is (N,), or () for a single observation.
    """
    if found := find_non_binary(masks):
        (row, *_), what = found
        raise ValueError(f"{what}, in row {row}" if batch else what)


def _read(space: Space, value: Any, path: TreePath, found: dict[TreePath, tuple[int, ...]]) -> Any:
    """Convert a value to a tree of arrays; note leading dimensions."""
    where = f" at {path_name(path)}" if path else ""
    is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)
    if not path and not isinstance(space, spaces.Tuple) and is_pair:
        raise ValueError(
            "the observation is a pair with a dict, such as the (observation, info) of reset: pass "
            "only the observation"
        )
    # Gymnasium's own check names neither the key nor a remedy.
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            raise ValueError(f"the observation{where} must be a Dict, as {space}, not {value!r}")
        # A missing mask has a remedy of its own.
        if value.keys() != space.spaces.keys():
            hint = ""
            if ACTION_MASK in space.spaces and ACTION_MASK not in value:
                hint = ": if the environment gives masks in its infos, pass mask="
            raise ValueError(
                f"the observation{where} has the keys {sorted(map(str, value))}, not "
                f"{sorted(space.spaces)}{hint}"
            )
        parts = [(key, child, value[key]) for key, child in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            raise ValueError(
                f"the observation{where} must be a tuple of {len(space.spaces)} parts, as {space}, "
                f"not {value!r}"
            )
        # Trees have the keys "0", "1", … for a Tuple.
        parts = [(str(i), child, value[i]) for i, child in enumerate(space.spaces)]
    else:
        array = _leaf(space, value, path)
        found[path] = array.shape[: array.ndim - len(space.shape or ())]
        return array
    return {key: _read(child, part, (*path, key), found) for key, child, part in parts}


def _leaf(space: Space, value: Any, path: TreePath) -> NDArray[Any]:
    where = f" at {path_name(path)}" if path else ""
    dtype, shape = np.dtype(space.dtype), tuple(space.shape or ())
    if isinstance(value, Mapping):
        raise ValueError(
            f"the observation{where} is a map with the keys {sorted(map(str, value))}: expected an "
            f"array, as {space}"
        )
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"the observation{where} is not an array: {error}") from error
    # One more dimension in front is a batch of environments.
    extra = array.ndim - len(shape)
    if extra not in (0, 1) or array.shape[extra:] != shape or 0 in array.shape[:extra]:
        raise ValueError(
            f"the observation{where} has shape {list(array.shape)}: expected {list(shape)}, or "
            f"{['N', *shape]} for a batch".replace("'N'", "N")
        )
    # Lists of integers become int64, which NumPy does not cast to uint8.
    whole = {array.dtype.kind, dtype.kind} <= {"i", "u"}
    if not (whole or np.can_cast(array.dtype, dtype, "same_kind")):
        raise ValueError(f"the observation{where} is {array.dtype}: expected {dtype}")
    # A copy, because environments may write the next observation into the same memory.
    copied = array.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(copied).all():
        raise ValueError(f"the observation{where} has numbers that are not finite")
    if whole and dtype != array.dtype and (copied != array).any():
        raise ValueError(f"the observation{where} has numbers beyond {dtype}")
    # Masks are checked elsewhere, with messages of their own.
    for choice in choices_of([(path, space)]) if path[:1] != (ACTION_MASK,) else ():
        if (found := choice.outside(array)) is not None:
            raise ValueError(f"the observation{choice.describe(array[found])}")
    return copied


def load_policy(
    checkpoint: str | Path,
    *,
    module_id: str | None = None,
    module: str | Callable[..., Any] | None = None,
    connectors: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Policy:
    """Load the policy in a checkpoint, including its connectors.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest good checkpoint is used, with a
            warning if it is not the newest. A run's directory `best` has the best checkpoint.
        module_id: one of the run's modules, trained or not; None: the only trained module.
        module: the class that the run trained, if it cannot be imported by name.
        connectors: the module's connectors again, if some of their classes cannot be imported by
            name.
        seed: seed of exploration.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it has no such module, or
            several and none is named.
        ValueError: a part of the run cannot be built here; names it and a remedy. Or the
            checkpoint is None.
    """
    saved = read_or_warn(checkpoint)
    if isinstance(module, str) and ":" not in module:
        raise ValueError(
            f"module = {module!r}: expected a class, as 'package.module:Class'; for the module of "
            f"this id, pass module_id={module!r}"
        )
    saved, module_id = module_in(saved, module_id)
    # Classes of a script cannot be imported here by their names in the configuration.
    keys: dict[str, Any] = {} if connectors is None else {"connectors": connectors}
    own = own_connectors(keys)
    config = {**saved.config_of(module_id), **keys}
    # A checkpoint writes None as a word.
    known = {key.name for key in fields(ModuleConfig)} & config.keys()
    named_keys: dict[str, Any] = {k: None if config[k] == "none" else config[k] for k in known}
    named = ModuleConfig(**named_keys)
    if isinstance(module, str):
        named.module = module
    pipelines = ConnectorsConfig.parse(config.get("connectors", {}))
    # A checkpoint has only spaces that can be encoded.
    if (spaces := spaces_of(saved, module_id)) is None:
        raise CheckpointError(
            saved.path or Path(),
            "does not have the spaces of its environment, because one has no encoding: play it "
            "with juggler evaluate",
        )
    factory = module if callable(module) else None
    parts = restore_parts(saved, named, pipelines, *spaces, module_id, factory, own)
    return Policy(*parts, *spaces, seed)


def restore_parts(
    saved: Checkpoint,
    config: ModuleConfig,
    connectors: ConnectorsConfig,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    module_id: str,
    factory: ModuleFactory | None,
    own: OwnClasses,
) -> tuple[RLModule, EnvToModule, ModuleToEnv]:
    """Restore a checkpoint's module and connectors.

    Args:
        saved: the checkpoint.
        config: of the module.
        connectors: of the module.
        observation_space: the environment's.
        action_space: the environment's.
        module_id: of the module in the checkpoint.
        factory: makes the module, if it cannot be imported by name.
        own: connector classes that cannot be imported by name.

    Raises:
        CheckpointError: the checkpoint belongs to another module.
        ValueError: a part cannot be built; names it.
    """
    must_be_given_again("module", config.module, factory)
    connectors.must_be_given_again(own, ("env_to_module", "module_to_env"))
    env_to_module, module_to_env = build_runner_pipelines(
        connectors, observation_space, action_space, own
    )
    # The module sees observations after the connectors, as in training.
    module = build_module(
        factory or config.module,
        env_to_module.module_observation_space,
        module_to_env.action_space,
        config.model,
        distribution=config.distribution,
        check_specs=config.check_specs,
    )
    # Weights only fit the same module, so its errors come first.
    private_critic = config.critic_sees != "observation"
    here = observation_space, action_space
    _restore_weights(saved, module_id, module, here, private_critic=private_critic)
    try:
        if learned := connector_state(saved, module_id):
            env_to_module.set_state(learned)
    except ValueError as error:
        raise CheckpointError(saved.path or Path("in memory"), str(error)) from error
    return module, env_to_module, module_to_env


def _restore_weights(
    saved: Checkpoint,
    module_id: str,
    module: RLModule,
    here: tuple[Space, Space],
    *,
    private_critic: bool,
) -> None:
    """Load the weights for acting into a module for these spaces.

    Raises:
        CheckpointError: the checkpoint belongs to another module.
    """
    try:
        state: Any = saved.tree[module_id]
        weights = acting_arrays(state)
        if private_critic:
            # Its value function has inputs that acting does not have.
            strip_to_acting(module)
            weights = {name: weights[name] for name in acting_names(module)}
        load_weights(weights_of(module), weights)
    except (KeyError, TypeError, ValueError) as error:
        where = saved.path or Path("in memory")
        if (there := spaces_of(saved, module_id)) is not None and there != here:
            raise CheckpointError(
                where,
                f"was trained in another environment: its observation space is {there[0]} and its "
                f"action space {there[1]}, but here they are {here[0]} and {here[1]}",
            ) from error
        fit = "does not fit this environment and configuration"
        raise CheckpointError(where, f"{fit}: {error}") from error


def spaces_of(
    saved: Checkpoint, module_id: str
) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]] | None:
    """Return observation and action space of a module's agents; None: not saved."""
    if not (spaces := saved.spaces_of(module_id)):
        return None
    observation, action = (
        space_from_message(ParseDict(spaces[key], spaces_pb2.Space()))
        for key in ("observation", "action")
    )
    return observation, action
