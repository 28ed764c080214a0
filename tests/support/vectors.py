"""Vectors of scripted environments, and their expected batches."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from juggler.envrunner.environments import environment_processes
from juggler.envrunner.environments.environment_processes import EnvironmentProcesses
from juggler.envrunner.environments.environments_in_turn import (
    EnvironmentsInTurn,
    keep_own_finals,
)
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.sampler import Fragment
from support.scripted_environments import NativeScripted, Script, Scripted

MODES = list(AutoresetMode)
KINDS = ("in turn", "native", "async", "sync")


def vector_of(
    kind: str, mode: AutoresetMode, scripts: Sequence[Script], box: bool = False
) -> VectorEnv[Any, Any, Any]:
    """Scripted environments, one for each script."""
    if kind == "native":
        return NativeScripted(scripts, mode, box)
    functions = [functools.partial(Scripted, script, box) for script in scripts]
    return vector_of_functions(kind, mode, functions)


def vector_of_functions(
    kind: str, mode: AutoresetMode, functions: Sequence[Callable[[], Any]]
) -> VectorEnv[Any, Any, Any]:
    if kind == "sync" or mode is not AutoresetMode.SAME_STEP:
        vector = SyncVectorEnv(functions, copy=False, autoreset_mode=mode)
        keep_own_finals(vector)
        return vector
    if kind == "in turn":
        return EnvironmentsInTurn(functions, "scripted")
    with environments_in_threads():
        return EnvironmentProcesses(functions, 30.0, "scripted")


def seeds_of(kind: str, seed: int, count: int) -> list[int]:
    """Seeds of a vector's environments, from the vector's seed."""
    seeds = environment_seeds(seed, count)
    return [seeds[0] + i for i in range(count)] if kind == "native" else seeds


_WHERE = environment_processes.__name__


class _Thread(threading.Thread):
    """Has a process's own copies: a pickled function and pipes."""

    exitcode = 0

    def __init__(self, target: Callable[..., None], name: str, args: tuple[Any, ...]) -> None:
        index, function, *rest = args
        own = [
            Connection(os.dup(each.fileno())) if isinstance(each, Connection) else each
            for each in rest
        ]
        sent = pickle.loads(pickle.dumps(function))  # noqa: S301
        super().__init__(target=target, name=name, args=(index, sent, *own), daemon=True)

    def kill(self) -> None:
        """Does nothing: `close` has asked it to end."""


@contextmanager
def environments_in_threads() -> Iterator[None]:
    """Run vectors of processes in threads, within this block."""
    real = multiprocessing.get_context("forkserver")
    context = SimpleNamespace(
        Array=real.Array,
        RawArray=real.RawArray,
        Pipe=real.Pipe,
        Queue=SimpleQueue,
        Process=_Thread,
        set_forkserver_preload=lambda names: None,
    )
    library = SimpleNamespace(
        get_context=lambda name: context,
        parent_process=lambda: SimpleNamespace(pid=os.getpid()),
        current_process=lambda: SimpleNamespace(_config={}),
        TimeoutError=multiprocessing.TimeoutError,
    )
    without = ("start_forkserver", "die_with", "ignore_stop_signals", "set_title")
    with (
        patch("multiprocessing.get_context", library.get_context),
        patch.multiple(_WHERE, **dict.fromkeys(without, lambda *_: None)),
        patch(f"{_WHERE}.multiprocessing", library),
    ):
        yield


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
