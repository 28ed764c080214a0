from __future__ import annotations

import numpy as np

from juggler.envrunner.running_episodes import RunningEpisodes


def test_returns_are_summed_in_double_precision_across_fragments() -> None:
    running = RunningEpisodes(1)
    live = np.ones((1, 4), bool)
    large, small = np.float32(2**24), np.float32(1)  # whose float32 sum is the large one
    rewards = np.array([[large, small, small, small]])
    first = running.advance(rewards, np.zeros((1, 4), bool), live)
    assert len(first.episode_returns) == 0
    done = np.array([[False, False, False, True]])
    second = running.advance(rewards, done, live)
    assert second.episode_returns.tolist() == [2**25 + 6]
    assert second.episode_lengths.tolist() == [8]
    assert second.offsets.tolist() == [4]
    assert second.episodes.tolist() == first.episodes.tolist()


def test_a_fragment_of_nothing_but_resets_has_no_segments() -> None:
    running = RunningEpisodes(2)
    ended = running.advance(
        np.ones((2, 1), np.float32), np.ones((2, 1), bool), np.ones((2, 1), bool)
    )
    nothing = np.zeros((2, 1), bool)
    segments = running.advance(np.zeros((2, 1), np.float32), nothing, nothing)
    assert len(segments.rows) == len(segments.episode_returns) == 0
    after = running.advance(np.ones((2, 1), np.float32), nothing, ~nothing)
    assert not set(after.episodes) & set(ended.episodes)
    assert after.offsets.tolist() == [0, 0]
