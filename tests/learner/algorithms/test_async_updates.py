"""Asynchronous updates: order, number, errors, the end, and subclasses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.batches import MakeBatch
from support.small_cores import make_core

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.core.learner_core import Aux, Columns, Grads
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch


class Gated(Learner):
    """Waits in the middle of an update until a test releases it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.go_on, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        super().__init__(*args, **options)

    def before_gradients(self, sample: Columns) -> Columns:
        self.begun.release()
        assert self.go_on.acquire(timeout=60)
        return sample


def make_learner(kind: type[Learner] = Learner, core: Any = Impala, **options: Any) -> Any:
    config = PpoConfig() if core is Ppo else ImpalaConfig()
    return kind(core(make_core("impala")._make_module, config), **options)


def weights(learner: Learner) -> list[Any]:
    return [array.tolist() for array in learner.get_weights().values()]


@pytest.mark.parametrize("kind", ["episodes", "batch"])
def test_asynchronous_updates_are_the_same_in_the_same_order(
    make_batch: MakeBatch, kind: str
) -> None:
    one, other = make_learner(), make_learner()
    batches = [make_batch(seed=seed) for seed in range(6)]
    given: list[Any] = [[batch] if kind == "episodes" else collate([batch]) for batch in batches]
    expected = [fetch_metrics(getattr(one, f"update_from_{kind}")(each)) for each in given]
    handles = [getattr(other, f"update_from_{kind}")(each, async_update=True) for each in given[:5]]
    last = getattr(other, f"update_from_{kind}")(given[5])  # and one that waits for its turn
    assert all(handle.done() for handle in handles)
    assert [fetch_metrics(handle.result()) for handle in handles] == expected[:5]
    assert fetch_metrics(last) == expected[5]
    assert other.updates == 6
    assert weights(one) == weights(other)
    other.close()


def test_only_so_many_are_in_flight_and_the_next_one_waits(make_batch: MakeBatch) -> None:
    learner = make_learner(Gated, updates_in_flight=2)
    handles: list[Any] = []
    first_done: list[bool] = []  # when each one is in flight
    came = threading.Semaphore(0)

    def ask() -> None:
        for batch in (make_batch(), make_batch(), make_batch()):
            handles.append(learner.update_from_episodes([batch], async_update=True))
            first_done.append(handles[0].done())
            came.release()

    asking = threading.Thread(target=ask)
    asking.start()
    for begun in (learner.begun, came, came):
        assert begun.acquire(timeout=60)
    assert not learner._in_flight._places.acquire(blocking=False), "there is no place for a third"
    assert not handles[0].cancel()
    with pytest.raises(TimeoutError, match=r"unfinished after 0.01 s"):
        handles[0].result(timeout=0.01)
    learner.go_on.release(3)
    asking.join(timeout=60)
    assert first_done == [False, False, True]
    assert [handle.result(timeout=60)["skipped"] for handle in handles] == [0, 0, 0]
    learner.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda learner, batch: learner.get_params(),
        lambda learner, batch: learner.get_weights(),
        lambda learner, batch: learner.save(),
        lambda learner, batch: learner.restore(*make_learner().save()),
        lambda learner, batch: learner.forget(),
        lambda learner, batch: learner.sample_from_episodes([batch]),
        lambda learner, batch: learner.step(collate([batch])),
        lambda learner, batch: learner.update_from_episodes([batch]),
        lambda learner, batch: learner.update_from_batch(collate([batch])),
        lambda learner, batch: learner.wait(),
    ],
)
def test_other_calls_wait_for_what_is_in_flight(
    make_batch: MakeBatch, call: Callable[[Learner, EpisodeBatch], Any]
) -> None:
    learner = make_learner(Gated)
    handle = learner.update_from_episodes([make_batch()], async_update=True)
    waits, wait = threading.Event(), learner._in_flight.wait
    found: list[bool] = []

    def noted() -> None:
        if threading.current_thread() is other:
            waits.set()
        wait()

    def calling() -> None:
        call(learner, make_batch(seed=1))
        found.append(handle.done())
        waits.set()

    learner._in_flight.wait = noted
    other = threading.Thread(target=calling)
    other.start()
    assert learner.begun.acquire(timeout=60)
    assert waits.wait(60)
    learner.go_on.release(2)
    other.join(timeout=60)
    assert found == [True]
    learner.close()


