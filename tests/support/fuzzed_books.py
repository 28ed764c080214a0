"""What simulators did, and whether batches hold the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from juggler.envrunner.finiteness import check_finite
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version


@dataclass(eq=False)
class Episode:
    """As its simulator saw it.

    Attributes:
        cut: it is over without an end of its own.
        closed: a batch has had a step that was its last.
        id: in batches.
    """

    steps: list[Step] = field(default_factory=list)
    cut: bool = False
    closed: bool = False
    id: int = -1

    @property
    def sent(self) -> list[Step]:
        """What the gateway knows of it."""
        return [step for step in self.steps if step.sent]

    @property
    def total(self) -> tuple[float, int]:
        """Its return, and its length."""
        return sum(step.reward for step in self.steps), len(self.steps)


@dataclass(eq=False)
class Step:
    """One that a simulator took.

    Attributes:
        reward: no other step has it.
        version: of the weights that acted; None: nobody knows.
        logp: that the simulator gave.
        sent: the gateway got it.
        may_miss: it may be in no batch, but in a counter.
        seen: it is in a batch.
    """

    simulator: Any
    episode: Episode
    offset: int
    observation: Any
    action: int
    reward: float
    after: Any
    version: Version | None
    ends: str = ""
    logp: float | None = None
    sent: bool = False
    may_miss: bool = False
    seen: bool = False


class Books:
    """Of one gateway.

    Args:
        remembers: the policy acts on the sum of what it saw in an episode.
        contexts: connectors add the frame before, and the last action and reward.
        masked: observations have masks.

    Attributes:
        known: steps that simulators took, by their rewards.
        ended: returns and lengths of episodes that were handed out.
        live: steps that were.
        wild: some simulator has sent damaged messages, and nobody knows what it did.
        weights: that there were.
    """

    def __init__(self, remembers: bool, contexts: bool, masked: bool) -> None:
        self.remembers, self.contexts, self.masked = remembers, contexts, masked
        self.known: dict[float, Step] = {}
        self.ended: Counter[tuple[float, int]] = Counter()
        self.live = 0
        self.wild = False
        self.weights: dict[Version, Any] = {}

    def legal(self, observation: Any) -> Any:
        """[2] which actions there are: of masks, the second one for some observations alone."""
        return np.array([True, not self.masked or observation[0] > 0])

    def check_batch(self, batch: EpisodeBatch) -> None:
        """It is what simulators did."""
        EpisodeBatch.from_tree(batch.to_tree())
        check_finite(batch)
        self.live += batch.live_steps
        for i, episode in enumerate(batch.episodes()):
            found = [self.known.get(float(reward)) for reward in episode.rewards]
            assert self.wild or None not in found, "a step that nobody took"
            if None in found or any(step.simulator.wild for step in found):
                continue
            first, last = found[0], found[-1]
            assert first.episode.id in (-1, episode.episode_id)
            first.episode.id = episode.episode_id
            assert found == first.episode.steps[episode.offset : episode.offset + len(found)]
            assert first.version in (None, Version(*episode.version))
            assert episode.terminated == (last.ends == "terminated")
            over = last.episode.cut or last.simulator.may_be_over
            rest = last.episode.sent[episode.offset + len(found) :]  # waited when it was over
            cut = over and not last.ends and all(s.may_miss and not s.seen for s in rest)
            truncated = last.ends == "truncated" or (cut and episode.truncated)
            assert episode.truncated == truncated
            assert not last.episode.closed, "an episode goes on that was truncated"
            last.episode.closed = episode.truncated
            if not episode.terminated:
                np.testing.assert_array_equal(self._plain(episode.last_observation), last.after)
            shown = self._plain(episode.observations)
            for step, observation, action, logp in zip(
                found, shown, episode.actions, episode.action_logp, strict=True
            ):
                assert not step.seen, "a step is in batches twice"
                step.seen = True
                np.testing.assert_array_equal(observation, step.observation)
                assert action == step.action
                expected = self._log_probability(step) if step.logp is None else step.logp
                np.testing.assert_allclose(logp, expected, rtol=1e-3, atol=1e-5)
            if batch.segment_starts[i] == 0:
                self._check_states(batch, int(batch.segment_rows[i]), first)

    def _plain(self, observations: Any) -> Any:
        return observations["observation"] if self.masked else observations

    def _log_probability(self, step: Step) -> Any:
        """Under the weights that acted."""
        seen = [each.observation for each in step.episode.steps[: step.offset + 1]]
        shown = np.sum(seen, 0) if self.remembers else seen[-1]
        inputs = torch.tanh(torch.from_numpy(shown @ self.weights[step.version]))
        inputs[~torch.from_numpy(self.legal(step.observation))] = -torch.inf
        return torch.log_softmax(inputs, 0)[step.action].item()

    def _check_states(self, batch: EpisodeBatch, row: int, first: Step) -> None:
        """That what was known before a row is what came before it."""
        before = first.episode.steps[: first.offset]
        if self.remembers:
            sums = np.sum([step.observation for step in before] or [np.zeros(3)], 0)
            np.testing.assert_allclose(batch.states["module"]["sum"][row], sums, atol=1e-4)
        if self.contexts:
            known = batch.states["connectors"]
            frame = before[-1].observation if before else first.observation
            np.testing.assert_array_equal(known["frame_stack"][row, 0], frame)
            last = known["previous_actions_and_rewards"]
            given = last["previous_action"][row], last["previous_reward"][row]
            assert given == ((before[-1].action, before[-1].reward) if before else (0, 0))
