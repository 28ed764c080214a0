"""Which module a run trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from juggler.runtime.modules.model_config import ModelConfig


@dataclass(kw_only=True)
class ModuleConfig:
    """Which module a run trains, and what it is built with."""

    module: str | None = None
    """The RLModule to train, or the Catalog that builds it, as package.module:Class; none means
    the default model."""

    model: dict[str, Any] = field(default_factory=dict)
    """What the module is built with: a table in a file, JSON on the command line."""

    distribution: str | None = None
    """What makes the distribution of actions, as package.module:function; none: the action space
    says."""

    check_specs: bool = False
    """Compare what the module takes and returns with its specs in every call, not only in the
    first ones: slower, for looking for a mistake."""

    def validate(self) -> None:
        for key in ("module", "distribution"):
            name = getattr(self, key)
            if name is not None and ":" not in name:
                raise ValueError(f"{key} = {name!r} must be named as 'package.module:Class'")
        if self.module is None:  # another module makes of its table what it likes
            ModelConfig.parse(self.model)
