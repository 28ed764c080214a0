"""The modules that ship, and the catalog that builds their parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from inspect import getmembers, isfunction
from typing import Any, Final

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from juggler.runtime.modules.columns import (
    ACTION_DIST_INPUTS,
    ACTION_MASK,
    ACTIONS,
    CRITIC_OBSERVATIONS,
    OBSERVATIONS,
    STATES,
    VALUES,
    without_mask,
)
from juggler.runtime.modules.config import ModelConfig, QNetworkConfig
from juggler.runtime.modules.distributions.base import (
    ClippedGaussianSpec,
    DistributionSpec,
    SquashedGaussianSpec,
)
from juggler.runtime.modules.distributions.for_space import distribution_for
from juggler.runtime.modules.encoders import TreeEncoder, build_encoder, feature_size
from juggler.runtime.modules.layers import MLP, DuelingHead, RecurrentCore, initialized, policy_head
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.runtime.wire.structures import first_leaf, space_leaves, tree_map


class Catalog:
    """Builds the parts of an `ActorCritic`, each in an overridable method.

        class WithMyEncoder(Catalog):
            def build_encoder(self):
                return MyEncoder(self.observation_space)  # has a `size`

    A run accepts the name of a catalog instead of a module's.

    Attributes:
        config_class: the class of `model_config`; a subclass may have its own, with more keys.
        observation_space: of the environment, or after the connectors.
        action_space: of the environment, or after the connectors.
        config: the model_config, as a `config_class`.
    """

    config_class: type[ModelConfig] = ModelConfig

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Raise ValueError for a wrong model_config, or a misspelled method."""
        _must_spell_methods(type(self))
        self.observation_space = observation_space
        self.action_space = action_space
        self.config = self.config_class.parse(model_config)

    def build_encoder(self) -> nn.Module:
        """Build a module that encodes observations [B, ...] to [B, size]."""
        return build_encoder(self.observation_space, self.config)

    def build_critic_encoder(self) -> nn.Module:
        """Build a privileged critic's encoder to features [B, size].

        Its input is a map of "observations" [B, ...] and "critic_observations" [B, ...], or trees
        of them.
        """
        assert self.config.critic_space is not None
        seen = {
            OBSERVATIONS: without_mask(self.observation_space),
            CRITIC_OBSERVATIONS: self.config.critic_space,
        }
        return build_encoder(spaces.Dict(seen), self.config)

    def build_core(self, features: int) -> nn.Module | None:
        """Build a recurrent core like `RecurrentCore`; None: no state."""
        return None if self.config.recurrent == "none" else RecurrentCore(features, self.config)

    def build_policy_head(self, features: int, distribution: DistributionSpec) -> nn.Module:
        """Build a head from features [..., F] to "action_dist_inputs" [..., D]."""
        return policy_head(features, distribution, self.config)

    def build_value_head(self, features: int) -> nn.Module:
        """Build a head from features [..., F] to values [..., 1]."""
        return initialized(nn.Linear(features, 1), self.config.initializer, gain=1.0)

    def shares_encoder(self, encoder: nn.Module, core: nn.Module | None) -> bool:
        """Return whether policy and value function share one encoder."""
        if self.config.shared_value_layers is not None:
            return self.config.shared_value_layers
        small = isinstance(encoder, MLP) or (
            isinstance(encoder, TreeEncoder) and not encoder.has_images
        )
        return core is not None or not small


def _must_spell_methods(kind: type[Catalog]) -> None:
    """Raise ValueError for an unused method named nearly like Catalog's."""
    methods = dict(getmembers(kind, isfunction))
    known = dict(getmembers(Catalog, isfunction))
    called = {name for each in methods.values() for name in each.__code__.co_names}
    for name in methods.keys() - known.keys() - called:
        near = [] if name.startswith("_") else get_close_matches(name, known, 1, 0.8)
        if near:
            raise ValueError(
                f"{kind.__name__}.{name} is never called: did you mean {near[0]!r}? Otherwise "
                "begin its name with an underscore"
            )


