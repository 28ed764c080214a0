"""MultiRLModule: modules by id, which may share parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import gymnasium
from torch import nn

from juggler.runtime.modules.by_name import found
from juggler.runtime.modules.module_spec import RLModuleSpec
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.nearest import nearest

Space = gymnasium.Space[Any]


class MultiRLModule(nn.Module):
    """RLModules by id, each with its own spaces and config.

    By default its modules are independent. To share a part, a subclass overrides `build`, makes the
    part once and passes it to each of them:

        class SharedEncoder(MultiRLModule):
            def build(self, specs):
                encoder = torch.nn.Linear(8, 64)
                return {
                    module_id: MyModule(spec.observation_space, spec.action_space, encoder)
                    for module_id, spec in specs.items()
                }

    Ids are any strings.
    """

    def __init__(self, modules: Mapping[str, RLModule | RLModuleSpec]) -> None:
        """
        Args:
            modules: modules by id, or complete specs of them, which `build` turns into modules.
        """
        super().__init__()
        self._held = nn.ModuleDict()
        self._keys: dict[str, str] = {}  # keys of `_held`, by id
        specs = {
            module_id: each.completed()
            for module_id, each in modules.items()
            if isinstance(each, RLModuleSpec)
        }
        built = self.build(specs)
        for module_id, module in modules.items():
            self._hold(module_id, built[module_id] if module_id in specs else module)

    def build(self, specs: Mapping[str, RLModuleSpec]) -> Mapping[str, RLModule]:
        """The modules that specs describe, by id. Modules of one call may share parts.

        To share a part with modules that are added later, keep it as an attribute.
        """
        return {module_id: spec.build() for module_id, spec in specs.items()}

    def add(self, module_id: str, module: RLModule | RLModuleSpec) -> None:
        """Add a module under a free id; a spec goes through `build`."""
        if isinstance(module, RLModuleSpec):
            module = self.build({module_id: module.completed()})[module_id]
        self._hold(module_id, module)

    def remove(self, module_id: str) -> RLModule:
        """Remove and return a module. Other modules keep what they share with it."""
        module = self[module_id]
        del self._held[self._keys.pop(module_id)]
        return module

    def forward_inference(self, batch: Mapping[str, Batch]) -> dict[str, dict[str, Any]]:
        """`forward_inference` of each module in the batch, by id."""
        return {key: self[key].forward_inference(part) for key, part in batch.items()}

    def forward_exploration(self, batch: Mapping[str, Batch]) -> dict[str, dict[str, Any]]:
        """`forward_exploration` of each module in the batch, by id."""
        return {key: self[key].forward_exploration(part) for key, part in batch.items()}

    def forward_train(self, batch: Mapping[str, Batch]) -> dict[str, dict[str, Any]]:
        """`forward_train` of each module in the batch, by id."""
        return {key: self[key].forward_train(part) for key, part in batch.items()}

    def forward(self, batch: Mapping[str, Batch]) -> dict[str, dict[str, Any]]:
        return self.forward_train(batch)

    def shared_parts(self) -> dict[str, list[str]]:
        """By name of a parameter or buffer, the ids of the modules that share it under this name.

        A run takes this as its table `shared`, and a script gives it to `juggler.SharedParts`.

        Raises:
            ValueError: some modules share one tensor of a name, and others another one.
        """
        users: dict[tuple[str, int], list[str]] = {}
        for module_id, module in self.items():
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                users.setdefault((name, id(tensor)), []).append(module_id)
        shared: dict[str, list[str]] = {}
        for (name, _), ids in users.items():
            if len(ids) > 1 and shared.setdefault(name, ids) is not ids:
                raise ValueError(
                    f"{name!r} is shared by {shared[name]} and, with other values, by {ids}: give "
                    "one of both parts another name"
                )
        return shared

    def keys(self) -> list[str]:
        return list(self._keys)

    def items(self) -> list[tuple[str, RLModule]]:
        return [(module_id, self[module_id]) for module_id in self._keys]

    def __getitem__(self, module_id: str) -> RLModule:
        if module_id not in self._keys:
            raise KeyError(f"no module {module_id!r}{nearest(module_id, self._keys)}")
        module = self._held[self._keys[module_id]]
        assert isinstance(module, RLModule)
        return module

    def __contains__(self, module_id: object) -> bool:
        return module_id in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def _hold(self, module_id: str, module: object) -> None:
        if module_id in self._keys:
            raise ValueError(f"there is a module {module_id!r} already: remove it first")
        if not isinstance(module, RLModule):
            raise TypeError(f"module {module_id!r} is a {type(module).__name__}, not an RLModule")
        # Torch allows neither a dot in a name nor the name of an attribute.
        key = f"id_{module_id.replace('%', '%25').replace('.', '%2E')}"
        self._held[key] = module
        self._keys[module_id] = key


@dataclass(frozen=True, kw_only=True)
class MultiRLModuleSpec:
    """How to build a MultiRLModule: a spec for each module, complete or not."""

    modules: Mapping[str, RLModuleSpec]
    """Specs by module id."""

    multi_module: str | type[MultiRLModule] = MultiRLModule
    """The class, or its name as package.module:Class."""

    def completed(
        self,
        observation_space: Space | Mapping[str, Space] | None = None,
        action_space: Space | Mapping[str, Space] | None = None,
        model_config: Mapping[str, Any] | None = None,
    ) -> MultiRLModuleSpec:
        """This spec, with what its modules' specs leave out filled in.

        Args:
            observation_space: one for all modules, or by module id.
            action_space: likewise.
            model_config: for all modules; keys of a module's spec override it.
        """
        modules = {
            module_id: spec.completed(
                _for(module_id, observation_space), _for(module_id, action_space), model_config
            )
            for module_id, spec in self.modules.items()
        }
        return MultiRLModuleSpec(modules=modules, multi_module=self.multi_module)

    def build(self) -> MultiRLModule:
        """New modules.

        Raises:
            ValueError: a spec is not complete; also what `build_module` raises.
            TypeError: the class is not a MultiRLModule.
        """
        named = self.multi_module
        make: Any = found(named, "multi_module") if isinstance(named, str) else named
        built: object = make(self.modules)
        if not isinstance(built, MultiRLModule):
            raise TypeError(f"{named!r} made a {type(built).__name__}, not a MultiRLModule")
        return built


def _for(module_id: str, space: Space | Mapping[str, Space] | None) -> Space | None:
    # A Dict space is a mapping too.
    if space is None or isinstance(space, gymnasium.Space):
        return space
    return space.get(module_id)
