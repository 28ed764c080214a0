"""What a learner expects to be remembered at the start of each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.data.validation import BatchValidator
from juggler.learner.learner import Learner
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.errors import WireError

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)


def learner_with(model: dict[str, Any] | None = None, **connectors: Any) -> Learner:
    pieces = ConnectorsConfig(**connectors)
    return build_learner(ImpalaConfig(), None, VECTOR, TWO, model or {}, connectors=pieces)


def test_a_learner_that_nothing_is_remembered_for_expects_nothing() -> None:
    assert learner_with(learner=["clip_rewards"]).example_states() == {}


def test_what_modules_and_connectors_remember_has_branches_of_its_own() -> None:
    model = {"recurrent": "gru", "recurrent_size": 5}
    pieces = [{"use": "frame_stack", "k": 3}, "previous_actions_and_rewards"]
    states: Any = learner_with(model, env_to_module=pieces).example_states()
    assert states.keys() == {"module", "connectors"}
    assert all(array.shape == (5,) for array in states["module"].values())
    contexts = states["connectors"]
    assert contexts["frame_stack"].shape == (2, 4)
    previous = contexts["previous_actions_and_rewards"]
    assert previous["previous_action"].shape == previous["previous_reward"].shape == ()
    assert previous["previous_action"].dtype == np.int64


def test_batches_without_the_contexts_of_a_learners_connectors_are_refused(
    make_batch: MakeBatch,
) -> None:
    learner = learner_with(env_to_module=[{"use": "frame_stack", "k": 3}])
    fit = BatchValidator("default", VECTOR, TWO, learner.example_states())
    batch = make_batch(2, 4)
    with pytest.raises(WireError, match=r"lacks? an array at 'connectors/frame_stack'"):
        fit.checked(batch)
    frames = np.zeros((2, 2, 4), np.float32)
    fit.checked(replace(batch, states={"connectors": {"frame_stack": frames}}))
    with pytest.raises(WireError, match=r"do(es)? not fit"):
        fit.checked(replace(batch, states={"connectors": {"frame_stack": frames[:, :1]}}))
