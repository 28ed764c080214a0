"""Learner: a core with its state, on a device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias, Unpack, overload

import torch

from juggler.learner.config import Passes, given_passes
from juggler.learner.core.learner_core import LearnerCore, Metrics, Sample
from juggler.learner.core.metrics import mean_metrics, with_numbers
from juggler.learner.core.state import arrays_like, to_device
from juggler.learner.data.batch_columns import (
    checked_batch,
    must_be_finite,
    must_be_sample,
    must_have_column,
)
from juggler.learner.data.collate import collate
from juggler.learner.data.example import example_sample
from juggler.learner.data.sources import CircularBuffer, Queue
from juggler.learner.learner_state import LearnerState
from juggler.learner.optim.schedules import ReplacedSchedules
from juggler.learner.updates_in_flight import UpdatesInFlight
from juggler.runtime.connectors.learner_pipeline import LearnerPipeline, stacked
from juggler.runtime.episodes.batch import DEFAULT_MODULE, EpisodeBatch
from juggler.runtime.modules.columns import CONNECTOR_STATES, LIVE, MODULE_STATE
from juggler.runtime.nearest import one_of
from juggler.runtime.wire.trees import Tree

#: Batches of episodes by module id.
Episodes: TypeAlias = Mapping[str, Sequence[EpisodeBatch]]
Given: TypeAlias = Episodes | Sequence[EpisodeBatch]


class Learner(LearnerState):
    """Turns samples, batches or episodes into better parameters.

    It owns the state, its device, and the count of updates. No call waits for the device: metrics
    are tensors there, and `fetch_metrics` reads them.

    With `async_update`, updates run one after the other in a thread of their own. The other methods
    wait until no update is in flight, so that they see the results of all. Do not touch `state`
    before that.

    A subclass may override `preprocess_episodes`, `before_gradients` and `after_gradients`. One
    that trains with another library overrides `step`, `get_params`, `save` and `restore`; with
    `async_update`, the last three must call `wait` first.
    """

    def __init__(
        self,
        core: LearnerCore[Any],
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        source: Iterator[Sample] | None = None,
        pipelines: Mapping[str, LearnerPipeline] | None = None,
        updates_in_flight: int = 2,
    ) -> None:
        """Args:
        core: the algorithm.
        seed: of the initial parameters.
        device: where to compute.
        source: samples for `step`, if it is called without one.
        pipelines: by module id, connectors that process the module's batches and episodes on the
            device, before the core learns from them.
        updates_in_flight: with `async_update`, the most unfinished updates.

        Raises:
            ValueError: what the algorithm keeps of samples would not fit into memory.
        """
        self._in_flight = UpdatesInFlight(updates_in_flight)
        self.core = core
        self.config = core.config
        self.device = torch.device(device)
        self.source = source
        self.pipelines = dict(pipelines or {})
        for pipeline in self.pipelines.values():
            pipeline.add_up_with(self.sums)
        self.state = to_device(core.init(seed), self.device)
        self._seed = seed
        self._data = core.data_source(seed)
        # A hook that looks at samples is to see stacks.
        keeps_once = self._data.keeps_frames or self._data.keeps_rows
        if keeps_once and type(self).before_gradients is Learner.before_gradients:
            for pipeline in self.pipelines.values():
                pipeline.keep_frames_once(rows_stay=self._data.keeps_rows)
        example = example_sample(
            core.batch_spaces(), self.pipelines, self.example_states(), core.critic_spaces()
        )
        #: Bytes of this host's memory that the algorithm will keep of samples.
        self.kept_bytes = sum(map(self._data.expect, to_device(example, self.device).values()))
        self._schedules = ReplacedSchedules(core.name, core.schedules)
        self.updates = 0
        self.collate_seconds = 0.0  # spent on turning episodes into samples

    def step(self, sample: Sample | None = None, **passes: Unpack[Passes]) -> Metrics:
        """One update on the given sample, or on the next one of the source; no pipeline changes it.

        Args:
            sample: columns on any device, by module id.
            passes: as in `update_from_batch`.

        Raises:
            ValueError: there is neither a sample nor a source, the sample lacks a column, or there
                is no such module.
            StopIteration: the source is exhausted.
        """
        passes = given_passes(passes)
        self.wait()
        if sample is None:
            if self.source is None:
                raise ValueError("step() without a sample needs a learner with a source")
            sample = next(self.source)
        must_be_sample(sample, self.core.batch_spaces())
        sample = self.before_gradients(to_device(sample, self.device))
        framed = {
            key: each
            for key, each in self.pipelines.items()
            if key in sample and each.leaves_stacks_out(sample[key])
        }
        metrics = []
        for drawn in self._due(sample):
            due = stacked(drawn, framed)
            try:
                if not passes:
                    output = self.core.step(self.state, due, self)
                else:
                    parts = self._parts(due, passes.get("minibatch_size"))
                    epochs = passes.get("num_epochs")
                    output = self.core.step_in_parts(self.state, due, self, parts, epochs)
            except KeyError as error:
                must_have_column(due, error, self.core.name)
                raise
            self.state = output.state
            self._data.update_priorities(next(iter((output.priorities or {}).values()), None))
            self.progresses()
            of_data = dict.fromkeys(drawn, self._data.metrics())
            metrics.append(with_numbers(output.metrics, of_data, self.device))
        self.updates += 1
        return mean_metrics(metrics)

    def use_values(self, values: Mapping[str, float]) -> None:
        """Use these numbers in place of the core's schedules from the next update on. All schedules
        that have no number here are those of the configuration again.

        Args:
            values: by the name of the schedule, such as "lr".

        Raises:
            ValueError: the core has no such schedule; nothing has changed.
        """
        if values != self._schedules.values:
            self.wait()
            self._schedules.use(values)

    @overload
    def update_from_batch(
        self, batch: Sample, *, async_update: Literal[False] = False, **passes: Unpack[Passes]
    ) -> Metrics: ...

    @overload
    def update_from_batch(
        self, batch: Sample, *, async_update: Literal[True], **passes: Unpack[Passes]
    ) -> Future[Metrics]: ...

    def update_from_batch(
        self, batch: Sample, *, async_update: bool = False, **passes: Unpack[Passes]
    ) -> Metrics | Future[Metrics]:
        """One update on columns, such as those of a replay buffer or a data set.

        Args:
            batch: columns by module id. All algorithms that ship take those of a batch of episodes,
                as tensors or arrays: docs/learners.md lists them.
            async_update: start the update and return. If `updates_in_flight` others are unfinished,
                wait for one of them first. Do not change the batch before the update is done.
            passes: `minibatch_size` is about how many live steps there are in each optimizer step;
                it replaces PPO's `minibatches`. For IMPALA and APPO, which estimate returns along
                rows, a minibatch is made of whole rows. `num_epochs` is the number of passes over
                the batch; it replaces PPO's `epochs`. Without them, or with None, the config
                decides, and by default there is one pass over the whole batch.

        Returns:
            Metrics. With `async_update`, a future: its `result(timeout)` waits for them, or raises
            the error of the update.

        Raises:
            TypeError: the algorithm learns only from episodes.
            ValueError: a column is missing, does not fit or has a number that is not finite, or a
                module is unknown.
        """
        self.check_serves("batch")
        passes = given_passes(passes)
        if async_update:
            return self._in_flight.begin(self.update_from_batch, batch, **passes)
        self.wait()
        if spaces := self.core.batch_spaces():
            stored = {key: each.stored_space for key, each in self.pipelines.items()}
            spaces = {key: (stored.get(key, seen), acts) for key, (seen, acts) in spaces.items()}
            batch = checked_batch(batch, spaces, self.example_states(), self.core.critic_spaces())
        return self.step(self.prepared(batch), **passes)

    @overload
    def update_from_episodes(
        self, episodes: Given, *, async_update: Literal[False] = False, **passes: Unpack[Passes]
    ) -> Metrics: ...

    @overload
    def update_from_episodes(
        self, episodes: Given, *, async_update: Literal[True], **passes: Unpack[Passes]
    ) -> Future[Metrics]: ...

    def update_from_episodes(
        self, episodes: Given, *, async_update: bool = False, **passes: Unpack[Passes]
    ) -> Metrics | Future[Metrics]:
        """One update on episodes from EnvRunners.

        Args:
            episodes: by module id; a plain list is for the module "default".
            async_update: as in `update_from_batch`.
            passes: as in `update_from_batch`.

        Returns:
            As `update_from_batch`.

        Raises:
            TypeError: the algorithm does not learn from episodes.
            ValueError: there are no episodes, a module is unknown, or a number is not finite.
        """
        self.check_serves("episodes")
        passes = given_passes(passes)
        if async_update:
            return self._in_flight.begin(self.update_from_episodes, episodes, **passes)
        return self.step(self._sample(episodes, checked=True), **passes)

    def check_serves(self, kind: str) -> None:
        """Raises:
        TypeError: the algorithm does not learn from this kind of data, "batch" or "episodes".
        """
        if kind not in self.core.trains_on:
            served = one_of(f"update_from_{kind}" for kind in sorted(self.core.trains_on))
            raise TypeError(f"{self.core.name} does not serve update_from_{kind}: call {served}")

    def before_gradients(self, sample: Sample) -> Sample:
        """A hook for subclasses: takes the sample of an update, on the device, before gradients
        are computed; returns the sample to use instead."""
        return sample

    def sample_from_episodes(self, episodes: Given) -> Sample:
        """Episodes as a sample for `step`. Its copy to the device may still be under way.

        Learners of a group do this together, once for each update."""
        return self._sample(episodes)

    def _sample(self, episodes: Given, *, checked: bool = False) -> Sample:
        self.wait()
        started = time.perf_counter()
        prepared = self.prepared(self.collated(episodes, checked=checked))
        self.collate_seconds += time.perf_counter() - started
        return prepared

    def collated(self, episodes: Given, *, checked: bool = False) -> Sample:
        """Episodes as a sample on the host, before any pipeline; in page-locked memory for a GPU.
        This may be called in any thread, beside updates.

        Args:
            episodes: as in `update_from_episodes`.
            checked: whether numbers that are not finite are a ValueError. EnvRunners look at
                theirs.
        """
        found = self.preprocess_episodes(_by_module(episodes))
        if checked:
            for module_id, batches in found.items():
                must_be_finite(module_id, batches)
        pin_memory = self.device.type == "cuda"
        return {key: collate(batches, pin_memory=pin_memory) for key, batches in found.items()}

    def prepared(self, sample: Sample) -> Sample:
        """The sample for `step`: one from `collated`, on the device, after the pipelines.

        Learners of a group do this together, once for each update."""
        self.wait()
        prepared: dict[str, Any] = to_device(sample, self.device)
        for module_id, pipeline in self.pipelines.items():
            if module_id in prepared:
                prepared[module_id] = pipeline(prepared[module_id])
            elif self.in_group:
                pipeline.without_batch(self.device)
        return prepared

    def preprocess_episodes(self, episodes: Episodes) -> Episodes:
        """A hook for subclasses: changes episodes before anything is computed from them.

        In a learner process with a GPU it is called in another thread, ahead of the update, and
        once more if some of the episodes turn out to be too old."""
        return episodes

    def example_states(self) -> dict[str, dict[str, Tree]]:
        """By module id, an example of the `states` that episodes need for each row: arrays [...] of
        the expected shapes and dtypes."""
        examples: dict[str, dict[str, Tree]] = {}
        for module_id, state in self.core.initial_states().items():
            examples[module_id] = {MODULE_STATE: arrays_like(state)}
        for module_id, pipeline in self.pipelines.items():
            if contexts := pipeline.example_contexts():
                examples.setdefault(module_id, {})[CONNECTOR_STATES] = contexts
        return examples

    def wait(self) -> None:
        """Wait until no update is in flight. Returns at once if called from within an update."""
        self._in_flight.wait()

    def close(self) -> None:
        """Wait for updates in flight, and end their thread: `async_update` does not work any more.
        A learner that never used it need not be closed."""
        self._in_flight.close()

    def _due(self, sample: Sample) -> Iterator[Sample]:
        """The samples that are to be learned from, now that this one has come.

        Raises:
            ValueError: it lacks a column that the core's data source needs.
        """
        try:
            if isinstance(self._data, Queue | CircularBuffer):
                yield from self._data.add(sample, self.sums)
                return
            for module_id, columns in sample.items():
                for drawn in self._data.add(columns, self.sums):
                    yield {module_id: drawn}
        except KeyError as error:
            must_have_column(sample, error, self.core.name)
            raise

    def _parts(self, sample: Sample, minibatch_size: int | None) -> int | None:
        """The number of parts with about this many live steps, the same at every learner of a
        group. The host waits for the device here."""
        if minibatch_size is None:
            return None
        live = [columns[LIVE].sum() for columns in sample.values()]  # [] each
        most = torch.stack(live).max().double()  # []
        return max(1, -(-int(self.sums(most)) // minibatch_size))


def _by_module(episodes: Given) -> Episodes:
    return episodes if isinstance(episodes, Mapping) else {DEFAULT_MODULE: episodes}
