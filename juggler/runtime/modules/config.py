"""Which module a run trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class ModuleConfig:
    """Which module a run trains, and what it is built with."""

    module: str | None = None
    """The RLModule to train, as package.module:Class; none means the default model."""

    model: dict[str, Any] = field(default_factory=dict)
    """What the module is built with: a table in a file, JSON on the command line."""

    def validate(self) -> None:
        if self.module is not None and ":" not in self.module:
            raise ValueError(f"module = {self.module!r} must be named as 'package.module:Class'")
