"""Learner: a core with its state, on a device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from juggler.learner.collate import collate
from juggler.learner.core import LearnerCore, Metrics, Params, Sample
from juggler.learner.state import StateMismatch, arrays_like, tensors_like, to_device
from juggler.runtime.connectors.learner_pipeline import LearnerPipeline
from juggler.runtime.episodes.batch import DEFAULT_MODULE, EpisodeBatch
from juggler.runtime.modules.columns import CONNECTOR_STATES, MODULE_STATE
from juggler.runtime.wire.trees import Tree

#: Batches of episodes by module id; a bare list is for the module "default".
Episodes = Mapping[str, Sequence[EpisodeBatch]]

#: Where a saved tree has the states of pipelines, beside those of units.
_PIPELINES = "learner_pipelines"


class Learner:
    """Turns samples, batches or episodes into better parameters.

    It owns the state, where it lies, and the count of updates. No call waits for the device:
    metrics are tensors there, until `fetch_metrics` is called on them.

    A learner around another library overrides `step`, `get_params`, `save` and `restore`.
    """

    def __init__(
        self,
        core: LearnerCore[Any],
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        source: Iterator[Sample] | None = None,
        pipelines: Mapping[str, LearnerPipeline] | None = None,
    ) -> None:
        """Args:
        core: the algorithm.
        seed: what the first parameters are drawn from.
        device: where to compute.
        source: where `step` takes samples from when it is given none.
        pipelines: by module id, what batches and episodes of that module go through on the device
            before anything is learned from them.
        """
        self.core = core
        self.config = core.config
        self.device = torch.device(device)
        self.source = source
        self.pipelines = dict(pipelines or {})
        self.state = to_device(core.init(seed), self.device)
        self.updates = 0
        self.collate_seconds = 0.0  # spent on turning episodes into samples

    def step(self, sample: Sample | None = None) -> Metrics:
        """One update on the sample given, else on the next one of the source, as it is.

        Raises:
            ValueError: neither is there.
            StopIteration: the source has come to its end.
        """
        if sample is None:
            if self.source is None:
                raise ValueError("step() without a sample needs a learner with a source")
            sample = next(self.source)
        output = self.core.step(self.state, to_device(sample, self.device))
        self.state = output.state
        self.updates += 1
        return output.metrics

    def update_from_batch(self, batch: Sample) -> Metrics:
        """One update on columns as they come from a replay or a data set.

        Raises:
            TypeError: the algorithm learns from whole episodes.
        """
        self._must_train_on("batch", "update_from_batch")
        return self.step(self._prepared(batch))

    def update_from_episodes(self, episodes: Episodes | Sequence[EpisodeBatch]) -> Metrics:
        """One update on episodes as they come from envrunners.

        Raises:
            TypeError: the algorithm does not learn from episodes.
        """
        self._must_train_on("episodes", "update_from_episodes")
        return self.step(self.sample_from_episodes(episodes))

    def sample_from_episodes(self, episodes: Episodes | Sequence[EpisodeBatch]) -> Sample:
        """What `step` takes, on its way to the device: can be made while another step runs."""
        by_module = episodes if isinstance(episodes, Mapping) else {DEFAULT_MODULE: episodes}
        started = time.perf_counter()
        pin_memory = self.device.type == "cuda"
        sample = {
            module_id: collate(batches, pin_memory=pin_memory)
            for module_id, batches in self.preprocess_episodes(by_module).items()
        }
        prepared = self._prepared(sample)
        self.collate_seconds += time.perf_counter() - started
        return prepared

    def preprocess_episodes(self, episodes: Episodes) -> Episodes:
        """For a subclass to change episodes before anything is computed from them."""
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

        Later updates do not change them.
        """
        return self.core.get_params(self.state)

    def get_weights(self) -> dict[str, Tree]:
        """The same as arrays on the host; waits for the update that makes them."""
        return arrays_like(self.get_params())

    def save(self) -> tuple[dict[str, Tree], dict[str, Any]]:
        """All that `restore` needs: arrays by name, and what of the state JSON can hold."""
        tree = self.core.state_to_tree(self.state)
        if states := self._pipeline_states():
            tree[_PIPELINES] = arrays_like(states)
        return tree, {"algorithm": self.core.name, "updates": self.updates}

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
        updates = int(extras["updates"])
        rest = dict(tree) if isinstance(tree, Mapping) else {}
        pipelines = {_PIPELINES: rest.pop(_PIPELINES, {})}
        states = tensors_like(pipelines, {_PIPELINES: self._pipeline_states()})
        self.state = self.core.state_from_tree(rest, like=self.state)
        for module_id, state in states[_PIPELINES].items():
            self.pipelines[module_id].set_state(state)
        self.updates = updates

    def _prepared(self, sample: Sample) -> Sample:
        """On the device, and through the pipelines."""
        prepared: dict[str, Any] = to_device(sample, self.device)
        for module_id in prepared.keys() & self.pipelines.keys():
            prepared[module_id] = self.pipelines[module_id](prepared[module_id])
        return prepared

    def _pipeline_states(self) -> dict[str, Any]:
        """By module id, of the pipelines that have one."""
        states = {module_id: each.get_state() for module_id, each in self.pipelines.items()}
        return {module_id: state for module_id, state in states.items() if state}

    def _must_train_on(self, kind: str, method: str) -> None:
        if kind not in self.core.trains_on:
            served = " or ".join(f"update_from_{kind}" for kind in sorted(self.core.trains_on))
            raise TypeError(f"{self.core.name} does not serve {method}: call {served}")


def fetch_metrics(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Metrics as plain numbers, with one transfer from the device; waits for it."""
    names = [(module_id, name) for module_id, values in metrics.items() for name in values]
    if not names:
        return {}
    tensors = [metrics[module_id][name].to(torch.float64) for module_id, name in names]
    fetched: dict[str, dict[str, float]] = {module_id: {} for module_id in metrics}
    for (module_id, name), value in zip(names, torch.stack(tensors).tolist(), strict=True):
        fetched[module_id][name] = value
    return fetched
