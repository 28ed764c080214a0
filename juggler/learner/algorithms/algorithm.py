"""Algorithm: what a run's key `algorithm` names. No torch: the driver reads this too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium

from juggler.learner.config import LearnerConfig


class Algorithm:
    """Joins a configuration, a core and perhaps a module. Derive from it; it is never instantiated.

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
    """Whether it makes up for whatever policy has acted, as long as its log-probabilities are
    known. Else that must have been its own, not long ago."""

    offline: ClassVar[bool] = False
    """Whether it learns from a data set, of whose actions nobody knows the log-probabilities: it
    needs the key `dataset`, which other algorithms cannot have."""

    lacks: ClassVar[Mapping[str, str]] = {}
    """Keys that others have, and that somebody may look for here, with why it has none."""
