"""LearnerState: what a learner keeps from update to update; how it is read, replaced and saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from juggler.learner.core.learner_core import Params
from juggler.learner.core.state import StateMismatch, arrays_like, tensors_like, to_device
from juggler.learner.group.member import GroupMember
from juggler.runtime.checkpoints.checkpoint import PIPELINES, REPLAY
from juggler.runtime.connectors.learner_pipeline import LearnerPipeline
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.trees import Tree


class LearnerState(GroupMember):
    """A learner's parameters, with all else that its algorithm and its connectors keep."""

    device: torch.device
    """Where the state is."""

    pipeline: LearnerPipeline | None
    """The connectors of its samples."""

    _seed: int

    @abstractmethod
    def wait(self) -> None:
        """Wait until no update is in flight."""

    def get_params(self) -> Params:
        """The parameters and buffers that acting needs, by name.

        Parameters are in the `weights_dtype` of the config. Later updates do not change them.
        """
        self.wait()
        return self.core.get_params(self.state)

    def get_weights(self) -> dict[str, Tree]:
        """The same as arrays on the host; waits for updates on the device."""
        return arrays_like(self.get_params())

    def set_weights(self, weights: Mapping[str, Tree], *, whole: bool = False) -> None:
        """Continue with parameters and buffers from elsewhere.

        The optimizer and other state of the algorithm, such as a target network, start anew, and
        all samples that are kept are discarded, saved ones too: a replay fills anew. Counts and the
        states of pipelines continue.

        Args:
            weights: name -> array, as from `get_weights` or, for a module, `juggler.read_weights`.
                Parameters and buffers that are missing stay as they are.
            whole: whether missing weights are an error.

        Raises:
            StateMismatch: the weights do not fit the learner's module; nothing has changed.
        """
        self.wait()
        self.state = self.core.with_weights(self.state, weights, self._seed, whole=whole)
        self._discard_samples()

    def reset(self, seed: int) -> None:
        """Begin anew with parameters that this seed gives, and a new optimizer; schedules begin
        from 0 steps. All samples that are kept are discarded, saved ones too. The number of
        updates, and the states of pipelines, go on."""
        self.wait()
        self.state = to_device(self.core.init(seed), self.device)
        self._discard_samples()

    def save(self) -> tuple[dict[str, Tree], dict[str, Any]]:
        """All that `restore` needs: arrays by name, and values for JSON."""
        self.wait()
        tree: dict[str, Tree] = {DEFAULT_MODULE: self.core.state_to_tree(self.state)}
        if learned := self._pipeline_state():
            tree[PIPELINES] = {DEFAULT_MODULE: arrays_like(learned)}
        if kept := self._data.state():
            tree[REPLAY] = kept
        return tree, {"algorithm": self.core.name, "updates": self.updates}

    def forget(self) -> None:
        """Discard samples that were to be used again, because `save` does not save them. From then
        on this learner does the same as one that restores its state."""
        self.wait()
        self._data.clear()

    def taken_in(self) -> int:
        """How many samples are kept for later steps, even if the step made on their arrival
        failed."""
        return self._data.taken_in()

    def books_of_samples(self) -> Mapping[str, float]:
        """What became of all that a replay has got; {}: the algorithm has none."""
        return self._data.books()

    def kept_rows(self) -> float | None:
        """How many rows a replay has; None: the algorithm has none."""
        return self._data.books().get("replay_rows")

    def try_out(self) -> None:
        """From now on learn from each sample when it comes, to find errors: a replay then draws
        from what it has, however little that is."""
        self._data.try_out()

    def draw_apart(self, rank: int) -> None:
        self._data.draw_apart(rank)

    def restore(self, tree: Tree, extras: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            StateMismatch: it is from another module, optimizer, algorithm or pipeline; nothing has
                changed.
            ValueError: the samples that it keeps cannot be kept here; nothing has changed, unless
                memory was lacking: then none are kept.
        """
        if extras.get("algorithm") != self.core.name:
            raise StateMismatch(
                f"the checkpoint is of algorithm {extras.get('algorithm')!r}; "
                f"this learner runs {self.core.name!r}"
            )
        self.wait()
        updates = int(extras["updates"])
        state, learned, kept = self._fitting(tree)
        self._data.restore(kept, self.device)
        self.state = state
        if self.pipeline is not None and learned:
            self.pipeline.set_state(learned)
        self.updates = updates

    def must_fit(self, tree: Tree) -> None:
        """
        Raises:
            StateMismatch: arrays of these shapes are from another module, optimizer or pipeline.
        """
        self._fitting(tree)

    def _fitting(self, tree: Tree) -> tuple[Any, dict[str, Any], Any]:
        """The states of the core, of the pipeline and of the data source in a saved state.

        Raises:
            StateMismatch: as `must_fit`.
        """
        rest = dict(tree) if isinstance(tree, Mapping) else {}
        kept: Any = rest.pop(REPLAY, {})
        own = _of_module(rest.pop(PIPELINES, {}))
        learned = tensors_like({PIPELINES: own}, {PIPELINES: self._pipeline_state()})[PIPELINES]
        return self.core.state_from_tree(_of_module(rest), like=self.state), learned, kept

    def _discard_samples(self) -> None:
        self._data.restore({}, self.device)  # a state of nothing

    def _pipeline_state(self) -> dict[str, Any]:
        return {} if self.pipeline is None else self.pipeline.get_state()


def _of_module(tree: Any) -> Any:
    """What a saved tree has of the learner's one module.

    Earlier versions kept what cores around the algorithm's know beside the module's own branch.
    """
    if not isinstance(tree, Mapping) or not isinstance(tree.get(DEFAULT_MODULE), Mapping):
        return tree  # such as the state of a user's own core
    others = {key: each for key, each in tree.items() if key != DEFAULT_MODULE}
    if not others:
        return tree[DEFAULT_MODULE]
    around = {key: _of_module(each) for key, each in others.items()}
    return {**tree[DEFAULT_MODULE], **around}
