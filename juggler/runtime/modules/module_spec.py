"""RLModuleSpec: how to build a module, as far as it is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium

from juggler.runtime.modules.building import ModuleFactory, build_module
from juggler.runtime.modules.rl_module import RLModule

Space = gymnasium.Space[Any]


@dataclass(frozen=True, kw_only=True)
class RLModuleSpec:
    """How to build a module. What is left out comes from the environment and the config.

    A spec is a `ModuleFactory`, so a run accepts it in place of a module's class.
    """

    module: str | ModuleFactory | None = None
    """As for `build_module`; None: the default module."""

    observation_space: Space | None = None
    """None: the environment's, after its connectors."""

    action_space: Space | None = None
    """None: the environment's, likewise."""

    model_config: Mapping[str, Any] | None = None
    """Keys given here override those of the run's config."""

    def completed(
        self,
        observation_space: Space | None = None,
        action_space: Space | None = None,
        model_config: Mapping[str, Any] | None = None,
    ) -> RLModuleSpec:
        """This spec, with what it leaves out filled in."""
        return RLModuleSpec(
            module=self.module,
            observation_space=_first(self.observation_space, observation_space),
            action_space=_first(self.action_space, action_space),
            model_config={**(model_config or {}), **(self.model_config or {})},
        )

    def build(self) -> RLModule:
        """A new module.

        Raises:
            ValueError: a space is missing; also what `build_module` raises.
        """
        for name in ("observation_space", "action_space"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"RLModuleSpec has no {name}: give one, or complete it with the environment's"
                )
        assert self.observation_space is not None
        assert self.action_space is not None
        return build_module(
            self.module, self.observation_space, self.action_space, self.model_config or {}
        )

    def __call__(
        self,
        observation_space: Space,
        action_space: Space,
        model_config: Mapping[str, Any],
    ) -> RLModule:
        return self.completed(observation_space, action_space, model_config).build()


def _first(own: Space | None, given: Space | None) -> Space | None:
    return given if own is None else own
