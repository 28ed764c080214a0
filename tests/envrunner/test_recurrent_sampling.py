"""The state of a recurrent module, from step to step, fragment to fragment, episode to episode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from support.scripted_environments import Scripted
from support.scripted_modules import LinearPolicy, Summing
from support.vectors import KINDS, MODES, vector_of

from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.batch import EpisodeBatch

STEPS = 4
SCRIPTS = [
    ((4, "truncated"), (4, "terminated"), (4, "both")),
    ((5, "truncated"), (3, "terminated"), (1, "both"), (1, "truncated"), (1, "terminated")),
    ((30, "truncated"),),
]


def sampler_of(env, seed: int = 5) -> tuple[Summing, Sampler]:
    module = Summing(env.single_observation_space, env.single_action_space)
    return module, Sampler(env, Actor(module, env.num_envs, STEPS, 0), STEPS, seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_starts_with_its_episode_and_goes_on_with_it(kind, mode) -> None:
    env = vector_of(kind, mode, SCRIPTS)
    module, sampler = sampler_of(env)
    batches = [sampler.sample((0, 0)).batch for _ in range(9)]
    env.close()
    started_in_a_row = went_on = 0
    for row in range(len(SCRIPTS)):
        sums = {}  # of all observations of each episode so far
        for batch in batches:
            stored = batch.states["module"]["sum"]["of"][row]
            for episode in _episodes_of(batch, row):
                number, start, stop = episode
                before = sums.get(number, np.zeros(3, np.float32))
                if start == 0:
                    np.testing.assert_allclose(stored, before, rtol=1e-5)
                    went_on += bool(before.any())
                started_in_a_row += start > 0
                seen = batch.observations[row, start:stop]
                totals = before + seen.cumsum(0)  # [L, 3]
                logits = torch.tanh((torch.from_numpy(totals) + 0.5) @ module.weight)
                chosen = torch.from_numpy(batch.actions[row, start:stop])
                expected = torch.distributions.Categorical(logits=logits).log_prob(chosen)
                logp = batch.action_logp[row, start:stop]
                np.testing.assert_allclose(logp, expected, rtol=1e-4, atol=1e-5)
                sums[number] = totals[-1]
    assert started_in_a_row > 10
    assert went_on > 5


def _episodes_of(batch: EpisodeBatch, row: int) -> list[tuple[int, int, int]]:
    return [
        (int(batch.segment_episodes[i]), start, start + int(batch.segment_lengths[i]))
        for i in np.flatnonzero(batch.segment_rows == row)
        for start in [int(batch.segment_starts[i])]
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_gives_up_all_states(mode) -> None:
    _, sampler = sampler_of(vector_of("in turn", mode, SCRIPTS))
    sampler.sample((0, 0))
    sampler.reset(6)
    state = sampler.sample((0, 0)).batch.states["module"]
    assert not state["sum"]["of"].any()
    assert (state["start"] == 0.5).all()


def test_a_batch_with_states_is_one_that_a_learner_takes() -> None:
    _, sampler = sampler_of(vector_of("in turn", AutoresetMode.SAME_STEP, SCRIPTS))
    batch = EpisodeBatch.from_tree(sampler.sample((0, 0)).batch.to_tree())
    assert batch.states["module"]["sum"]["of"].shape == (3, 3)
    assert batch.states["module"]["start"].shape == (3,)


def test_states_at_the_start_of_rows_outlive_a_module_that_writes_into_its_own() -> None:
    class InPlace(Summing):
        def _forward(self, batch):
            outputs = super()._forward(batch)
            state = batch["states"]["sum"]["of"]
            state.copy_(outputs["states"]["sum"]["of"])
            return {**outputs, "states": batch["states"]}

    def states(kind) -> list[np.ndarray]:
        env = vector_of("in turn", AutoresetMode.SAME_STEP, SCRIPTS)
        module = kind(env.single_observation_space, env.single_action_space)
        sampler = Sampler(env, Actor(module, 3, STEPS, 0), STEPS, 5)
        batches = [sampler.sample((0, 0)).batch for _ in range(4)]
        return [batch.states["module"]["sum"]["of"] for batch in batches]

    np.testing.assert_array_equal(states(InPlace), states(Summing))


def test_an_initial_state_that_is_learned_comes_with_the_weights() -> None:
    class Learned(LinearPolicy):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.initial = torch.nn.Parameter(torch.zeros(2))

        def get_initial_state(self):
            return {"h": self.initial}

        def _forward(self, batch):
            return {**super()._forward(batch), "states": batch["states"]}

    env = vector_of("in turn", AutoresetMode.SAME_STEP, [((2, "terminated"),), ((9, "truncated"),)])
    module = Learned(env.single_observation_space, env.single_action_space)
    policy = Actor(module, 2, STEPS, 0)
    sampler = Sampler(env, policy, STEPS, 5)
    assert not sampler.sample((0, 0)).batch.states["module"]["h"].any()
    weights = {"initial": np.array([3, 4], np.float32), "weight": module.weight.numpy()}
    policy.load(weights)
    # Both episodes that begin the next rows: one starts there, the other one began before.
    assert sampler.sample((0, 0)).batch.states["module"]["h"].tolist() == [[3, 4], [0, 0]]


def test_who_plays_deterministically_carries_a_state_too() -> None:
    env = Scripted()
    module = Summing(env.observation_space, env.action_space)
    policy = Actor(module, 2, 1, 0)
    assert policy.remembers
    total = torch.zeros(2, 3)
    for step in range(4):
        seen = torch.randn(2, 3)
        first = np.array([step == 0, step in (0, 2)])
        total = torch.where(torch.from_numpy(first)[:, None], 0.0, total) + seen
        expected = ((total + 0.5) @ module.weight).argmax(-1)
        sent = policy.act(seen.numpy(), first=first, explore=False).sent
        assert sent.tolist() == expected.tolist()