def test_an_error_comes_out_of_the_handle_and_the_next_update_goes_on(
    make_batch: MakeBatch,
) -> None:
    learner = make_learner()
    bad = learner.update_from_episodes([], async_update=True)
    good = learner.update_from_episodes([make_batch()], async_update=True)
    with pytest.raises(ValueError, match="no batches"):
        bad.result()
    assert good.result()["skipped"] == 0
    assert learner.updates == 1
    learner.close()


def test_an_error_that_nobody_asked_for_comes_out_of_the_next_call_that_waits(
    make_batch: MakeBatch,
) -> None:
    learner = make_learner()
    learner.update_from_episodes([], async_update=True)
    with pytest.raises(ValueError, match="no batches"):
        learner.get_weights()
    learner.get_weights()  # once is enough
    learner.update_from_episodes([make_batch()], async_update=True)
    learner.update_from_episodes([], async_update=True)
    with pytest.raises(ValueError, match="no batches"):
        learner.close()
    assert learner.updates == 1


def test_close_finishes_what_is_in_flight_and_ends_the_thread(make_batch: MakeBatch) -> None:
    learner = make_learner()
    before = set(threading.enumerate())  # some of earlier tests may end meanwhile
    handles = [learner.update_from_episodes([make_batch()], async_update=True) for _ in range(2)]
    assert len(set(threading.enumerate()) - before) == 1
    learner.close()
    assert all(handle.done() for handle in handles)
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="the learner is closed"):
        learner.update_from_episodes([make_batch()], async_update=True)
    learner.update_from_episodes([make_batch()])
    learner.close()
    assert learner.updates == 3


def test_some_update_must_be_allowed_to_be_in_flight() -> None:
    with pytest.raises(ValueError, match="updates_in_flight = 0"):
        make_learner(updates_in_flight=0)


class Hooked(Learner):
    """Learns from rewards that are twice as high, by half the gradient."""

    def before_gradients(self, sample: Columns) -> Columns:
        self.seen = getattr(self, "seen", 0) + 1
        return {**sample, "rewards": sample["rewards"] * 2}

    def after_gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        self.gradients_seen = getattr(self, "gradients_seen", 0) + 1
        return grads / 2, aux


def test_a_subclass_changes_samples_before_and_gradients_after(make_batch: MakeBatch) -> None:
    hooked, plain = make_learner(Hooked), make_learner()
    batch = make_batch()
    doubled = make_batch(rewards=batch.rewards * 2)
    expected, aux = plain.core.grads(plain.state, collate([doubled]))
    found = fetch_metrics(hooked.update_from_episodes([batch]))
    norm = torch.linalg.vector_norm(expected).item()
    assert found["grad_norm"] == pytest.approx(norm / 2)
    output = plain.core.apply(plain.state, expected / 2, aux)
    assert torch.equal(hooked.state["parameters"], output.state["parameters"])
    assert (hooked.seen, hooked.gradients_seen) == (1, 1)


def test_hooks_are_called_for_every_gradient_of_an_algorithm_with_several(
    make_batch: MakeBatch,
) -> None:
    learner = make_learner(Hooked, core=Ppo)
    learner.update_from_episodes([make_batch(8, 8)])
    config = learner.config
    assert (learner.seen, learner.gradients_seen) == (1, config.epochs * config.minibatches)


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("impala", ["rewards", "action_logp", "last_observations", "live"]),
        ("ppo", ["rewards", "action_logp", "last_observations", "live"]),
        ("dqn", ["rewards", "observations", "live"]),  # a replay keeps rows of the sample
    ],
)
def test_a_sample_that_lacks_a_column_is_refused_by_its_name(
    make_batch: MakeBatch, algorithm: str, keys: list[str]
) -> None:
    for key in keys:
        learner = Learner(make_core(algorithm))
        sample = {name: x for name, x in collate([make_batch()]).items() if name != key}
        before = learner.state
        with pytest.raises(ValueError, match=f"has no column '{key}', which '{algorithm}' n"):
            learner.step(sample)
        assert learner.state is before
        assert learner.updates == 0


def test_a_key_that_a_module_misses_by_itself_stays_an_error_of_its_own(
    make_batch: MakeBatch,
) -> None:
    class Clumsy(Impala):
        def loss(self, *args: Any) -> Any:
            raise KeyError("rewards")

    with pytest.raises(KeyError, match="rewards"):
        make_learner(core=Clumsy).step(collate([make_batch()]))
