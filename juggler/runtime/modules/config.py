"""Configs of the module that a run trains. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Final, Literal, get_type_hints

from gymnasium import Space

from juggler.runtime.near_matches import nearest
from juggler.runtime.other_libraries import MODEL_KEYS, called_here
from juggler.runtime.wrong_value import CheckedKeys, WrongValue, converted, wrong_where

#: Keys whose values may be what no file can hold.
_OF_SCRIPTS: Final = ("encoder", "distribution", "critic_space", "table")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedKeys):
    """Keys of `model` for the default module and its extensions."""

    table = "model"

    hidden_sizes: Sequence[int] = (64, 64)
    """Units of each hidden layer. With images in a Dict or Tuple, these layers join all features;
    a single image has no hidden layers."""

    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the hidden layers. Image encoders use relu."""

    encoder: str | Callable[..., Any] = "auto"
    """Encoder of observations. auto: nature_cnn for images, numbers as they are, discrete values
    one-hot. mlp: no convolutions. nature_cnn, impala_resnet: for every Box with two to four
    dimensions. Or your own as package.module:Class."""

    shared_value_layers: bool | None = None
    """Whether policy and value function share an encoder; none: only with images or a recurrent
    layer."""

    recurrent: Literal["none", "lstm", "gru"] = "none"
    """Recurrent layer between encoder and heads, which policy and value function share."""

    recurrent_size: int = 64
    """Units of the recurrent layer."""

    memory_bias: float = 2.0
    """Number added to the initial biases of the gate that keeps the memory: with a larger number,
    the untrained layer remembers longer."""

    initializer: Literal["orthogonal", "default"] = "orthogonal"
    """Initialization of weights. orthogonal: with biases of 0 and a nearly uniform policy. default:
    torch's own."""

    free_log_std: bool = True
    """Whether log standard deviations of Box actions are free parameters, initially 0, instead of
    outputs of the policy."""

    squash: bool = False
    """Whether tanh squashes the actions of a Box with finite bounds into these bounds."""

    distribution: str | Callable[..., Any] | None = None
    """Filled from the run's key `distribution`, which applies to every module."""

    critic_space: Space[Any] | None = None
    """Filled if `critic_sees` gives the value function more inputs: the space of
    "critic_observations"."""

    @classmethod
    def parse(cls, model_config: Mapping[str, Any]) -> ModelConfig:
        """Make a config from a mapping.

        Raises:
            ValueError: a key is unknown, or a value is not allowed for its key.
        """
        known = [field.name for field in fields(cls)]
        for key in model_config:
            if key not in known:
                instead = called_here(key, MODEL_KEYS) or nearest(key, known)
                if key in (field.name for field in fields(QNetworkConfig)):
                    whose = "dqn, pqn or r2d2" if key == "dueling" else "dqn"
                    instead = (
                        ": only networks that value each action have it; leave it out, or choose "
                        + whose
                    )
                raise ValueError(f"model has no key {key!r}{instead}")
        # A table of TOML or JSON has no types, so each key is checked here.
        given = {key: value for key, value in model_config.items() if key in cls._types()}
        config = cls(**{**model_config, **converted(given, cls._types(), "model")})
        if not all(size > 0 for size in config.hidden_sizes):
            raise ValueError(
                f"model.hidden_sizes = {config.hidden_sizes}: must be positive, such as [128]"
            )
        config.check_at_least("recurrent_size", 1)
        config.check_finite("memory_bias")
        if not isinstance(config.critic_space, Space | None):
            raise ValueError("model has no key 'critic_space': the run's key critic_sees fills it")
        # Combinations that no network can have.
        if config.critic_space is not None and config.shared_value_layers:
            raise ValueError(
                "model.shared_value_layers = true is impossible with critic_sees: policy and value "
                "function see different things, so they cannot share an encoder"
            )
        if config.recurrent != "none" and config.shared_value_layers is False:
            raise ValueError(
                "model.shared_value_layers = false is impossible with recurrent = "
                f"{config.recurrent!r}: runners carry one state, so policy and value function "
                "share it"
            )
        return config

    @classmethod
    @cache
    def _types(cls) -> dict[str, Any]:
        """Types of keys of files, cached since evaluation dominates `parse`."""
        hints = get_type_hints(cls)
        return {key: hint for key, hint in hints.items() if key not in _OF_SCRIPTS}


@dataclass(frozen=True, kw_only=True)
class QNetworkConfig(ModelConfig):
    """Additional keys of `model` for `QNetwork`."""

    dueling: bool = False
    """Whether values of observations and advantages of actions are estimated separately, with DQN,
    PQN and R2D2."""

    atoms: int = 0
    """Number of returns from v_min to v_max whose probabilities are learned (C51); 51 is usual. 0:
    the mean is learned."""

    v_min: float = -10.0
    """The lowest of these returns, after reward_scale."""

    v_max: float = 10.0
    """The highest of these returns, after reward_scale."""

    @classmethod
    def parse(cls, model_config: Mapping[str, Any]) -> QNetworkConfig:
        config = super().parse(model_config)
        assert isinstance(config, cls)
        config.check_at_least("atoms", 0)
        if config.atoms == 1:
            raise ValueError("model.atoms = 1: must be 0, or at least 2, such as 51")
        for key in ("v_min", "v_max"):
            config.check_finite(key)
        if config.v_min >= config.v_max:
            raise ValueError(f"model.v_min must be below v_max = {config.v_max}")
        return config


@dataclass(kw_only=True)
class ModuleConfig:
    """Keys about the module that a run trains."""

    module: str | None = None
    """RLModule to train, or the Catalog that builds it, as package.module:Class; none: the default
    module."""

    model: dict[str, Any] = field(default_factory=dict)
    """Options of the module: a table in a file, JSON on the command line."""

    distribution: str | None = None
    """Function that makes the distribution of actions, as package.module:function; none: the action
    space decides."""

    critic_sees: Literal["observation", "state", "all_observations"] = "observation"
    """Inputs of the value function: its agent's observation; with several agents also their
    state(), or the observations of all."""

    check_specs: bool = False
    """Whether every call checks the module's inputs and outputs, not only the first one. Slower."""

    def __post_init__(self) -> None:
        # Runs of earlier versions name the former files of modules.
        if self.module is not None and self.module.startswith("juggler.runtime.modules."):
            self.module = f"juggler:{self.module.partition(':')[2]}"

    def validate(self) -> None:
        for key in ("module", "distribution"):
            name = getattr(self, key)
            if name is not None and ":" not in name:
                raise WrongValue(key, f"{key} = {name!r} must be named as 'package.module:Class'")
        if self.module is None:  # other modules define their own keys
            with wrong_where("model"):
                ModelConfig.parse(self.model)
