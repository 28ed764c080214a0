"""Mistakes in users' connectors are reported before a run begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import juggler
from juggler.driver.rehearsal import _try_connectors
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_learner_pipeline, build_runner_pipelines
from juggler.runtime.wire.errors import UnsupportedSpace

SEEN, ACTS = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)


class Wider(juggler.ObservationConnector):
    def __call__(self, observations: Any) -> Any:
        return np.concatenate([observations, observations], 1)


class Silent(juggler.ObservationConnector):
    def __call__(self, observations: Any) -> Any:
        return None


class InPlace(juggler.ObservationConnector):
    def __call__(self, observations: Any) -> Any:
        observations *= 2
        return observations


class Doubled(juggler.ObservationConnector):
    def __call__(self, observations: Any) -> Any:
        return observations * 2


class Summed(juggler.LearnerConnector):
    def __call__(self, columns: Any) -> Any:
        return columns | {"rewards": columns["rewards"].sum(1)}


@pytest.mark.parametrize(
    ("connector", "words"),
    [
        (Wider, r"Wider: its observation is float32 of shape \[8\]"),
        (Silent, "Silent: its observation is None"),
        (InPlace, "InPlace changes the observations that it gets"),
    ],
)
def test_a_result_that_does_not_fit_names_the_connector(connector: Any, words: str) -> None:
    pipeline, _ = built(connector)
    with pytest.raises(ValueError, match=words):
        _try_connectors(pipeline, SEEN)


def built(*connectors: Any) -> Any:
    names = [f"{__name__}:{each.__name__}" for each in connectors]
    config = ConnectorsConfig.parse({"env_to_module": names})
    return build_runner_pipelines(config, SEEN, ACTS)


def test_a_good_connector_is_accepted_after_another() -> None:
    pipeline, _ = built(Doubled)
    _try_connectors(pipeline, SEEN)


def test_a_space_without_an_encoding_is_named() -> None:
    pipeline, _ = built(Doubled)
    with pytest.raises(UnsupportedSpace, match="Text"):
        _try_connectors(pipeline, spaces.Text(3))


def test_a_learner_connector_keeps_a_number_for_each_step() -> None:
    pipeline = build_learner_pipeline(
        ConnectorsConfig.parse({"learner": [f"{__name__}:Summed"]}), SEEN, ACTS
    )
    assert pipeline is not None
    with pytest.raises(ValueError, match=r"Summed gives column 'rewards' the shape \[3\]"):
        pipeline({"rewards": torch.zeros(3, 5), "live": torch.ones(3, 5)})  # [N, T]
