"""Learner: a core with its state, on a device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias, Unpack, overload

import torch

from juggler.learner.config import Passes, given_passes
from juggler.learner.core.learner_core import (
    LearnerCore,
    Metrics,
    Params,
    Sample,
)
from juggler.learner.core.metrics import mean_metrics
from juggler.learner.core.state import StateMismatch, arrays_like, tensors_like, to_device
from juggler.learner.data.batch_columns import checked_batch, must_have_column
from juggler.learner.data.collate import collate
from juggler.learner.group.member import GroupMember
from juggler.learner.updates_in_flight import UpdatesInFlight
from juggler.runtime.checkpoints.checkpoint import PIPELINES
from juggler.runtime.connectors.learner_pipeline import LearnerPipeline
from juggler.runtime.episodes.batch import DEFAULT_MODULE, EpisodeBatch
from juggler.runtime.modules.columns import CONNECTOR_STATES, LIVE, MODULE_STATE
from juggler.runtime.wire.trees import Tree

#: Batches of episodes by module id; a bare list is for the module "default".
Episodes: TypeAlias = Mapping[str, Sequence[EpisodeBatch]]
Given: TypeAlias = Episodes | Sequence[EpisodeBatch]


class Learner(GroupMember):
    """Turns samples, batches or episodes into better parameters.

    It owns the state, where it lies, and the count of updates. No call waits for the device:
    metrics are tensors there, until `fetch_metrics` is called on them.

    With `async_update`, updates run one after the other in a thread of their own. Calls of the
    other methods wait until none is in flight, so that they see what all of them have led to;
    `state` itself is for the thread alone until then.

    A subclass may override `preprocess_episodes`, `before_gradients` and `after_gradients`. One
    around another library overrides `step`, `get_params`, `save` and `restore`; the last three call
    `wait` first if it is to be used with `async_update`.
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
        seed: what the first parameters are drawn from.
        device: where to compute.
        source: where `step` takes samples from when it is given none.
        pipelines: by module id, what batches and episodes of that module go through on the device
            before anything is learned from them.
        updates_in_flight: with `async_update`, how many may be asked for and not finished.
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
        self._data = core.data_source()
        self.updates = 0
        self.collate_seconds = 0.0  # spent on turning episodes into samples

    def step(self, sample: Sample | None = None, **passes: Unpack[Passes]) -> Metrics:
        """One update on the sample given, else on the next one of the source, as it is.

        Args:
            sample: columns on any device, by module id.
            passes: as for `update_from_batch`.

        Raises:
            ValueError: neither is there, or the sample lacks what the algorithm needs.
            StopIteration: the source has come to its end.
        """
        passes = given_passes(passes)
        self.wait()
        if sample is None:
            if self.source is None:
                raise ValueError("step() without a sample needs a learner with a source")
            sample = next(self.source)
        sample = self.before_gradients(to_device(sample, self.device))
        metrics = []
        for due in self._data.add(sample):
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
            metrics.append(output.metrics)
        self.updates += 1
        return mean_metrics(metrics)

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
        """One update on columns that are put together already, as a replay or a data set has them.

        Args:
            batch: columns by module id. IMPALA, PPO and APPO take those of a batch of episodes, as
                tensors or arrays; see `juggler.batch_of_columns`.
            async_update: begin the update and return, once fewer than `updates_in_flight` others
                are unfinished. The batch must not be changed before it is done.
            passes: `minibatch_size`: live steps in each step of the optimizer, about. PPO takes it
                in place of its `minibatches`; IMPALA and APPO, which estimate along whole rows, put
                whole rows together. `num_epochs`: passes over the batch; PPO takes it in place of
                its `epochs`. Where one is not given, or None, the config says how many, and without
                that there is one pass over the whole batch.

        Returns:
            Metrics; with `async_update` a handle, whose `result(timeout)` waits for them, or raises
            what the update raised, and whose `done()` says whether it would wait.

        Raises:
            TypeError: the algorithm learns from whole episodes.
            ValueError: a column is missing or does not fit, or nobody knows a module.
        """
        self.check_serves("batch")
        passes = given_passes(passes)
        if async_update:
            return self._in_flight.begin(self.update_from_batch, batch, **passes)
        self.wait()
        if spaces := self.core.batch_spaces():
            stored = {key: each.stored_space for key, each in self.pipelines.items()}
            spaces = {key: (stored.get(key, seen), acts) for key, (seen, acts) in spaces.items()}
            batch = checked_batch(batch, spaces, self.example_states())
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
        """One update on episodes as they come from envrunners.

        Args:
            episodes: by module id; a bare list is for the module "default".
            async_update: as for `update_from_batch`.
            passes: the same.

        Returns:
            As `update_from_batch`.

        Raises:
            TypeError: the algorithm does not learn from episodes.
            ValueError: there are no episodes, or nobody knows a module.
        """
        self.check_serves("episodes")
        passes = given_passes(passes)
        if async_update:
            return self._in_flight.begin(self.update_from_episodes, episodes, **passes)
        return self.step(self.sample_from_episodes(episodes), **passes)

    def check_serves(self, kind: str) -> None:
        """Raises:
        TypeError: the algorithm does not learn from this kind of data, "batch" or "episodes".
        """
        if kind not in self.core.trains_on:
            served = " or ".join(f"update_from_{kind}" for kind in sorted(self.core.trains_on))
            raise TypeError(f"{self.core.name} does not serve update_from_{kind}: call {served}")

    def before_gradients(self, sample: Sample) -> Sample:
        """For a subclass: what an update learns from, on the device, before any gradient of it is
        computed -> what it learns from instead."""
        return sample

    def sample_from_episodes(self, episodes: Given) -> Sample:
        """What `step` takes, on its way to the device, where steps before may still run.

        Learners of a group do this together, once for each update."""
        self.wait()
        started = time.perf_counter()
        prepared = self.prepared(self.collated(episodes))
        self.collate_seconds += time.perf_counter() - started
        return prepared

    def collated(self, episodes: Given) -> Sample:
        """Episodes as a sample on the host, which no pipeline has seen yet; page-locked where the
        device is a GPU. It may be made in any thread, beside updates."""
        by_module = episodes if isinstance(episodes, Mapping) else {DEFAULT_MODULE: episodes}
        pin_memory = self.device.type == "cuda"
        return {
            module_id: collate(batches, pin_memory=pin_memory)
            for module_id, batches in self.preprocess_episodes(by_module).items()
        }

    def prepared(self, sample: Sample) -> Sample:
        """What `collated` made, on the device and through the pipelines: what `step` takes.

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
        """For a subclass to change episodes before anything is computed from them.

        In a learner process with a GPU, called in a thread of its own, ahead of the update; and
        again if that turns out to be made of fewer of these episodes."""
        return episodes

    def example_states(self) -> dict[str, dict[str, Tree]]:
        """By module id, what episodes must have in `states` for each row: these arrays [...] show
        which, in what shapes and dtypes."""
        examples: dict[str, dict[str, Tree]] = {}
        for module_id, state in self.core.initial_states().items():
            examples[module_id] = {MODULE_STATE: arrays_like(state)}
        for module_id, pipeline in self.pipelines.items():
            if contexts := pipeline.example_contexts():
                examples.setdefault(module_id, {})[CONNECTOR_STATES] = contexts
        return examples

    def get_params(self) -> Params:
        """The parameters and buffers that acting needs, by name, by module id.

        Parameters are in the `weights_dtype` of the config. Later updates do not change them.
        """
        self.wait()
        return self.core.get_params(self.state)

    def get_weights(self) -> dict[str, Tree]:
        """The same as arrays on the host; waits for the update that makes them."""
        return arrays_like(self.get_params())

    def set_weights(self, weights: Mapping[str, Tree], *, whole: bool = False) -> None:
        """Go on with parameters and buffers from elsewhere.

        The optimizer, what the algorithm keeps beside them, such as a target network, and samples
        that were to be used again begin anew. Counts and the states of pipelines go on.

        Args:
            weights: name -> array by module id, such as `get_weights` and `juggler.read_weights`
                give. What they lack stays as it is.
            whole: weights that lack something are refused.

        Raises:
            StateMismatch: they are not those of the learner's modules; nothing has changed.
        """
        self.wait()
        self.state = self.core.with_weights(self.state, weights, self._seed, whole=whole)
        self.forget()

    def save(self) -> tuple[dict[str, Tree], dict[str, Any]]:
        """All that `restore` needs: arrays by name, and what of the state JSON can hold."""
        self.wait()
        tree = self.core.state_to_tree(self.state)
        if states := self._pipeline_states():
            tree[PIPELINES] = arrays_like(states)
        return tree, {"algorithm": self.core.name, "updates": self.updates}

    def forget(self) -> None:
        """Let go of what `save` does not save, the samples that were to be used again: from here
        on, this learner and one that restores what it saved do the same."""
        self.wait()
        self._data.clear()

    def restore(self, tree: Tree, extras: Mapping[str, Any]) -> None:
        """Goes on from where `save` was called.

        Raises:
            StateMismatch: another module, optimizer, algorithm or pipeline made this; nothing has
                changed.
        """
        if extras.get("algorithm") != self.core.name:
            raise StateMismatch(
                f"the checkpoint is of algorithm {extras.get('algorithm')!r}; "
                f"this learner runs {self.core.name!r}"
            )
        self.wait()
        updates = int(extras["updates"])
        rest = dict(tree) if isinstance(tree, Mapping) else {}
        pipelines = {PIPELINES: rest.pop(PIPELINES, {})}
        states = tensors_like(pipelines, {PIPELINES: self._pipeline_states()})
        self.state = self.core.state_from_tree(rest, like=self.state)
        for module_id, state in states[PIPELINES].items():
            self.pipelines[module_id].set_state(state)
        self.forget()
        self.updates = updates

    def wait(self) -> None:
        """Until no update is in flight; at once in the course of one."""
        self._in_flight.wait()

    def close(self) -> None:
        """Wait for updates in flight, and end their thread; there are no more with `async_update`
        afterwards. A learner that never had one needs no closing."""
        self._in_flight.close()

    def _parts(self, sample: Sample, minibatch_size: int | None) -> int | None:
        """How many parts of about so many live steps a sample has: as many at every learner of a
        group, though its own sample is smaller. The host waits for the device here."""
        if minibatch_size is None:
            return None
        live = [columns[LIVE].sum() for columns in sample.values()]  # [] each
        most = torch.stack(live).max().double()  # []
        return max(1, -(-int(self.sums(most)) // minibatch_size))

    def _pipeline_states(self) -> dict[str, Any]:
        """By module id, of the pipelines that have one."""
        states = {module_id: each.get_state() for module_id, each in self.pipelines.items()}
        return {module_id: state for module_id, state in states.items() if state}
