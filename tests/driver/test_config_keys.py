"""Errors about keys that no run has."""

from __future__ import annotations

import pytest

from juggler.driver.config import ConfigError, RunConfig


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("frame_stack", "it is the connector frame_stack, as in connectors = {env_to_module = ["),
        ("framestack", "it is the connector frame_stack here"),
        ("self_play", "it builds a league, as in league = 'self_play'"),
        ("optimizer_kwargs", "it is called optimizer_epsilon and adam_betas here, keys of the run"),
        ("optimizer_class", "it is called optimizer here, a key of the run"),
        (
            "checkpoint_freq",
            "it is called checkpoint_seconds here, or checkpoint_updates with sync",
        ),
        ("gae", "there is no such key here: ppo always has it, with lambda_"),
        ("max_norm", "it is called grad_clip here"),
        ("num_updates", "it is called stop_steps here, which counts steps"),
        ("training_iteration", "it is called stop_steps here, which counts steps"),
        ("weight_decay", "there is no such key here"),
    ],
)
def test_a_name_that_is_usual_elsewhere_is_answered_with_what_it_is_here(
    key: str, answer: str
) -> None:
    with pytest.raises(ConfigError) as wrong:
        RunConfig.from_flat({key: 1}, where="run.toml")
    said = str(wrong.value)
    assert said.startswith(f"run.toml: unknown key {key!r}: {answer}")
    assert "the table model" not in said
