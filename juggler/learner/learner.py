"""Learner: a core with its state, on a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Literal, TypeAlias, Unpack, overload

import torch
from torch import Tensor

from juggler.learner.config import Passes, given_passes
from juggler.learner.core.learner_core import Aux, Columns, Grads, LearnerCore, Metrics, Params
from juggler.learner.core.mean_metrics import mean_metrics, with_numbers
from juggler.learner.core.state_trees import StateMismatch, arrays_like, tensors_like, to_device
from juggler.learner.data.collate import collate
from juggler.learner.data.validation import (
    as_tensors,
    checked_batch,
    example_sample,
    must_be_columns,
    must_be_episodes,
    must_be_finite,
    must_have_column,
)
from juggler.learner.group.peers import (
    Peers,
    mean_over_learners,
    state_hash,
    take_over_newest,
)
from juggler.learner.optim.optimizers import Schedule
from juggler.runtime.checkpoints.checkpoint import PIPELINES, REPLAY
from juggler.runtime.connectors.pipelines import LearnerPipeline
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules.columns import CONNECTOR_STATES, LIVE, MODULE_STATE
from juggler.runtime.near_matches import nearest, one_of
from juggler.runtime.wire.trees import Tree

#: Batches of a module's episodes.
Episodes: TypeAlias = Sequence[EpisodeBatch]


class Learner:
    """Trains one module on samples, batches or episodes.

    It owns the state, its device, and the count of updates. No call waits for the device: metrics
    are tensors there, and `fetch_metrics` reads them. It is the `Seam` that its core sends
    gradients and sums through, alone or in a group.

    With `async_update`, updates run one after another in a separate thread. The other methods wait
    until no update is in flight, so that they see all results. Do not access `state` before that.

    A subclass may override `preprocess_episodes`, `before_gradients` and `after_gradients`. To
    train with another library, override `step`, `get_params`, `save` and `restore`; with
    `async_update`, the last three must call `wait` first.

    Args:
        core: the algorithm.
        seed: seed of the initial parameters.
        device: device to compute on.
        source: samples for calls of `step` without a sample.
        pipeline: connectors that process batches and episodes on the device, before the core
            learns from them.
        updates_in_flight: with `async_update`, maximum number of unfinished updates.

    Raises:
        ValueError: the samples that the algorithm keeps would not fit into memory.
    """

    progresses: Callable[[], None] = staticmethod(lambda: None)
    """Called after each part of an update, to show that a long update does not hang."""

    _peers: Peers | None = None

    def __init__(
        self,
        core: LearnerCore[Any],
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        source: Iterator[Columns] | None = None,
        pipeline: LearnerPipeline | None = None,
        updates_in_flight: int = 2,
    ) -> None:
        if isinstance(core, type) or not hasattr(core, "data_source"):
            found = (core if isinstance(core, type) else type(core)).__name__
            raise TypeError(f"give a core, such as Impala(make_module, config), not {found}")
        self._in_flight = UpdatesInFlight(updates_in_flight)
        self.core = core
        self.config = core.config
        self.device = torch.device(device)
        self.source = source
        self.pipeline = pipeline
        if pipeline is not None:
            pipeline.add_up_with(self.sums)
        self.state = to_device(core.init(seed), self.device)
        self._seed = seed
        #: Selects the samples to learn from.
        self.data = core.data_source(seed)
        # An overridden hook receives samples with stacks.
        keeps_once = self.data.keeps_frames or self.data.keeps_rows
        keeps_once &= type(self).before_gradients is Learner.before_gradients
        if keeps_once and pipeline is not None:
            pipeline.keep_frames_once(rows_stay=self.data.keeps_rows)
        #: Bytes of this host's memory for the samples that the algorithm will keep.
        self.kept_bytes = 0.0
        if spaces := core.batch_spaces():
            critic, states = core.critic_space(), self.example_states()
            example = example_sample(*spaces, pipeline, states, critic)
            self.kept_bytes = self.data.expect(to_device(example, self.device))
        self._schedules, self._values = dict(core.schedules), dict[str, float]()
        self.updates = 0
        self.collate_seconds = 0.0  # spent on converting episodes to samples

    def step(self, sample: Columns | None = None, **passes: Unpack[Passes]) -> Metrics:
        """Make one update on a sample, or on the source's next.

        Pipelines are not applied.

        Args:
            sample: columns on any device.
            passes: as in `update_from_batch`.

        Raises:
            ValueError: there is neither a sample nor a source, or a column is missing.
            StopIteration: the source is exhausted.
        """
        passes = given_passes(passes)
        self.wait()
        if sample is None:
            if self.source is None:
                raise ValueError("step() without a sample needs a learner with a source")
            sample = next(self.source)
        must_be_columns(sample)
        sample = self.before_gradients(to_device(sample, self.device))
        # Samples from elsewhere may have whole stacks, which stay as they are.
        stacks = self.pipeline is not None and self.pipeline.leaves_stacks_out(sample)
        metrics = []
        for drawn in self._due(sample):
            due = self.pipeline.stacked(dict(drawn)) if self.pipeline and stacks else drawn
            try:
                core = self.core
                if passes:
                    parts = self._parts(due, passes.get("minibatch_size"))
                    core = core.in_parts(parts, passes.get("num_epochs"))
                output = core.step(self.state, due, self)
            except KeyError as error:
                must_have_column(due, error, self.core.name)
                raise
            self.state = output.state
            # The source needs the priorities of this step before it draws again.
            self.data.update_priorities(output.priorities)
            self.progresses()
            metrics.append(with_numbers(output.metrics, self.data.metrics(), self.device))
        self.updates += 1
        return mean_metrics(metrics)

    def use_values(self, values: Mapping[str, float]) -> None:
        """Override the core's schedules with numbers, starting with the next update.

        Other schedules return to the configuration's values.

        Args:
            values: numbers by the name of the schedule, such as "lr".

        Raises:
            ValueError: the core has no such schedule; nothing has changed.
        """
        if values == self._values:
            return
        for key in values:
            if key not in self._schedules:
                raise ValueError(
                    f"{self.core.name} has no schedule {key!r}{nearest(key, self._schedules)}"
                )
        self.wait()
        replaced = {key: Schedule(value) for key, value in values.items()}
        self.core.schedules.update({**self._schedules, **replaced})
        self._values = dict(values)

    @overload
    def update_from_batch(
        self, batch: Columns, *, async_update: Literal[False] = False, **passes: Unpack[Passes]
    ) -> Metrics: ...

    @overload
    def update_from_batch(
        self, batch: Columns, *, async_update: Literal[True], **passes: Unpack[Passes]
    ) -> Future[Metrics]: ...

    def update_from_batch(
        self, batch: Columns, *, async_update: bool = False, **passes: Unpack[Passes]
    ) -> Metrics | Future[Metrics]:
        """Make one update on columns, as from a data set.

        Args:
            batch: columns by name. Built-in algorithms need the columns of a batch of episodes, as
                tensors or arrays: docs/learners.md lists them.
            async_update: start the update and return. If `updates_in_flight` updates are
                unfinished, wait for one of them first. Do not change the batch before the update is
                done.
            passes: `minibatch_size` is the approximate number of live steps in each optimizer step;
                it replaces PPO's `minibatches`. For IMPALA and APPO, which estimate returns along
                rows, a minibatch consists of whole rows. `num_epochs` is the number of passes over
                the batch; it replaces PPO's `epochs`. Without them, or with None, the config
                decides; the default is one pass over the whole batch.

        Returns:
            Metrics. With `async_update`, a future: its `result(timeout)` waits for them, or raises
            the error of the update.

        Raises:
            TypeError: the algorithm learns only from episodes.
            ValueError: a column is missing, does not fit or has a number that is not finite.
        """
        self.check_serves("batch")
        passes = given_passes(passes)
        if async_update:
            return self._in_flight.begin(self.update_from_batch, batch, **passes)
        self.wait()
        if spaces := self.core.batch_spaces():
            seen = spaces[0] if self.pipeline is None else self.pipeline.stored_space
            critic, states = self.core.critic_space(), self.example_states()
            batch = checked_batch(batch, seen, spaces[1], states, critic)
        else:
            must_be_columns(batch)
            batch = as_tensors(batch)
        return self.step(self.prepared(batch), **passes)

    @overload
    def update_from_episodes(
        self, episodes: Episodes, *, async_update: Literal[False] = False, **passes: Unpack[Passes]
    ) -> Metrics: ...

    @overload
    def update_from_episodes(
        self, episodes: Episodes, *, async_update: Literal[True], **passes: Unpack[Passes]
    ) -> Future[Metrics]: ...

    def update_from_episodes(
        self, episodes: Episodes, *, async_update: bool = False, **passes: Unpack[Passes]
    ) -> Metrics | Future[Metrics]:
        """Make one update on episodes from EnvRunners.

        Args:
            episodes: batches of the module's episodes.
            async_update: as in `update_from_batch`.
            passes: as in `update_from_batch`.

        Returns:
            See `update_from_batch`.

        Raises:
            TypeError: the algorithm does not learn from episodes.
            ValueError: there are no episodes, or a number is not finite.
        """
        self.check_serves("episodes")
        passes = given_passes(passes)
        if async_update:
            return self._in_flight.begin(self.update_from_episodes, episodes, **passes)
        return self.step(self._sample(episodes, checked=True), **passes)

    def check_serves(self, kind: str) -> None:
        """Raise TypeError if the algorithm cannot learn from "batch" or "episodes"."""
        if kind not in self.core.trains_on:
            served = one_of(f"update_from_{kind}" for kind in sorted(self.core.trains_on))
            raise TypeError(f"{self.core.name} does not serve update_from_{kind}: call {served}")

    def before_gradients(self, sample: Columns) -> Columns:
        """Hook for subclasses: transform an update's sample on the device."""
        return sample

    def sample_from_episodes(self, episodes: Episodes) -> Columns:
        """Convert episodes to a sample for `step`, copied asynchronously.

        Learners of a group do this together, once per update.
        """
        return self._sample(episodes)

    def _sample(self, episodes: Episodes, *, checked: bool = False) -> Columns:
        self.wait()
        started = time.perf_counter()
        prepared = self.prepared(self.collated(episodes, checked=checked))
        self.collate_seconds += time.perf_counter() - started
        return prepared

    def collated(self, episodes: Episodes, *, checked: bool = False) -> Columns:
        """Collate episodes on the host; `prepared` does the rest.

        For a GPU, the result is in page-locked memory. Any thread may call this during updates.

        Args:
            episodes: as in `update_from_episodes`.
            checked: whether to raise ValueError for numbers that are not finite. Batches of
                EnvRunners have already been checked.
        """
        must_be_episodes(episodes)
        found = self.preprocess_episodes(episodes)
        if checked:
            must_be_finite(found)
        return collate(found, pin_memory=self.device.type == "cuda")

    def prepared(self, sample: Columns) -> Columns:
        """Copy a `collated` sample to the device, and run the pipeline.

        Learners of a group do this together, once per update.
        """
        self.wait()
        prepared: dict[str, Any] = to_device(sample, self.device)
        return prepared if self.pipeline is None else self.pipeline(prepared)

    def preprocess_episodes(self, episodes: Episodes) -> Episodes:
        """Hook for subclasses: transform episodes before anything is computed from them.

        In a learner process with a GPU it is called in another thread, ahead of the update, and
        again if some of the episodes turn out to be too old."""
        return episodes

    def example_states(self) -> dict[str, Tree]:
        """Return an example of the `states` of an episode row, arrays [...]."""
        examples: dict[str, Tree] = {}
        if state := self.core.initial_state():
            examples[MODULE_STATE] = arrays_like(state)
        if self.pipeline is not None and (contexts := self.pipeline.example_contexts()):
            examples[CONNECTOR_STATES] = contexts
        return examples

    def wait(self) -> None:
        """Wait for all updates in flight, unless called from one."""
        self._in_flight.wait()

    def close(self) -> None:
        """Finish the updates in flight and their thread, ending `async_update`.

        A learner that has never used it does not have to be closed.
        """
        self._in_flight.close()

    def get_params(self) -> Params:
        """Return parameters and buffers for acting, by name.

        Parameters are in the `weights_dtype` of the config. Later updates do not change them.
        """
        self.wait()
        return self.core.get_params(self.state)

    def get_weights(self) -> dict[str, Tree]:
        """Return weights as host arrays; waits for updates on the device."""
        return arrays_like(self.get_params())

    def set_weights(self, weights: Mapping[str, Tree], *, whole: bool = False) -> None:
        """Continue with parameters and buffers from elsewhere.

        The optimizer and other state of the algorithm, such as a target network, are reset. Kept
        samples are discarded, even saved ones. Counts and the states of pipelines continue.

        Args:
            weights: name -> array, as from `get_weights` or, for a module, `juggler.read_weights`.
                Missing parameters and buffers do not change.
            whole: whether missing weights are an error.

        Raises:
            StateMismatch: the weights do not fit the learner's module; nothing has changed.
        """
        self.wait()
        self.state = self.core.with_weights(self.state, weights, self._seed, whole=whole)
        self._discard_samples()

    def reset(self, seed: int) -> None:
        """Reset parameters (from this seed), optimizer and schedules.

        All kept samples are discarded, even saved ones. The number of updates and the states of
        pipelines continue.
        """
        self.wait()
        self.state = to_device(self.core.init(seed), self.device)
        self._discard_samples()

    def save(self) -> tuple[dict[str, Tree], dict[str, Any]]:
        """Return the state for `restore`: arrays by name, and values for JSON."""
        self.wait()
        tree: dict[str, Tree] = {DEFAULT_MODULE: self.core.state_to_tree(self.state)}
        if learned := self._pipeline_state():
            tree[PIPELINES] = {DEFAULT_MODULE: arrays_like(learned)}
        if kept := self.data.state():
            tree[REPLAY] = kept
        return tree, {"algorithm": self.core.name, "updates": self.updates}

    def forget(self) -> None:
        """Discard unsaved samples, as a learner restored from `save` would."""
        self.wait()
        self.data.clear()

    # -- with other learners ----------------------------------------------------------------------

    @property
    def in_group(self) -> bool:
        """Whether updates are made together with other learners."""
        return self._peers is not None

    @property
    def rank(self) -> int:
        """See `Seam`."""
        return 0 if self._peers is None else self._peers.rank

    def after_gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        """Hook for subclasses: transform reduced gradients before they are clipped."""
        return grads, aux

    def why_alone(self) -> str:
        """Return why updates cannot be shared with other learners; "": they can."""
        if not self.core.trains_in_groups:
            return f"{self.core.name} cannot train in a group of learners"
        return ""

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        """See `Seam`."""
        self.progresses()
        if self._peers is not None:
            grads, aux = mean_over_learners(grads, aux, self._peers.sum)
        return self.after_gradients(grads, aux)

    def sums(self, x: Tensor) -> Tensor:
        """See `Seam`."""
        return x if self._peers is None else self._peers.sum(x)

    def join(self, peers: Peers | None) -> int:
        """Make updates together with other learners; None: alone again.

        All continue from the state of the learner with the most updates, and without unsaved
        samples. They then make each update together, each on its own sample, with the result of a
        single learner on all samples. If an update fails at only some learners, the others are one
        update ahead; the next `join` gives all learners the newest state.

        Returns:
            A hash of the state, the same at all learners.

        Raises:
            PeerLost: a learner is gone; this learner has not changed, or has taken over a state.
            ValueError: the learner cannot join a group, see `why_alone`.
        """
        self.forget()
        self.leave()
        if peers is None:
            found, rank = state_hash(self), 0
        elif why := self.why_alone():
            raise ValueError(why)
        else:
            take_over_newest(self, peers)
            found, rank = peers.wait_for_all(lambda: state_hash(self)), peers.rank
        self._peers = peers
        self.data.draw_apart(rank)
        return found

    def leave(self) -> None:
        """Leave the group, if any."""
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close()

    # -- state ------------------------------------------------------------------------------------

    def restore(self, tree: Tree, extras: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            StateMismatch: it is from another module, optimizer, algorithm or pipeline; nothing has
                changed.
            ValueError: its samples cannot be kept here; nothing has changed, except that without
                enough memory no samples are kept.
        """
        if extras.get("algorithm") != self.core.name:
            raise StateMismatch(
                f"the checkpoint is of algorithm {extras.get('algorithm')!r}; "
                f"this learner runs {self.core.name!r}"
            )
        self.wait()
        updates = int(extras["updates"])
        state, learned, kept = self._fitting(tree)
        self.data.restore(kept, self.device)
        self.state = state
        if self.pipeline is not None and learned:
            self.pipeline.set_state(learned)
        self.updates = updates

    def must_fit(self, tree: Tree) -> None:
        """Raise StateMismatch unless a saved state's shapes fit this learner."""
        self._fitting(tree)

    def _fitting(self, tree: Tree) -> tuple[Any, dict[str, Any], Any]:
        """Parse a saved state for core, pipeline and data source.

        Raises:
            StateMismatch: see `must_fit`.
        """
        rest = dict(tree) if isinstance(tree, Mapping) else {}
        kept: Any = rest.pop(REPLAY, {})
        own = _of_module(rest.pop(PIPELINES, {}))
        learned = tensors_like({PIPELINES: own}, {PIPELINES: self._pipeline_state()})[PIPELINES]
        return self.core.state_from_tree(_of_module(rest), like=self.state), learned, kept

    def _discard_samples(self) -> None:
        self.data.restore({}, self.device)  # a state without samples

    def _pipeline_state(self) -> dict[str, Any]:
        return {} if self.pipeline is None else self.pipeline.get_state()

    def _due(self, sample: Columns) -> Iterator[Columns]:
        """Insert a sample, and return the samples to learn from.

        Raises:
            ValueError: a column that the core's data source needs is missing.
        """
        try:
            yield from self.data.add(sample, self.sums)
        except KeyError as error:
            must_have_column(sample, error, self.core.name)
            raise

    def _parts(self, sample: Columns, minibatch_size: int | None) -> int | None:
        """Return the number of minibatches, equal at a group's learners.

        The host waits for the device.
        """
        if minibatch_size is None:
            return None
        live = sample[LIVE].sum().double()  # []
        return max(1, -(-int(self.sums(live)) // minibatch_size))


def _of_module(tree: Any) -> Any:
    """Return the module's part of a saved tree with modules."""
    return tree.get(DEFAULT_MODULE, tree) if isinstance(tree, Mapping) else tree


class Handle(Future[Metrics]):
    """An update's future that knows whether its result was read."""

    was_read = False

    def result(self, timeout: float | None = None) -> Metrics:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if wait([self], timeout).not_done:
            raise TimeoutError(f"the update is unfinished after {timeout} s")
        self.was_read = True
        return super().exception()


class UpdatesInFlight:
    """A thread, started lazily, that makes updates in order."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` unfinished updates; raise ValueError if it is below 1."""
        if limit < 1:
            raise ValueError(f"updates_in_flight = {limit}: must be at least 1")
        self._places = threading.BoundedSemaphore(limit)
        self._thread: int | None = None
        self._executor = ThreadPoolExecutor(1, "updates", initializer=self._started)
        self._failed: list[Handle] = []
        self._begun = False
        self._closed = False

    def begin(
        self, update: Callable[..., Metrics], *arguments: Any, **passes: Unpack[Passes]
    ) -> Future[Metrics]:
        """Start an update, waiting while too many are unfinished.

        Raises:
            RuntimeError: the learner is closed.
        """
        if self._closed:
            raise RuntimeError("the learner is closed: async_update makes no more updates")
        self._places.acquire()
        self._begun = True
        handle = Handle()
        handle.set_running_or_notify_cancel()  # a cancelled future accepts no result
        self._executor.submit(self._make, handle, partial(update, *arguments, **passes))
        return handle

    def wait(self) -> None:
        """Wait for all updates in flight, unless called from one.

        Raises:
            Exception: the error of a failed update whose handle was not read.
        """
        if self._begun and not self._closed and threading.get_ident() != self._thread:
            self._executor.submit(int).result()  # runs after all earlier updates
            self._raise_unread()

    def close(self) -> None:
        """Wait for the updates in flight, and end the thread.

        Raises:
            Exception: as in `wait`.
        """
        self._closed = True
        self._executor.shutdown()
        self._raise_unread()

    def _make(self, handle: Handle, update: Callable[[], Metrics]) -> None:
        try:
            metrics = update()
        except BaseException as error:
            self._failed.append(handle)
            handle.set_exception(error)
        else:
            handle.set_result(metrics)
        finally:
            self._places.release()

    def _raise_unread(self) -> None:
        failed, self._failed = self._failed, []
        for handle in failed:
            if not handle.was_read:
                handle.result()  # raises

    def _started(self) -> None:
        self._thread = threading.get_ident()
