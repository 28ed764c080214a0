"""RLModule: the interface of a policy and its value function."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import gymnasium
import torch

from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTION_MASK, OBSERVATIONS
from juggler.runtime.modules.distributions import DistributionSpec, distribution_for
from juggler.runtime.modules.import_by_name import found
from juggler.runtime.modules.specs import (
    Sizes,
    Spec,
    check,
    input_spec,
    output_spec,
    training_output_spec,
)

#: Columns by name (see `columns`): tensors, or trees of tensors.
Batch = Mapping[str, Any]


class RLModule(torch.nn.Module):
    """A policy as a torch module, with three forward passes.

    Every pass takes a batch with "observations" [B, ...] in the dtype of the observation space.
    For a Dict or Tuple space they are a map, with the keys "0", "1", … for a Tuple. The module
    casts them itself, because bytes are smaller to send than floats. A pass returns
    "action_dist_inputs" [B, D], "actions" [B, ...], or both. A subclass overrides `_forward`, or
    any of the three passes:

        class Linear(RLModule):
            def __init__(self, observation_space, action_space, model_config):
                super().__init__(observation_space, action_space, model_config)
                inputs = observation_space.shape[0]
                self.policy = torch.nn.Linear(inputs, self.action_distribution().inputs_size)
                self.value = torch.nn.Linear(inputs, 1)

            def _forward(self, batch):
                observations = batch["observations"].float()
                return {
                    "action_dist_inputs": self.policy(observations),
                    "values": self.value(observations).squeeze(-1),
                }

    A module with a state (`get_initial_state`) gets and returns a second dimension, time, in every
    pass: "observations" [B, T, ...], with one unbroken stretch of an episode in each row. It also
    gets "states" [B, ...] from before the first step, and returns the states after the last step.

    If the observation space is a Dict with the key "action_mask" (1: legal), illegal actions get no
    probability: "action_dist_inputs" are masked after `_forward`, in all passes.

    Six specs describe inputs and outputs of the passes, and may be overridden. They are checked in
    the first call of each pass, and in every call if `check_specs` is true.

    Two keys of `model_config` apply to every module: "distribution", which makes the
    `DistributionSpec` for the action space, and "squash", which is passed to it if true.

    If a run's key `critic_sees` gives the value function more inputs, `model_config` has the key
    "critic_space", and the batches of `forward_train` also have "critic_observations" [B, ...] of
    that space. A module that computes "values" from them sets `takes_critic_observations`, and
    lists the parts for it in `training_only`: for acting, it has neither the key nor the column.

    Set `may_act_in_numpy` if acting depends only on inputs, parameters and buffers of the module
    and its parts: no Python state, and no random numbers except its distribution's. Then the
    operations of its passes may be recorded and repeated. Shipped modules and torch's layers do
    not need it.

    Attributes:
        may_act_in_numpy: see above. A part of a catalog may also have it, for itself and its
            parts.
        takes_critic_observations: whether `forward_train` can compute values from
            "critic_observations".
        critic_space: of "critic_observations"; None: there are none.
        training_only: names of submodules and parameters that only `forward_train` needs. They are
            not sent to EnvRunners.
    """

    may_act_in_numpy: bool = False
    training_only: tuple[str, ...] = ()
    takes_critic_observations: bool = False

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space
        self.model_config = dict(model_config)
        self.critic_space: gymnasium.Space[Any] | None = model_config.get("critic_space")
        spaces = getattr(observation_space, "spaces", {})
        self._masked = isinstance(spaces, Mapping) and ACTION_MASK in spaces
        self._check_specs = False
        self._checked: set[str] = set()
        # Passes that need no wrapper: their specs were checked, and nothing is masked.
        self._bare: set[str] = set()

    @property
    def check_specs(self) -> bool:
        """Whether every call checks specs, not only the first."""
        return self._check_specs

    @check_specs.setter
    def check_specs(self, always: bool) -> None:
        self._check_specs = always
        self._bare.clear()

    def action_distribution(self) -> DistributionSpec:
        """The meaning of "action_dist_inputs"; by default the action space decides."""
        return self._action_distribution

    def get_initial_state(self) -> dict[str, Any]:
        """Return the state at an episode's start, a tree of tensors [...].

        Empty: no state.
        """
        return {}

    def forward_inference(self, batch: Batch) -> dict[str, Any]:
        """Act without exploration, in evaluation and in production."""
        if "inference" in self._bare:
            return self._forward_inference(batch)
        return self._guarded("inference", batch)

    def forward_exploration(self, batch: Batch) -> dict[str, Any]:
        """Act in training, with exploration."""
        if "exploration" in self._bare:
            return self._forward_exploration(batch)
        return self._guarded("exploration", batch)

    def forward_train(self, batch: Batch) -> dict[str, Any]:
        """Compute the inputs of the loss; an actor-critic adds "values" [B]."""
        if "train" in self._bare:
            return self._forward_train(batch)
        return self._guarded("train", batch)

    def forward(self, batch: Batch) -> dict[str, Any]:
        """Call `forward_train`: the name that `torch.func.functional_call` needs."""
        return self.forward_train(batch)

    def input_specs_inference(self) -> Spec:
        """Spec of the input of `forward_inference`; see `specs`."""
        return input_spec(self.observation_space, self.get_initial_state())

    def output_specs_inference(self) -> Spec:
        """Spec of the output of `forward_inference`."""
        return output_spec(self.action_space, self.action_distribution, self.get_initial_state())

    def input_specs_exploration(self) -> Spec:
        """Spec of the input of `forward_exploration`."""
        return input_spec(self.observation_space, self.get_initial_state())

    def output_specs_exploration(self) -> Spec:
        """Spec of the output of `forward_exploration`."""
        return output_spec(self.action_space, self.action_distribution, self.get_initial_state())

    def input_specs_train(self) -> Spec:
        """Spec of the input of `forward_train`."""
        return input_spec(self.observation_space, self.get_initial_state(), self.critic_space)

    def output_specs_train(self) -> Spec:
        """Spec of the output of `forward_train`; algorithms check their own needs."""
        return training_output_spec(
            self.action_space, self.action_distribution, self.get_initial_state()
        )

    def _forward_inference(self, batch: Batch) -> dict[str, Any]:
        return self._forward(batch)

    def _forward_exploration(self, batch: Batch) -> dict[str, Any]:
        return self._forward(batch)

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        return self._forward(batch)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        raise NotImplementedError(
            f"{type(self).__name__} must define _forward, or _forward_inference, "
            "_forward_exploration and _forward_train"
        )

    def _guarded(self, use: str, batch: Batch) -> dict[str, Any]:
        """Run a pass with specs checked and actions masked, as needed."""
        checking = self._check_specs or use not in self._checked
        name = f"forward_{use}"
        sizes: Sizes = {}  # shared between input and output
        if checking:
            spec = getattr(self, f"input_specs_{use}")()
            check(batch, spec, f"the input of {type(self).__name__}.{name}", sizes)
        outputs: dict[str, Any] = getattr(self, f"_{name}")(batch)
        if checking:
            spec = getattr(self, f"output_specs_{use}")()
            check(outputs, spec, f"the output of {type(self).__name__}.{name}", sizes)
            self._checked.add(use)
        if self._masked and ACTION_DIST_INPUTS in outputs:
            inputs = outputs[ACTION_DIST_INPUTS]  # [B, D]
            masked = self.action_distribution().mask(inputs, batch[OBSERVATIONS][ACTION_MASK])
            return {**outputs, ACTION_DIST_INPUTS: masked}
        if not (self._masked or self._check_specs):
            self._bare.add(use)
        return outputs

    @cached_property
    def _action_distribution(self) -> DistributionSpec:
        make: Any = self.model_config.get("distribution")
        if isinstance(make, str):
            make = found(make, "distribution")
        options = {"squash": True} if self.model_config.get("squash") else {}
        spec: object = (make or distribution_for)(self.action_space, **options)
        if not isinstance(spec, DistributionSpec):
            raise TypeError(
                f"distribution {self.model_config['distribution']!r} made a "
                f"{type(spec).__name__}: it must make a DistributionSpec"
            )
        return spec
