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

    A run trains with it as `algorithm = "my_file:MyAlgorithm"`, or `juggler.train(algorithm=
    MyAlgorithm)`. The driver imports the file it is in, for the keys of its configuration: where
    that imports torch, so does the driver, which costs some memory and a second or two. To spare
    it that, keep the core in another file, and name it: `core = "my_core:MyCore"`.
    """

    config: ClassVar[type[LearnerConfig]]
    """A dataclass derived from `LearnerConfig`: its fields are keys of a run."""

    core: ClassVar[Any]
    """Called with a function that makes the module, and with the configuration, makes a
    `LearnerCore`: its class, or the name of it as "package.module:Class"."""

    module: ClassVar[Any] = None
    """What is trained where a run names no module: an RLModule class, or its name as
    "package.module:Class"; none: the default module."""

    action_spaces: ClassVar[tuple[type[gymnasium.Space[Any]], ...]] = ()
    """Kinds of action spaces that it can choose actions of, such as `(spaces.Discrete,)`: a run
    with another one is refused before it starts. (): any that the module can act in."""

    off_policy: ClassVar[bool] = False
    """Whether it corrects for any behaviour policy, as long as its log-probabilities are
    known. Else that must have been its own, not long ago."""

    offline: ClassVar[bool] = False
    """Whether it learns from a data set, of whose actions the log-probabilities are unknown: it
    needs the key `dataset`, which other algorithms cannot have."""

    lacks: ClassVar[Mapping[str, str]] = {}
    """Keys of other algorithms that this one lacks, with the reason."""

    chosen: ClassVar[Mapping[str, Any]] = {}
    """Defaults of a run's keys for an algorithm that ships."""

    chosen_for: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values instead of these, by observation ("a vector of floats", "an image", "a
    Discrete"), and for "a Box action"."""

    least_batch: ClassVar[int] = 0
    """Minimum `batch_size` if none is given."""

    squashes: ClassVar[bool] = False
    """Whether its modules squash actions to their bounds."""
