"""The connectors that process batches before a learner's algorithm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import TWO, VECTOR, MakeBatch

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.state_trees import StateMismatch
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.testing import assert_same


def make_learner(seed: int = 0, reward_scale: float = 1.0, **connectors: Any) -> Learner:
    config = ImpalaConfig(reward_scale=reward_scale)
    model = {"hidden_sizes": [8]}
    return build_learner(config, None, VECTOR, TWO, model, connectors=connectors, seed=seed)


def with_context(batch: EpisodeBatch, **contexts: Any) -> EpisodeBatch:
    return replace(batch, states={"connectors": contexts})


def test_episodes_and_batches_go_through_the_pipeline_and_samples_do_not(
    make_batch: MakeBatch,
) -> None:
    piped = make_learner(learner=[{"use": "scale_rewards", "factor": 0.5}])
    expected = fetch_metrics(make_learner(reward_scale=0.5).update_from_episodes([make_batch()]))
    sample = piped.sample_from_episodes([make_batch()])
    np.testing.assert_array_equal(sample["rewards"], make_batch().rewards * 0.5)
    assert fetch_metrics(piped.step(sample)) == expected
    with pytest.raises(ValueError, match="no key 'learners': did you mean 'learner'"):
        build_learner(ImpalaConfig(), None, VECTOR, TWO, {}, connectors={"learners": []})

    class OfBatches(Impala):
        trains_on = frozenset({"batch"})

    core = OfBatches(piped.core._make_module, piped.config)
    of_batches = Learner(core, pipeline=piped.pipeline)
    found = of_batches.update_from_batch(collate([make_batch()]))
    assert fetch_metrics(found) == expected


def test_a_sample_with_whole_stacks_is_learned_from_as_one_with_each_frame_once(
    make_batch: MakeBatch,
) -> None:
    space = spaces.Box(0, 255, (36, 40, 2), np.uint8)
    config = {"algorithm": "dqn", "replay_begin": 4, "replay_batch_size": 8}
    connectors = {"env_to_module": [{"use": "frame_stack", "k": 3}]}
    learners = [
        build_learner(config, None, space, TWO, {"hidden_sizes": [8]}, connectors=connectors)
        for _ in range(2)
    ]
    seen = np.random.default_rng(0).integers(0, 200, (2, 7, *space.shape)).astype(space.dtype)
    batch = replace(
        make_batch(2, 4, ends=0.0),
        observations=seen[:, :4],
        last_observations=seen[:, 4],
        final_observations=seen[:0, 0],
    )
    batch = with_context(batch, frame_stack=seen[:, 5:])
    once = learners[0].sample_from_episodes([batch])
    assert "frames" in once
    learners[1].pipeline.frames_once = False
    whole = learners[1].sample_from_episodes([batch])
    learners[1].pipeline.keep_frames_once()
    found = [learners[0].step(once), learners[1].step(whole)]
    assert fetch_metrics(found[0]) == fetch_metrics(found[1])
    assert_same(learners[0].get_weights(), learners[1].get_weights())


def test_what_a_pipeline_has_learned_is_saved_and_restored(make_batch: MakeBatch) -> None:
    learner = make_learner(learner=["normalize_rewards"])
    batches = [
        with_context(make_batch(seed=seed), discounted_returns=np.zeros(3, np.float32))
        for seed in range(4)
    ]
    for batch in batches[:2]:
        learner.update_from_episodes([batch])
    tree, extras = learner.save()
    saved: Any = tree["learner_pipelines"]
    kept = {name: x.copy() for name, x in saved["default"]["normalize_rewards"].items()}
    assert kept["count"] == sum(batch.live_steps for batch in batches[:2])
    expected = [fetch_metrics(learner.update_from_episodes([batch])) for batch in batches[2:]]
    assert saved["default"]["normalize_rewards"] == kept

    restored = make_learner(seed=7, learner=["normalize_rewards"])
    restored.restore(tree, extras)
    found = [fetch_metrics(restored.update_from_episodes([batch])) for batch in batches[2:]]
    assert found == expected


def test_a_checkpoint_with_another_pipeline_is_refused_and_changes_nothing(
    make_batch: MakeBatch,
) -> None:
    plain, normalizing = make_learner(), make_learner(learner=["normalize_rewards"])
    before = normalizing.state
    with pytest.raises(
        StateMismatch, match="'learner_pipelines/normalize_rewards' is in the checkpoint"
    ):
        plain.restore(*normalizing.save())
    with pytest.raises(StateMismatch, match="'learner_pipelines/normalize_rewards' is here"):
        normalizing.restore(*plain.save())
    assert normalizing.state is before
    assert torch.equal(
        normalizing.pipeline.get_state()["normalize_rewards"]["count"],
        torch.zeros((), dtype=torch.float64),
    )
