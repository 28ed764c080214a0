"""The two updates of a learner, at once or beside their caller."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, overload

from juggler.learner.core.learner_core import LearnerCore, Metrics, Sample
from juggler.learner.data.passes import check_passes
from juggler.learner.process.updates_in_flight import UpdatesInFlight
from juggler.runtime.episodes.batch import EpisodeBatch

#: Batches of episodes by module id; a bare list is for the module "default".
Episodes = Mapping[str, Sequence[EpisodeBatch]]


class Updates:
    """What a learner is asked for, and what it refuses before it begins."""

    core: LearnerCore[Any]

    def __init__(self, updates_in_flight: int) -> None:
        """Args:
        updates_in_flight: with `async_update`, how many may be asked for and not finished.
        """
        self._in_flight = UpdatesInFlight(updates_in_flight)

    @overload
    def update_from_batch(
        self,
        batch: Sample,
        *,
        minibatch_size: int | None = None,
        num_epochs: int | None = None,
        async_update: Literal[False] = False,
    ) -> Metrics: ...

    @overload
    def update_from_batch(
        self,
        batch: Sample,
        *,
        minibatch_size: int | None = None,
        num_epochs: int | None = None,
        async_update: Literal[True],
    ) -> Future[Metrics]: ...

    def update_from_batch(
        self,
        batch: Sample,
        *,
        minibatch_size: int | None = None,
        num_epochs: int | None = None,
        async_update: bool = False,
    ) -> Metrics | Future[Metrics]:
        """One update on columns that are put together already, as a replay or a data set has them.

        Args:
            batch: columns by module id. IMPALA, PPO and APPO take those of a batch of episodes, as
                tensors or arrays; see `juggler.batch_of_columns`.
            minibatch_size: live steps in each step of the optimizer, about; of PPO in place of its
                `minibatches`. IMPALA and APPO, which estimate along whole rows, put whole rows
                together. None: as the config says, and without that the whole batch.
            num_epochs: passes over the batch, of PPO in place of its `epochs`. None: as the config
                says, and without that one.
            async_update: begin the update and return, once fewer than `updates_in_flight` others
                are unfinished. The batch must not be changed before it is done.

        Returns:
            Metrics; with `async_update` a handle, whose `result(timeout)` waits for them, or raises
            what the update raised, and whose `done()` says whether it would wait.

        Raises:
            TypeError: the algorithm learns from whole episodes.
            ValueError: a column is missing or does not fit, or nobody knows a module.
        """
        self._must_train_on("batch", "update_from_batch")
        check_passes(minibatch_size, num_epochs)
        passes = (minibatch_size, num_epochs)
        if async_update:
            return self._in_flight.begin(self._update_from_batch, batch, *passes)
        self.wait()
        return self._update_from_batch(batch, *passes)

    @overload
    def update_from_episodes(
        self,
        episodes: Episodes | Sequence[EpisodeBatch],
        *,
        minibatch_size: int | None = None,
        num_epochs: int | None = None,
        async_update: Literal[False] = False,
    ) -> Metrics: ...

    @overload
    def update_from_episodes(
        self,
        episodes: Episodes | Sequence[EpisodeBatch],
        *,
        minibatch_size: int | None = None,
        num_epochs: int | None = None,
        async_update: Literal[True],
    ) -> Future[Metrics]: ...

    def update_from_episodes(
        self,
        episodes: Episodes | Sequence[EpisodeBatch],
        *,
        minibatch_size: int | None = None,
        num_epochs: int | None = None,
        async_update: bool = False,
    ) -> Metrics | Future[Metrics]:
        """One update on episodes as they come from envrunners.

        Args:
            episodes: by module id; a bare list is for the module "default".
            minibatch_size: as for `update_from_batch`.
            num_epochs: the same.
            async_update: the same.

        Returns:
            As `update_from_batch`.

        Raises:
            TypeError: the algorithm does not learn from episodes.
            ValueError: there are no episodes, or nobody knows a module.
        """
        self._must_train_on("episodes", "update_from_episodes")
        check_passes(minibatch_size, num_epochs)
        passes = (minibatch_size, num_epochs)
        if async_update:
            return self._in_flight.begin(self._update_from_episodes, episodes, *passes)
        self.wait()
        return self._update_from_episodes(episodes, *passes)

    def wait(self) -> None:
        """Until no update is in flight; at once in the course of one."""
        self._in_flight.wait()

    def close(self) -> None:
        """Wait for updates in flight, and end their thread; there are no more with `async_update`
        afterwards. A learner that never had one needs no closing."""
        self._in_flight.close()

    @abstractmethod
    def _update_from_batch(
        self, batch: Sample, minibatch_size: int | None, num_epochs: int | None
    ) -> Metrics:
        """The update itself."""

    @abstractmethod
    def _update_from_episodes(
        self,
        episodes: Episodes | Sequence[EpisodeBatch],
        minibatch_size: int | None,
        num_epochs: int | None,
    ) -> Metrics:
        """The update itself."""

    def _must_train_on(self, kind: str, method: str) -> None:
        if kind not in self.core.trains_on:
            served = " or ".join(f"update_from_{kind}" for kind in sorted(self.core.trains_on))
            raise TypeError(f"{self.core.name} does not serve {method}: call {served}")
