"""The module that a run trains, as a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from juggler.runtime.modules.model_config import ModelConfig
from juggler.runtime.wrong_value import WrongValue, wrong_where


@dataclass(kw_only=True)
class ModuleConfig:
    """Which module a run trains, and how it is built."""

    module: str | None = None
    """The RLModule to train, or the Catalog that builds it, as package.module:Class. none: the
    default module."""

    model: dict[str, Any] = field(default_factory=dict)
    """Options of the module: a table in a file, JSON on the command line."""

    distribution: str | None = None
    """The function that makes the distribution of actions, as package.module:function. none: the
    action space decides."""

    critic_sees: Literal["observation", "state", "all_observations"] = "observation"
    """What the value function sees, which only training needs: the observation of its own agent; or
    beside it, where environments have several agents, their state() or the observations of all
    agents."""

    check_specs: bool = False
    """Check the module's inputs and outputs against its specs in every call, not only in the first
    one. This is slower, and helps to find a mistake."""

    def validate(self) -> None:
        for key in ("module", "distribution"):
            name = getattr(self, key)
            if name is not None and ":" not in name:
                raise WrongValue(key, f"{key} = {name!r} must be named as 'package.module:Class'")
        if self.module is None:  # other modules define their own keys
            with wrong_where("model"):
                ModelConfig.parse(self.model)