def _without_effect(module: RLModule) -> str:
    """Describe keys that the action space cannot use; "": there are none."""
    given, space = module.model_config, module.action_space
    wrong = []
    boxes = [leaf for _, leaf in space_leaves(space) if isinstance(leaf, spaces.Box)]
    bounded = any((box.bounded_below & box.bounded_above).any() for box in boxes)
    # A distribution of the user's gets `squash`.
    if given.get("squash") and not given.get("distribution") and not bounded:
        wrong.append(f"model.squash = true has no effect: {space} has no Box with finite bounds")
    if "free_log_std" in given and not module.action_distribution().log_std_inputs:
        wrong.append(
            f"model.free_log_std has no effect: actions in {space} have no standard deviations"
        )
    return "; ".join([*wrong, "leave it out"]) if wrong else ""


class Remembering(RLModule):
    """A module with an encoder and an optional recurrent core."""

    encoder: nn.Module
    core: Any

    def _build_body(self, catalog: Catalog) -> int:
        """Build encoder and core, and return the number of their features."""
        self.note = _without_effect(self)
        self.encoder = catalog.build_encoder()
        features = feature_size(self.encoder)
        self.core = catalog.build_core(features)
        return features if self.core is None else feature_size(self.core)

    def get_initial_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self.core is None else self.core.get_initial_state()
        return state


class ActorCritic(Remembering):
    """Policy and value function for every supported space.

    It has an encoder, an optional recurrent core, and a head each for the policy and the value
    function, which may have its own encoder. A value function with additional inputs
    (`critic_space`) always has its own encoder, without a recurrent core. The catalog builds these
    parts from the spaces and the keys of `ModelConfig`.
    """

    takes_critic_observations = True

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        model_config: Mapping[str, Any],
        catalog: Catalog | None = None,
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        catalog = catalog or Catalog(observation_space, action_space, model_config)
        memory = self._build_body(catalog)
        self.policy_head = catalog.build_policy_head(memory, self.action_distribution())
        self.value_encoder = None
        self.training_only = ("value_head",)
        if self.critic_space is not None:
            self.value_encoder = catalog.build_critic_encoder()
        elif not catalog.shares_encoder(self.encoder, self.core):
            self.value_encoder = catalog.build_encoder()
        if self.value_encoder is not None:
            memory = feature_size(self.value_encoder)
            self.training_only = ("value_encoder", "value_head")
        self.value_head = catalog.build_value_head(memory)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        features, states = remember(self.encoder, self.core, batch)  # [B, H] or [B, T, H]
        return {ACTION_DIST_INPUTS: self.policy_head(features), **states}

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        features, outputs = remember(self.encoder, self.core, batch)  # [B, H] or [B, T, H]
        outputs[ACTION_DIST_INPUTS] = self.policy_head(features)  # [B, D] or [B, T, D]
        if self.value_encoder is not None and self.critic_space is not None:
            seen = {name: batch[name] for name in (OBSERVATIONS, CRITIC_OBSERVATIONS)}
            if self.core is None:
                features = self.value_encoder(seen)  # [B, H]
            else:
                features = each_step(self.value_encoder, seen)  # [B, T, H]
        elif self.value_encoder is not None:
            features = self.value_encoder(batch[OBSERVATIONS])  # [B, H]
        outputs[VALUES] = self.value_head(features).squeeze(-1)  # [B] or [B, T]
        return outputs


