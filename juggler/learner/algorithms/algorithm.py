"""The base class of algorithms. No torch: the driver imports this too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium

from juggler.learner.config import LearnerConfig


class Algorithm:
    """Base class that joins a configuration, a core and perhaps a module.

        class MyAlgorithm(Algorithm):
            config = MyConfig
            core = MyCore

    A run selects it by `algorithm = "my_file:MyAlgorithm"`, or `juggler.train(algorithm=
    MyAlgorithm)`. The driver imports its file for the keys of its configuration. If that file
    imports torch, so does the driver, which costs memory and a second or two. To avoid this, keep
    the core in another file, and name it: `core = "my_core:MyCore"`.
    """

    config: ClassVar[type[LearnerConfig]]
    """A dataclass derived from `LearnerConfig`: its fields are keys of a run."""

    core: ClassVar[Any]
    """A `LearnerCore` class, or its name as "package.module:Class". It is called with a function
    that makes the module, and with the configuration."""

    module: ClassVar[Any] = None
    """The module if a run names none: an RLModule class, or its name as "package.module:Class";
    none: the default module."""

    action_spaces: ClassVar[tuple[type[gymnasium.Space[Any]], ...]] = ()
    """Supported kinds of action spaces, such as `(spaces.Discrete,)`. A run with another kind is
    refused before it starts. (): any that the module supports."""

    off_policy: ClassVar[bool] = False
    """Whether it corrects for any behaviour policy with known log-probabilities. Otherwise the
    behaviour policy must be a recent version of its own."""

    offline: ClassVar[bool] = False
    """Whether it learns from a data set, whose actions have no known log-probabilities. It needs
    the key `dataset`, which other algorithms cannot have."""

    lacks: ClassVar[Mapping[str, str]] = {}
    """Keys of other algorithms that this one does not have, with the reason."""

    chosen: ClassVar[Mapping[str, Any]] = {}
    """Defaults of a run's keys for a built-in algorithm."""

    chosen_for: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Overrides of `chosen`, by observation ("a vector of floats", "an image", "a
    Discrete"), and for "a Box action"."""

    least_batch: ClassVar[int] = 0
    """Minimum `batch_size` if none is given."""

    squashes: ClassVar[bool] = False
    """Whether its modules squash actions to their bounds."""
