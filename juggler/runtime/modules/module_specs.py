"""Builds modules from names, classes, factories and specs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from itertools import chain
from typing import Any

import gymnasium
import torch
from torch import nn

from juggler.runtime.annotations import signature
from juggler.runtime.modules.import_by_name import found
from juggler.runtime.modules.models import ActorCritic, Catalog
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.near_matches import nearest

#: Makes a module, or a catalog of its parts, from observation space, action space and model_config.
#: RLModule and Catalog classes are factories, and so is an `RLModuleSpec`.
ModuleFactory = Callable[
    [gymnasium.Space[Any], gymnasium.Space[Any], Mapping[str, Any]],
    RLModule | Catalog,
]


def build_module(
    module: str | ModuleFactory | None,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    model_config: Mapping[str, Any],
    *,
    distribution: str | Callable[..., Any] | None = None,
    critic_space: gymnasium.Space[Any] | None = None,
    check_specs: bool = False,
) -> RLModule:
    """Make a new module with randomly initialized parameters.

    Args:
        module: "package.module:Class", imported here; an RLModule class, a Catalog class, or
            another callable of (observation_space, action_space, model_config); or None: the
            default module.
        observation_space: of one environment, not of a vector.
        action_space: of one environment.
        model_config: the module's options; the default module takes the fields of `ModelConfig`.
        distribution: "package.module:function" or a callable of (action_space, **options) that
            makes a DistributionSpec; it is passed to the module in model_config. None: the one in
            model_config, if any.
        critic_space: of "critic_observations", additional inputs of a value function in training;
            passed to the module in model_config. None: it only sees observations, or the module
            only acts.
        check_specs: check inputs and outputs against the module's specs in every call.

    Raises:
        UnsupportedSpace: one of the spaces is not supported.
        ValueError: a name cannot be imported or is not a module's, model_config has a wrong key or
            value, or the module has no value function that could see more than observations.
        TypeError: the callable did not return an RLModule.
    """
    factory = found(module, "module") if isinstance(module, str) else module or ActorCritic
    _must_make_a_module(module, factory)
    # Both keys reach every kind of module through its model_config.
    if distribution is not None:
        model_config = {**model_config, "distribution": distribution}
    if critic_space is not None:
        model_config = {**model_config, "critic_space": critic_space}
    built = _called(factory, observation_space, action_space, model_config)
    if isinstance(built, Catalog):
        built = ActorCritic(observation_space, action_space, model_config, built)
    if not isinstance(built, RLModule):
        raise TypeError(f"{module!r} made a {type(built).__name__}: it must make an RLModule")
    # A module that ignores the column would train without an error.
    if critic_space is not None and not (built.takes_critic_observations and built.critic_space):
        raise ValueError(
            f"critic_sees: the values of {type(built).__name__} come only from observations; "
            "leave critic_sees out, or compute them from batch['critic_observations'] in "
            "_forward_train, set takes_critic_observations = True in the class, and pass it the "
            "model_config"
        )
    built.check_specs = check_specs
    return built


def _called(factory: Callable[..., object], *arguments: object) -> object:
    """Call a factory with its arguments.

    Raises:
        ValueError: the factory takes other arguments, or its `__init__` does not call
            `super().__init__`.
    """
    name = getattr(factory, "__qualname__", type(factory).__name__)
    name += ".__init__" if isinstance(factory, type) else ""
    takes = "(observation_space, action_space, model_config)"
    try:
        known = signature(factory)
    except ValueError:  # Python knows none
        known = Signature([Parameter("any", Parameter.VAR_POSITIONAL)])
    # A TypeError of the call itself would not say what the factory must take.
    try:
        known.bind(*arguments)
    except TypeError:
        text = f"{name} must take {takes}: it takes {known}; see docs/modules.md"
        raise ValueError(text) from None
    try:
        return factory(*arguments)
    except AttributeError as error:
        if "before Module.__init__() call" not in str(error):
            raise
        raise ValueError(f"{name} must begin with super().__init__{takes}: {error}") from error


def _must_make_a_module(module: object, factory: object) -> None:
    """Reject objects that would only raise a TypeError when called.

    Raises:
        ValueError: a class of another kind, or a torch module that is already built.
    """
    if isinstance(factory, type) and not issubclass(factory, (RLModule, Catalog)):
        raise ValueError(
            f"module {module!r}: the class {factory.__name__} derives from neither "
            "juggler.RLModule nor juggler.Catalog; docs/modules.md shows how to write a module"
        )
    if isinstance(factory, torch.nn.Module):
        raise ValueError(
            f"module: this {type(factory).__name__} is already built, and each worker builds its "
            "own: give a class that derives from juggler.RLModule, or a function of "
            "(observation_space, action_space, model_config) that returns one"
        )


Space = gymnasium.Space[Any]


@dataclass(frozen=True, kw_only=True)
class RLModuleSpec:
    """Recipe of a module; environment and configuration fill in the rest.

    A spec is a `ModuleFactory`, so a run accepts it instead of a module's class.
    """

    module: str | ModuleFactory | None = None
    """As for `build_module`; None: the default module."""

    observation_space: Space | None = None
    """None: the environment's, after the connectors."""

    action_space: Space | None = None
    """None: the environment's, after the connectors."""

    model_config: Mapping[str, Any] | None = None
    """Keys given here override the run's config."""

    def completed(
        self,
        observation_space: Space | None = None,
        action_space: Space | None = None,
        model_config: Mapping[str, Any] | None = None,
    ) -> RLModuleSpec:
        """Return this spec with missing values filled in."""
        seen, acted = self.observation_space, self.action_space
        return RLModuleSpec(
            module=self.module,
            observation_space=observation_space if seen is None else seen,
            action_space=action_space if acted is None else acted,
            model_config={**(model_config or {}), **(self.model_config or {})},
        )

    def build(self) -> RLModule:
        """Make a new module.

        Raises:
            ValueError: a space is missing, or as for `build_module`.
        """
        seen, acted = self.observation_space, self.action_space
        if seen is None or acted is None:
            name = "observation_space" if seen is None else "action_space"
            raise ValueError(
                f"RLModuleSpec has no {name}: give one, or complete it with the environment's"
            )
        return build_module(self.module, seen, acted, self.model_config or {})

    def __call__(
        self,
        observation_space: Space,
        action_space: Space,
        model_config: Mapping[str, Any],
    ) -> RLModule:
        return self.completed(observation_space, action_space, model_config).build()