def remember(encoder: Any, core: Any, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """Encode observations to [B, H], or [B, T, H] with a core.

    With a core, "states" holds the state [B, ...] after the last step.
    """
    if core is None:
        return encoder(batch[OBSERVATIONS]), {}
    features = each_step(encoder, batch[OBSERVATIONS])  # [B, T, F]
    remembered, states = core(features, batch[STATES])  # [B, T, H]
    return remembered, {STATES: states}


def each_step(encoder: Any, observations: Any) -> Tensor:
    """Encode observations [B, T, ...] step by step -> [B, T, F]."""
    flat = tree_map(lambda each: each.flatten(0, 1), observations)  # [B T, ...]
    features: Tensor = encoder(flat).unflatten(0, first_leaf(observations).shape[:2])  # [B, T, F]
    return features


#: Output of forward_train: two values of an action [B, 2], or of each action [B, 2, n].
Q_VALUES: Final = "q_values"

#: Keys of `model` that have only one valid value alongside these critics.
_NEEDED = {"squash": True, "free_log_std": False, "shared_value_layers": False}


class TwinCritics(nn.ModuleList):
    """Two networks for values of a module's Box or Discrete actions.

    They see Box actions alongside observations. Encoders are the default module's.
    """

    def __init__(self, module: RLModule) -> None:
        seen, values = module.observation_space, 1
        if isinstance(module.action_space, spaces.Discrete):
            values = int(module.action_space.n)
        else:
            actions = spaces.Box(-1, 1, (math.prod(module.action_space.shape or ()),), np.float32)
            seen = spaces.Dict({OBSERVATIONS: without_mask(seen), ACTIONS: actions})
        catalog = Catalog(seen, module.action_space, module.model_config)
        super().__init__(Critic(catalog, values) for _ in range(2))

    def of(self, batch: Batch, module: RLModule) -> dict[str, Any]:
        """Return values [B, 2] of actions, or [B, 2, n] if Discrete.

        Critics see actions with bounds scaled to -1 and 1.
        """
        if isinstance(module.action_space, spaces.Discrete):
            values = [critic(batch[OBSERVATIONS]) for critic in self]  # [B, n] each
            return {Q_VALUES: torch.stack(values, 1)}  # [B, 2, n]
        actions = batch[ACTIONS].reshape(len(batch[ACTIONS]), -1)  # [B, M]
        distribution = module.action_distribution()
        if isinstance(distribution, SquashedGaussianSpec):
            _, low, width, _, _ = distribution.bounds_on(actions.device)  # [M] each
            actions = 2 * (actions - low) / width - 1  # [B, M] between -1 and 1
        seen = {OBSERVATIONS: batch[OBSERVATIONS], ACTIONS: actions}
        return {Q_VALUES: torch.cat([critic(seen) for critic in self], -1)}  # [B, 2]


class Critic(nn.Module):
    """A network for values [B, n] of its input."""

    def __init__(self, catalog: Catalog, values: int) -> None:
        super().__init__()
        self.encoder = catalog.build_encoder()
        head = nn.Linear(feature_size(self.encoder), values)
        self.head = initialized(head, catalog.config.initializer, gain=1.0)

    def forward(self, seen: Any) -> Tensor:
        values: Tensor = self.head(self.encoder(seen))  # [B, n]
        return values


def must_see_actions(name: str, action_space: Space[Any], model_config: Mapping[str, Any]) -> None:
    """Raise ValueError if a custom encoder cannot see Box actions."""
    encoder = model_config.get("encoder", "auto")
    if isinstance(action_space, spaces.Box) and (callable(encoder) or ":" in str(encoder)):
        raise ValueError(
            f"model.encoder = {encoder!r}: {name} needs to encode Box actions, "
            "which your own encoder cannot "
            "do; leave it out"
        )


def model_for_critics(
    name: str, action_space: Space[Any], model_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of `model` for a policy alongside these critics.

    Args:
        name: of the module's class.
        action_space: of the policy.
        model_config: the keys that were given.

    Raises:
        ValueError: a key has a value that the module cannot have.
    """
    for key, needed in _NEEDED.items():
        if (given := model_config.get(key, needed)) not in (needed, None):
            raise ValueError(f"model.{key} = {given!r}: {name} needs {needed!r}; leave it out")
    if model_config.get("distribution") is not None:
        raise ValueError(
            f"distribution = {model_config['distribution']!r}: {name} has the "
            "distribution that its algorithm needs; leave it out"
        )
    must_see_actions(name, action_space, model_config)
    if model_config.get("recurrent", "none") != "none":
        raise ValueError(
            f"{name} has no memory: leave out model.recurrent, or choose another "
            "algorithm, such as ppo"
        )
    return {**model_config, **_NEEDED}


#: The parameter with the logarithm of the temperature.
LOG_TEMPERATURE: Final = "log_temperature"

LOG_STD_LIMITS = -10.0, 2.0  # beyond these, actions are certain, or all at their bounds


class SoftActorCritic(RLModule):
    """A stochastic policy and twin critics, for Box and Discrete actions.

    The policy of a Box is a squashed Gaussian whose standard deviations depend on the observation.
    For observations only, `forward_train` returns "action_dist_inputs" [B, D], and for Discrete
    actions also "q_values" [B, 2, n]. With a Box and a batch that also has "actions" [B, ...], it
    returns only their "q_values" [B, 2].

    Encoders are the default module's: one for the policy and one for each critic.
    """

    training_only = ("critics", LOG_TEMPERATURE)

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        model_config = model_for_critics(type(self).__name__, action_space, model_config)
        if not isinstance(action_space, spaces.Box | spaces.Discrete):
            raise UnsupportedSpace(
                f"{type(self).__name__} acts in Box and Discrete spaces, and not in {action_space}"
            )
        super().__init__(observation_space, action_space, model_config)
        catalog = Catalog(observation_space, action_space, model_config)
        self.encoder = catalog.build_encoder()
        distribution = self.action_distribution()
        self.policy_head = catalog.build_policy_head(feature_size(self.encoder), distribution)
        self._log_std = len(distribution.log_std_inputs)  # number of inputs at the end
        self.critics = TwinCritics(self)
        self.log_temperature = nn.Parameter(torch.zeros(()))  # []

    def _forward(self, batch: Batch) -> dict[str, Any]:
        inputs = self.policy_head(self.encoder(batch[OBSERVATIONS]))  # [B, D]
        if self._log_std:
            means, log_std = inputs.tensor_split([-self._log_std], -1)  # [B, M] each
            inputs = torch.cat([means, log_std.clamp(*LOG_STD_LIMITS)], -1)  # [B, D]
        return {ACTION_DIST_INPUTS: inputs}

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        if isinstance(self.action_space, spaces.Discrete):
            return self._forward(batch) | self.critics.of(batch, self)
        return self.critics.of(batch, self) if ACTIONS in batch else self._forward(batch)


#: The buffer with the standard deviation of the noise, which the learner sets.
EXPLORATION_NOISE: Final = "exploration_noise"

SMALLEST_NOISE = 1e-8  # has a logarithm, and moves no action of float32 by more than a rounding


class DeterministicActorCritic(RLModule):
    """A deterministic policy and twin critics, for a bounded Box.

    tanh squashes actions to the bounds. Exploration adds normal noise and clips the sum; the buffer
    "exploration_noise" is its standard deviation, in halves of the distance between the bounds.
    Until a learner sets it, it is infinite, and actions are drawn uniformly from the Box.

    For observations only, `forward_train` returns "action_dist_inputs" [B, 2 M]. For a batch that
    also has "actions" [B, ...], it returns only their "q_values" [B, 2]. Encoders are the default
    module's: one for the policy and one for each critic.
    """

    training_only = ("critics",)
    exploration_noise: Tensor

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        name = type(self).__name__
        model_config = model_for_critics(name, action_space, model_config)
        super().__init__(observation_space, action_space, model_config)
        self._distribution = _distribution(name, action_space)
        assert isinstance(action_space, spaces.Box)  # other spaces have no such distribution
        catalog = Catalog(observation_space, action_space, model_config)
        self.encoder = catalog.build_encoder()
        size = self._distribution.noise_size
        head = nn.Linear(feature_size(self.encoder), size)
        self.policy_head = initialized(head, catalog.config.initializer, gain=0.01)
        self.critics = TwinCritics(self)
        self.register_buffer(EXPLORATION_NOISE, torch.tensor(math.inf))  # []

    def action_distribution(self) -> ClippedGaussianSpec:
        return self._distribution

    def _forward(self, batch: Batch) -> dict[str, Any]:
        chosen = self.policy_head(self.encoder(batch[OBSERVATIONS]))  # [B, M] before tanh
        # The noise is [], or has a number for each row: see `with_own_exploration`.
        noise = self.exploration_noise.clamp(min=SMALLEST_NOISE).log().to(chosen.dtype)
        return {ACTION_DIST_INPUTS: torch.cat([chosen, noise.expand_as(chosen)], -1)}  # [B, 2 M]

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        return self.critics.of(batch, self) if ACTIONS in batch else self._forward(batch)


def _distribution(name: str, space: Space[Any]) -> ClippedGaussianSpec:
    """Return the distribution of actions with clipped noise.

    Args:
        name: of the module's class.
        space: of its actions.

    Raises:
        UnsupportedSpace: this space has no such distribution.
    """
    if not isinstance(space, spaces.Box):
        raise UnsupportedSpace(f"{name} acts in Box spaces, and not in {space}")
    distribution_for(space)  # rejects integers and empty spaces
    spec = ClippedGaussianSpec(space.low, space.high)
    if not spec.is_bounded:
        raise UnsupportedSpace(
            f"{name} squashes each element of an action to finite bounds, one clearly above the "
            f"other, which {space} does not have: choose another algorithm, such as sac, or "
            "change the bounds of the action space"
        )
    return spec


class ImplicitActorCritic(ActorCritic):
    """The default module with twin critics, for Box and Discrete actions.

    `forward_train` returns the same as the default module. For a batch that also has "actions" [B,
    ...], it returns only "q_values": of these actions [B, 2], or for Discrete actions of all
    actions [B, 2, n].
    """

    takes_critic_observations = False

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        if not isinstance(action_space, spaces.Box | spaces.Discrete):
            raise UnsupportedSpace(
                f"{type(self).__name__} acts in Box and Discrete spaces, and not in {action_space}"
            )
        must_see_actions(type(self).__name__, action_space, model_config)
        super().__init__(observation_space, action_space, model_config)
        self.critics = TwinCritics(self)
        self.training_only = (*self.training_only, "critics")

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        return self.critics.of(batch, self) if ACTIONS in batch else super()._forward_train(batch)


#: The buffer with the share of random actions, which the learner sets.
EPSILON: Final = "epsilon"
#: The buffer [K] with the returns of a module with `atoms`, and the output with the logits of
#: their probabilities.
RETURNS: Final = "returns"
RETURN_LOGITS: Final = "return_logits"


class QCatalog(Catalog):
    """Builds the parts of a `QNetwork`."""

    config_class = QNetworkConfig


class QNetwork(Remembering):
    """Values of Discrete actions, after the default module's encoder.

    In training it returns values [B, n] as "action_dist_inputs", and their maximum [B] as
    "values". It explores ε-greedily. Heads see normalized features (Ba et al. 2016, "Layer
    Normalization"), which keeps values from diverging without a target network.

    With `atoms` = K in `model_config`, the values are means over K equidistant returns (Bellemare
    et al. 2017, "A Distributional Perspective on Reinforcement Learning"). The network also
    returns the logits [B, n, K] of their probabilities, as "return_logits".

    With `dueling`, the values or logits come from a `DuelingHead`.
    """

    epsilon: Tensor
    returns: Tensor

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        if not isinstance(action_space, spaces.Discrete):
            raise UnsupportedSpace(
                f"{type(self).__name__} acts in Discrete spaces, and not in {action_space}"
            )
        catalog = QCatalog(observation_space, action_space, model_config)
        assert isinstance(catalog.config, QNetworkConfig)
        self.atoms, limits = catalog.config.atoms, (catalog.config.v_min, catalog.config.v_max)
        features = self._build_body(catalog)
        self.normalize = nn.LayerNorm(features)
        # Values are small at first, so that no action is preferred before learning.
        self.value_head: nn.Module
        if catalog.config.dueling:
            actions, numbers = int(action_space.n), self.atoms or 1
            self.value_head = DuelingHead(features, actions, numbers, catalog.config)
        elif self.atoms:
            outputs = nn.Linear(features, int(action_space.n) * self.atoms)
            self.value_head = initialized(outputs, catalog.config.initializer, gain=0.01)
        else:
            self.value_head = catalog.build_policy_head(features, self.action_distribution())
        if self.atoms:
            self.register_buffer(RETURNS, torch.linspace(*limits, self.atoms))  # [K]
        self.register_buffer(EPSILON, torch.tensor(1.0))  # []

    def _forward(self, batch: Batch) -> dict[str, Any]:
        features, states = remember(self.encoder, self.core, batch)  # [B, H] or [B, T, H]
        values = self.value_head(self.normalize(features))  # [B, n] or [B, T, n]
        if self.atoms:
            logits = values.unflatten(-1, (-1, self.atoms))  # [B, n, K] or [B, T, n, K]
            values = (logits.softmax(-1) * self.returns).sum(-1)  # [B, n] or [B, T, n]
            states = {RETURN_LOGITS: logits, **states}
        if self._masked:
            mask = batch[OBSERVATIONS][ACTION_MASK]
            values = self.action_distribution().mask(values, mask)
        return {ACTION_DIST_INPUTS: values, **states}

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        outputs = self._forward(batch)
        return {**outputs, VALUES: outputs[ACTION_DIST_INPUTS].max(-1).values}

    def _forward_exploration(self, batch: Batch) -> dict[str, Any]:
        outputs = self._forward(batch)
        values = outputs[ACTION_DIST_INPUTS]  # [B, n] or [B, T, n]
        legal = torch.ones_like(values)  # [B, n]
        if self._masked:
            legal = batch[OBSERVATIONS][ACTION_MASK].to(values.dtype).view_as(values)
        # Not `one_hot`, which reads the numbers: then operations could not be traced.
        best = torch.zeros_like(values).scatter(-1, values.argmax(-1, keepdim=True), 1.0)  # [B, n]
        any_action = legal / legal.sum(-1, keepdim=True).clamp(min=1)  # [B, n]
        # ε is [], or has a number for each row: see `with_own_exploration`.
        shares = self.epsilon * any_action + (1 - self.epsilon) * best  # [B, n]
        return {**outputs, ACTION_DIST_INPUTS: shares.clamp(min=1e-8).log()}


def must_explore(algorithm: str, module: RLModule, learns_returns: bool = False) -> None:
    """Raise ValueError if an algorithm and its Q-module do not match.

    Args:
        algorithm: its name, for errors.
        module: the algorithm's module.
        learns_returns: whether the algorithm learns the probabilities of returns.
    """
    if module.critic_space is not None:
        raise ValueError(
            f"critic_sees with algorithm = {algorithm!r}: its values choose actions, so they "
            "have only the inputs of acting; leave critic_sees out, or choose ppo, appo or impala"
        )
    if RETURNS in dict(module.named_buffers()) and not learns_returns:
        raise ValueError(
            f"model.atoms with algorithm = {algorithm!r}: only dqn learns the probabilities of "
            "returns; leave atoms out, or choose dqn"
        )
    if EPSILON not in dict(module.named_buffers()):
        raise ValueError(
            f"{algorithm} needs a module with a buffer {EPSILON!r}, such as QNetwork, but "
            f"{type(module).__name__} has none"
        )


def exploration_of(module: RLModule) -> str:
    """Return the buffer that controls how much a module explores.

    Raises:
        ValueError: there is no such buffer.
    """
    buffers = dict(module.named_buffers())
    for name in (EPSILON, EXPLORATION_NOISE):
        if name in buffers:
            return name
    raise ValueError(
        f"exploration_ladder: {type(module).__name__} has no buffer {EPSILON!r} or "
        f"{EXPLORATION_NOISE!r} that controls how much it explores; set it to 0"
    )


def with_own_exploration(module: RLModule, rows: int) -> None:
    """Give each of B rows its own exploration number."""
    # The outputs of a module with a state have a time dimension.
    shape = (rows, 1, 1) if module.get_initial_state() else (rows, 1)
    name = exploration_of(module)
    common = module.get_buffer(name)  # []
    module.register_buffer(name, common.expand(shape).clone())  # [B, 1] or [B, 1, 1]
