"""The space of a sweep: what people write, and what a configuration accepts of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.errors import raises_key

from juggler.driver.config import ConfigError
from juggler.experiments.space import Choices, Range, parse_space, placed

LR_BOUNDS = {"low": 1e-4, "high": 1e-2, "step": None, "whole": False}


@pytest.mark.parametrize(
    ("key", "text", "meant"),
    [
        ("lr", "1e-4..1e-2:log", Range("lr", log=True, **LR_BOUNDS)),
        ("lr", "1e-4 .. 1e-2", Range("lr", log=False, **LR_BOUNDS)),
        ("batch-size", "256..1024:256", Range("batch_size", 256, 1024, False, 256, True)),
        ("batch-size", "256..2048:300", Range("batch_size", 256, 1756, False, 300, True)),
        ("gamma", "0.1..0.95:0.2", Range("gamma", 0.1, 0.9, False, 0.2, False)),
        ("gamma", "0.1..0.3:0.2", Range("gamma", 0.1, 0.3, False, 0.2, False)),
        ("gamma", "0..1", Range("gamma", 0, 1, False, None, False)),
        ("entropy_coefficient", "0,0.01", Choices("entropy_coefficient", (0, 0.01))),
        ("model.activation", "relu,tanh", Choices("model.activation", ("relu", "tanh"))),
        ("model.hidden_sizes", "[64],[64, 64]", Choices("model.hidden_sizes", ([64], [64, 64]))),
        ("model.recurrent_size", "8..64", Range("model.recurrent_size", 8, 64, False, None, True)),
        ("env_kwargs.size", "3..8", Range("env_kwargs.size", 3, 8, False, None, True)),
        ("env_kwargs.wind", "3.0..8", Range("env_kwargs.wind", 3, 8, False, None, False)),
        ("lr", "[[0,1e-3],[9e5,1e-4]],5e-4", Choices("lr", ([[0, 1e-3], [9e5, 1e-4]], 5e-4))),
    ],
)
def test_what_is_written_is_what_is_meant(key: str, text: str, meant: object) -> None:
    assert parse_space({key: text}, {}) == [meant]


def test_numbers_of_numpy_are_choices_as_numbers_are() -> None:
    (axis,) = parse_space({"lr": np.logspace(-4, -2, 3)}, {})
    assert [type(value) for value in axis.extremes()] == [float, float, float]


@pytest.mark.parametrize(
    ("key", "text", "told"),
    [
        ("lrr", "1e-4..1e-2", "unknown key 'lrr': did you mean 'lr'?"),
        ("model.hiden_sizes", "[64],[128]", "no key 'hiden_sizes': did you mean 'hidden_sizes'?"),
        ("lr", "1e-2..1e-4", "--space lr=1e-2..1e-4: the first bound has to be below the second"),
        ("lr", "0..1:log", "with :log, both bounds have to be above 0"),
        ("lr", "1e-4..1e-2:lgo", "after the colon stands log, or a step between two values"),
        ("lr", "fast,slow", "lr: expected a number, or a schedule"),
        ("lr", "0.001", "give several values, such as lr=A,B, or a range"),
        ("gamma", "0.9..1.5", "gamma = 1.5: must be at least 0 and at most 1"),
        ("batch_size", "16..64.5", "batch_size takes integers alone"),
        ("env.size", "3,4", "env is no table, so it has no keys of its own"),
        ("clip", "0.1..0.3", "'clip' is a key of appo and ppo, and algorithm = 'impala'"),
    ],
)
def test_what_cannot_be_meant_is_told_in_a_sentence(key: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_space({key: text}, {"env": "CartPole-v1"})
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_has_to_suit_every_algorithm_of_the_space() -> None:
    parse_space({"algorithm": "ppo,appo", "clip": "0.1..0.3"}, {})
    with raises_key(ConfigError, "algorithm"):
        parse_space({"algorithm": "ppo,impala", "clip": "0.1..0.3"}, {})


def test_values_are_placed_in_tables_and_what_they_came_from_stays() -> None:
    run: dict[str, Any] = {"lr": 1.0, "model": {"hidden_sizes": [8], "activation": "relu"}}
    values = {"lr": 2.0, "model.hidden_sizes": [64], "env_kwargs.size": 3}
    assert placed(run, values) == {
        "lr": 2.0,
        "model": {"hidden_sizes": [64], "activation": "relu"},
        "env_kwargs": {"size": 3},
    }
    assert run == {"lr": 1.0, "model": {"hidden_sizes": [8], "activation": "relu"}}


def test_a_configuration_of_one_algorithm_is_not_swept_over_several() -> None:
    impala = {"algorithm": "impala", "rho_bar": 1.0}
    with pytest.raises(ConfigError, match="CartPole"):
        parse_space({"algorithm": "ppo,appo"}, impala)
    with pytest.raises(ConfigError, match="did you mean 'appo'"):
        parse_space({"algorithm": "ppo,appoo"}, impala)
