"""What sampled batches must hold, recorded by a slow loop over single environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from juggler.envrunner.sampler import Fragment
from support.scripted_environments import Script, Scripted


@dataclass
class Transition:
    episode: int
    step: int  # of the episode
    observation: np.ndarray
    reward: float
    terminated: bool
    truncated: bool
    next_observation: np.ndarray


def play(script: Script, seed: int, actions: list[Any], box: bool) -> list[Transition]:
    """One environment, reset by hand after each episode."""
    env = Scripted(script, box)
    observation = env.reset(seed=seed)[0].copy()
    transitions: list[Transition] = []
    for action in actions:
        sent = np.clip(action, env.action_space.low, env.action_space.high) if box else action
        episode, step = env.episode, env.steps
        after, reward, terminated, truncated, _ = env.step(sent)
        after = after.copy()
        transitions.append(
            Transition(episode, step, observation, reward, terminated, truncated, after)
        )
        observation = env.reset()[0].copy() if terminated or truncated else after
    return transitions


def assert_recorded(
    fragments: list[Fragment], scripts: list[Script], seeds: list[int], box: bool = False
) -> set[tuple[str, str]]:
    """Compare consecutive fragments, step by step, with the slow loop's record.

    Returns:
        What was seen: (kind of end, its place in the fragment).
    """
    seen: set[tuple[str, str]] = set()
    identities: dict[int, tuple[int, int]] = {}
    ends: list[list[tuple[int, int, float, int]]] = [[] for _ in fragments]
    for row, (script, seed) in enumerate(zip(scripts, seeds, strict=True)):
        actions = [a for f in fragments for a in f.batch.actions[row][f.batch.live[row]]]
        record = play(script, seed, actions, box)
        totals = np.cumsum([t.reward for t in record])
        begins = {t.episode: i for i, t in reversed(list(enumerate(record)))}
        at = 0
        for f, fragment in enumerate(fragments):
            batch = fragment.batch
            finals = {
                (int(r), int(s)): observation
                for r, s, observation in zip(
                    batch.final_rows, batch.final_steps, batch.final_observations, strict=True
                )
            }
            covered = np.zeros(batch.steps, int)
            for i in np.flatnonzero(batch.segment_rows == row):
                start, length = int(batch.segment_starts[i]), int(batch.segment_lengths[i])
                covered[start : start + length] += 1
                expected = record[at + int(batch.live[row, :start].sum())]
                assert batch.segment_offsets[i] == expected.step
                identity = identities.setdefault(
                    int(batch.segment_episodes[i]), (row, expected.episode)
                )
                assert identity == (row, expected.episode)
                last = record[at + int(batch.live[row, : start + length].sum()) - 1]
                assert last.episode == expected.episode
            assert (covered == batch.live[row]).all()

            for t in range(batch.steps):
                if not batch.live[row, t]:
                    assert batch.rewards[row, t] == 0
                    assert not batch.terminated[row, t]
                    assert not batch.truncated[row, t]
                    # It comes after an end, and shows the observation that the end left.
                    assert record[at - 1].terminated or record[at - 1].truncated
                    np.testing.assert_array_equal(
                        batch.observations[row, t], record[at - 1].next_observation
                    )
                    continue
                expected = record[at]
                np.testing.assert_array_equal(batch.observations[row, t], expected.observation)
                assert batch.rewards[row, t] == np.float32(expected.reward)
                assert batch.terminated[row, t] == expected.terminated
                assert batch.truncated[row, t] == (expected.truncated and not expected.terminated)
                if batch.truncated[row, t]:
                    np.testing.assert_array_equal(finals[row, t], expected.next_observation)
                if expected.terminated or expected.truncated:
                    begin = begins[expected.episode]
                    total = totals[at] - (totals[begin - 1] if begin else 0)
                    ends[f].append((t, row, total, at - begin + 1))
                    kind = "both" if expected.terminated and expected.truncated else ""
                    kind = kind or ("terminated" if expected.terminated else "truncated")
                    place = {0: "first", batch.steps - 1: "last"}.get(t, "middle")
                    seen.add((kind, place))
                at += 1
            if f + 1 < len(fragments):
                following = fragments[f + 1].batch.observations[row, 0]
                np.testing.assert_array_equal(batch.last_observations[row], following)
        assert at == len(record)
    assert len(set(identities.values())) == len(identities)
    for fragment, expected_ends in zip(fragments, ends, strict=True):
        expected_ends.sort()
        np.testing.assert_allclose(
            fragment.episode_returns, [end[2] for end in expected_ends], rtol=1e-6
        )
        assert fragment.episode_lengths == [end[3] for end in expected_ends]
        assert fragment.batch.live_steps == fragment.batch.segment_lengths.sum()
    return seen
