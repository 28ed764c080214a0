from __future__ import annotations

import math

import pytest

from juggler.envrunner.config import EnvRunnerConfig


def test_the_default_config_is_valid() -> None:
    EnvRunnerConfig().validate()


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("env", "", "Gymnasium id"),
        ("env", 3, "Gymnasium id"),
        ("env_kwargs", [1], "table"),
        ("envs_per_runner", 0, "at least 1"),
        ("envs_per_runner", 2.5, "integer"),
        ("envs_per_runner", True, "integer"),
        ("fragment_steps", -1, "at least 1"),
        ("vectorize", "threads", "auto, native, sync, async"),
        ("autoreset", "never", "auto, next_step, same_step, disabled"),
        ("step_deadline_seconds", 0, "above 0"),
        ("step_deadline_seconds", math.inf, "above 0"),
        ("step_deadline_seconds", "1", "above 0"),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_what_is_allowed(key, value, allowed) -> None:
    with pytest.raises(ValueError, match=allowed) as caught:
        EnvRunnerConfig(**{key: value}).validate()
    assert str(caught.value).startswith(key)
    assert repr(value) in str(caught.value)
