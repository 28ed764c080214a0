"""What the default module is built like. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from juggler.runtime.elsewhere import MODEL_KEYS, called_here
from juggler.runtime.nearest import nearest


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`model` of a module that is not your own, and of those that you extend or swap parts of."""

    hidden_sizes: Sequence[int] = (64, 64)
    """Units of each hidden layer. Where there are images, these layers join their features with
    the rest of the observation, and an image alone goes without."""

    activation: Literal["tanh", "relu"] = "tanh"
    """Of the hidden layers; images have relu."""

    encoder: str | Callable[..., Any] = "auto"
    """What turns observations into features. auto: nature_cnn for images, and for the rest numbers
    as they are and choices one-hot. mlp: no convolutions. nature_cnn, impala_resnet: that one for
    every Box of two to four dimensions. Or one of your own, as package.module:Class."""

    shared_value_layers: bool | None = None
    """One encoder for policy and value function, instead of one each; none: one where there are
    images or a recurrent layer."""

    recurrent: Literal["none", "lstm", "gru"] = "none"
    """A layer with a memory between encoder and heads, which the value function shares."""

    recurrent_size: int = 64
    """Its units."""

    memory_bias: float = 2.0
    """Added to the first biases of the gate that keeps a memory, the LSTM's forget gate or the
    GRU's update gate: the larger, the longer a recurrent layer remembers before it has learned to.
    With 0, what was seen 20 steps ago is lost."""

    initializer: Literal["orthogonal", "default"] = "orthogonal"
    """Of weights. orthogonal: with biases of 0, and a policy that is nearly uniform at first.
    default: torch's own."""

    free_log_std: bool = True
    """The log standard deviations of Box actions are parameters of their own, the same in every
    state and 0 at first, instead of outputs of the policy."""

    squash: bool = False
    """Actions of a Box with finite bounds are squashed into them by tanh."""

    distribution: str | Callable[..., Any] | None = None
    """The run's key of that name, which is meant for every module, ends up here."""

    @classmethod
    def parse(cls, model_config: Mapping[str, Any]) -> ModelConfig:
        """The mapping as a config.

        Raises:
            ValueError: an unknown key, or a value that its key does not allow.
        """
        known = [field.name for field in fields(cls)]
        for key in model_config:
            if key not in known:
                instead = called_here(key, MODEL_KEYS) or nearest(key, known)
                raise ValueError(f"model has no key {key!r}{instead}")
        config = cls(**model_config)
        sizes = config.hidden_sizes
        if not isinstance(sizes, (list, tuple)) or not all(_positive(size) for size in sizes):
            raise _wrong("hidden_sizes", "a list of positive integers, such as [128]", sizes)
        if not _positive(config.recurrent_size):
            raise _wrong("recurrent_size", "a positive integer", config.recurrent_size)
        if not _is_number(config.memory_bias):
            raise _wrong("memory_bias", "a finite number", config.memory_bias)
        for key, hint in get_type_hints(cls).items():
            value, allowed = getattr(config, key), get_args(hint)
            if hint is bool and not isinstance(value, bool):
                raise _wrong(key, "true or false", value)
            if all(type(each) is str for each in allowed) and allowed and value not in allowed:
                raise _wrong(key, f"one of {', '.join(allowed)}", value)
        if not isinstance(config.shared_value_layers, bool | None):
            raise _wrong("shared_value_layers", "true or false", config.shared_value_layers)
        if config.recurrent != "none" and config.shared_value_layers is False:
            raise ValueError(
                "model.shared_value_layers = false does not go with recurrent = "
                f"{config.recurrent!r}: runners carry one state, so policy and value function "
                "share it"
            )
        return config


def _positive(value: object) -> bool:
    return type(value) is int and value > 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _wrong(key: str, expected: str, value: object) -> ValueError:
    return ValueError(f"model.{key} must be {expected}, not {value!r}")
