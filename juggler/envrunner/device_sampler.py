"""Samples batches of episodes on the device of their environments."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from juggler.envrunner.environments.accepted_vector import (
    AcceptedVector,
    on_device,
    on_host,
    with_leaves,
)
from juggler.envrunner.environments.action_masks import ObservedChoices
from juggler.envrunner.environments.autoreset import autoreset_mode
from juggler.envrunner.sampler import Sampler, refuse_late_mask
from juggler.runtime.acting.actor import Actor, Contexts
from juggler.runtime.connectors.connector import ContextConnector
from juggler.runtime.connectors.leaves import holds_masks
from juggler.runtime.connectors.pipelines import EnvToModule, ModuleToEnv
from juggler.runtime.modules.columns import CONNECTOR_STATES
from juggler.runtime.wire.structures import take, to_tree, tree_leaves, tree_map, zeros
from juggler.runtime.wire.trees import Tree


def why_on_host(
    env: VectorEnv[Any, Any, Any],
    connectors: EnvToModule,
    module_to_env: ModuleToEnv,
    device: torch.device,
) -> str:
    """Explain why steps must use the host; "": they need not."""
    if holds_masks(env.single_observation_space):
        return "action masks are checked on the host"
    if not isinstance(env, AcceptedVector):
        return "every step is recorded"
    if autoreset_mode(env) is AutoresetMode.DISABLED:
        return 'metadata["autoreset_mode"] is DISABLED: let the environments reset themselves'
    # Each connector that acts must take tensors.
    around = [*connectors.stored, *connectors.contexts.values(), *module_to_env.connectors]
    for each in around:
        if isinstance(each, ContextConnector):
            is_of_host = each.for_acting  # the learner's context is computed afterwards
        else:
            is_of_host = not each.takes_tensors
        if is_of_host:
            return f"the connector {type(each).__name__} works on the host"
    blank: Any = zeros(env.single_observation_space, (1,))  # [1, ...]
    try:
        connectors.with_numbers(on_device(blank, device), _numbers(connectors, device))
    except Exception as error:  # of a user's own connector
        return f"connectors fail there: {type(error).__name__}: {error}".partition("\n")[0]
    return ""


class DeviceSampler(Sampler):
    """A `Sampler` whose fragment stays on a device until it is complete.

    Nothing in a step waits for the device. Columns are copied to the host once per fragment.

    Args:
        env: N environments on a device, for which `why_on_host` has no reason.
        policy: explores there; its connectors learn from a whole fragment on the host.
    """

    _env: AcceptedVector

    def __init__(self, env: VectorEnv[Any, Any, Any], policy: Actor, steps: int, seed: int) -> None:
        assert policy.device is not None
        self._device, self._contexts = policy.device, Contexts(policy.connectors.contexts)
        super().__init__(env, policy, steps, seed)
        shape, space = (self._rows, steps), self._connectors.observation_space
        flags = dict.fromkeys(("terminated", "truncated"), np.zeros(shape, np.bool_))
        results = {"rewards": np.zeros(shape), **flags}
        self._results = _DeviceColumns(results, self._device)
        self._plain_steps = _DeviceColumns(zeros(self._space, shape), self._device)
        self._kept_steps = self._plain_steps
        if self._connectors.rewrites:
            self._kept_steps = _DeviceColumns(zeros(space, shape), self._device)

    def reset(self, seed: int) -> None:
        """See `Sampler`."""
        super().reset(seed)
        self._contexts.memory.trees.clear()

    def _step_through(self, seconds: dict[str, float]) -> None:
        device, clock = self._device, time.perf_counter
        observation, self._observation = self._observation, None
        columns, next_step = self._columns, self._autoreset is AutoresetMode.NEXT_STEP
        over = torch.as_tensor(self._resetting, device=device)  # [N]
        first = torch.as_tensor(self._first, device=device)  # [N]
        infos: list[dict[str, Any]] = []  # T
        firsts: list[Tensor] = []  # T x [N]
        # Copied once, since connectors learn only after the fragment.
        before, environment = clock(), 0.0
        numbers = _numbers(self._connectors, device)
        inference = clock() - before
        for t in range(self._steps):
            seen = self._plain_steps.keep(t, to_tree(self._space, observation))  # [N, ...]
            if self._connectors.rewrites:
                seen = self._kept_steps.keep(t, self._connectors.with_numbers(seen, numbers))
            # These seconds are of the host, which does not wait for the device.
            before = clock()
            sent = self._choose_for(seen, t, first)  # [N, ...]
            between = clock()
            observation, rewards, terminated, truncated, given = self._env.step(sent)
            environment += clock() - between
            inference += between - before
            kept = self._results.keep(
                t, {"rewards": rewards, "terminated": terminated, "truncated": truncated}
            )  # [N] each
            done = kept["terminated"] | kept["truncated"]  # [N]
            firsts.append(first)
            first, over = (over, done) if next_step else (done, over)
            refuse_late_mask(given)
            infos.append(_kept(given, self._rows))
        # The copies wait until the device has made all steps.
        waiting = clock()
        self._kept_steps.copy_to(columns.observations)
        flags = {"terminated": columns.terminated, "truncated": columns.truncated}
        self._results.copy_to({"rewards": columns.rewards, **flags})
        self._keep_last(observation)
        seconds.update(environment=environment + clock() - waiting, inference=inference)
        self._first = first.cpu().numpy()
        columns.states = self._states(torch.stack(firsts).cpu().numpy())
        self._learn(infos)
        self._keep_all_finals(infos)

    def _keep_all_finals(self, infos: list[dict[str, Any]]) -> None:
        """Keep the last observations of truncated episodes."""
        columns = self._columns
        for t, given in enumerate(infos):
            cut = columns.truncated[:, t] & ~columns.terminated[:, t]  # [N]
            if not len(rows := cut.nonzero()[0]):
                continue
            # The next step shows them, behind connectors.
            if self._autoreset is AutoresetMode.NEXT_STEP:
                seen = columns.seen[t + 1]  # [N, ...]
                columns.finals += [(row, t, take(seen, np.array(row))) for row in rows.tolist()]
            else:
                final = {"final_obs": on_host(given.get("final_obs"))}
                self._keep_finals(t, rows, None, final)

    def _choose_for(self, seen: Tree, t: int, first: Tensor) -> Any:
        """Choose the actions [N, ...] of step t, on the device."""
        policy = self._policy
        # The tensors stay here: nothing may wait for a step's numbers.
        with torch.no_grad():
            acted = policy.act(seen, first=first, keep=t == 0)  # [N, ...]
        # A row's states are the ones before its first step.
        if t == 0:
            self._columns.states = policy.states_before()
        self._columns.add(acted)
        return acted.sent

    def _learn(self, infos: list[dict[str, Any]]) -> None:
        """Let connectors and metrics watch the fragment, now on the host."""
        done = self._columns.terminated | self._columns.truncated  # [N, T]
        for t, given in enumerate(_numbers_on_host(infos)):
            if given:
                self._infos.see(given, t, done[:, t])
        choices = ObservedChoices(self._space, "a fragment")
        if self._connectors.learns or (self._connectors.rewrites and choices):
            plain: Any = zeros(self._space, (self._rows, self._steps))  # [N, T, ...]
            self._plain_steps.copy_to(plain)
            # Connectors cannot read values on the device.
            choices.require(plain, lambda row, step, *_: (row, step))
        if self._connectors.learns:
            for t in range(self._steps):
                self._connectors.watch(tree_map(itemgetter((slice(None), t)), plain))  # [N, ...]

    def _states(self, firsts: NDArray[np.bool_]) -> dict[str, Tree]:
        """Return the states before the fragment, with contexts of the host.

        Args:
            firsts: [T, N] whether a step begins an episode.
        """
        columns = self._columns
        states: dict[str, Tree] = on_host(columns.states)
        if not self._contexts.connectors:
            return states
        actions = on_host(columns.actions())  # [N, T, ...]
        for t in range(self._steps):
            self._contexts.see(columns.seen[t], firsts[t])
            if t == 0:
                states[CONNECTOR_STATES] = self._contexts.states()
            chosen = tree_map(itemgetter((slice(None), t)), actions)  # [N, ...]
            self._contexts.advance(chosen, columns.rewards[:, t].astype(np.float32))
        return states


class _DeviceColumns:
    """Columns of a fragment on a device, in memory that is reused.

    Args:
        like: [N, T, ...], a tree of arrays.
    """

    def __init__(self, like: Any, device: torch.device) -> None:
        def empty(leaf: NDArray[Any]) -> Tensor:
            rows, steps, *shape = leaf.shape
            dtype = torch.from_numpy(leaf[:0]).dtype
            return torch.empty((steps, rows, *shape), dtype=dtype, device=device)

        self._device = device
        self._whole = tree_map(empty, like)  # [T, N, ...]
        first = next(tree_leaves(like))[1]
        self._steps = [tree_map(itemgetter(t), self._whole) for t in range(first.shape[1])]

    def keep(self, t: int, given: Any) -> Any:
        """Keep and return the values [N, ...] of step t."""
        device = self._device
        tree_map(
            lambda into, x: into.copy_(torch.as_tensor(x, device=device)), self._steps[t], given
        )
        return self._steps[t]

    def copy_to(self, arrays: Any) -> None:
        """Copy the fragment into arrays [N, T, ...]."""

        def copy(column: NDArray[Any], by_step: Tensor) -> None:
            torch.from_numpy(column).copy_(by_step.transpose(0, 1))

        tree_map(copy, arrays, self._whole)


def _numbers(connectors: EnvToModule, device: torch.device) -> dict[str, Tensor]:
    """Copy what connectors have learned to the device."""
    return {name: torch.from_numpy(x).to(device) for name, x in connectors.numbers().items()}


def _kept(infos: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Copy the used parts of a step's infos.

    These are numbers [N] by environment, and the last observations of episodes.
    """
    kept: dict[str, Any] = {}
    for name, given in infos.items():
        if name == "final_obs":
            kept[name] = with_leaves(
                lambda x: x.clone() if isinstance(x, Tensor) else deepcopy(x), given
            )
        elif name == "final_info" and isinstance(given, Mapping):
            kept[name] = _kept(given, rows)
        elif isinstance(given, Tensor) and given.shape == (rows,):
            kept[name] = given.clone()  # [N]
    return kept


def _numbers_on_host(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copy the tensors in T infos to arrays, without last observations.

    Each name is copied once for all steps.
    """
    found: dict[tuple[str, ...], list[tuple[int, Tensor]]] = defaultdict(list)
    for t, infos in enumerate(given):
        for path, value in tree_leaves(infos):
            if path[0] != "final_obs":
                found[path].append((t, value))
    numbers: list[dict[str, Any]] = [{} for _ in given]
    for (*within, name), values in found.items():
        arrays = torch.stack([value for _, value in values]).cpu().numpy()  # [T', N]
        for (t, _), array in zip(values, arrays, strict=True):
            inner = numbers[t]
            for key in within:
                inner = inner.setdefault(key, {})
            inner[name] = array
    return numbers