class MultiRLModule(nn.Module):
    """RLModules by id, each with its own spaces and config.

    By default its modules are independent. To share a part, override `build`, make the part once
    and pass it to each module:

        class SharedEncoder(MultiRLModule):
            def build(self, specs):
                encoder = torch.nn.Linear(8, 64)
                return {
                    module_id: MyModule(spec.observation_space, spec.action_space, encoder)
                    for module_id, spec in specs.items()
                }

    Ids are any strings.

    Args:
        modules: modules by id, or complete specs of them, which `build` turns into modules.
    """

    def __init__(self, modules: Mapping[str, RLModule | RLModuleSpec]) -> None:
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
        """Build modules from their specs, by id; they may share parts.

        To share a part with modules that are added later, keep it as an attribute.
        """
        return {module_id: spec.build() for module_id, spec in specs.items()}

    def add(self, module_id: str, module: RLModule | RLModuleSpec) -> None:
        """Add a module under a free id; a spec goes through `build`."""
        if isinstance(module, RLModuleSpec):
            module = self.build({module_id: module.completed()})[module_id]
        self._hold(module_id, module)

    def remove(self, module_id: str) -> RLModule:
        """Remove and return a module; shared parts stay with other modules."""
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
        """Return ids of modules that share a tensor, by its name.

        For the table `shared` of a run, or for `juggler.SharedParts` in a script.

        Raises:
            ValueError: different modules share different tensors of the same name.
        """
        users: dict[tuple[str, int], list[str]] = {}
        for module_id, module in self.items():
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                users.setdefault((name, id(tensor)), []).append(module_id)
        shared: dict[str, list[str]] = {}
        for (name, _), ids in users.items():
            if len(ids) > 1 and shared.setdefault(name, ids) is not ids:
                raise ValueError(
                    f"{name!r} is shared by {shared[name]} and, with other values, by {ids}: "
                    "rename one of the parts"
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
            raise ValueError(f"module {module_id!r} already exists: remove it first")
        if not isinstance(module, RLModule):
            raise TypeError(f"module {module_id!r} is a {type(module).__name__}, not an RLModule")
        # Torch does not allow dots or names of attributes in module names.
        key = f"id_{module_id.replace('%', '%25').replace('.', '%2E')}"
        self._held[key] = module
        self._keys[module_id] = key


@dataclass(frozen=True, kw_only=True)
class MultiRLModuleSpec:
    """Recipe of a MultiRLModule, by a spec per module."""

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
        """Return this spec with missing values of its modules filled in.

        Args:
            observation_space: one for all modules, or by module id.
            action_space: one for all modules, or by module id.
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
        """Make new modules.

        Raises:
            ValueError: a spec is incomplete, or as for `build_module`.
            TypeError: the class is not a MultiRLModule.
        """
        named = self.multi_module
        make: Any = found(named, "multi_module") if isinstance(named, str) else named
        built: object = make(self.modules)
        if not isinstance(built, MultiRLModule):
            raise TypeError(f"{named!r} made a {type(built).__name__}, not a MultiRLModule")
        return built


def _for(module_id: str, space: Space | Mapping[str, Space] | None) -> Space | None:
    # A Dict space is also a mapping.
    if space is None or isinstance(space, gymnasium.Space):
        return space
    return space.get(module_id)
