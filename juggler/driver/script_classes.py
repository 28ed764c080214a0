"""Hands classes of scripts and notebooks, which cannot be imported, to workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.driver_config import config_errors
from juggler.driver.league.builders import register_builder
from juggler.envrunner.environments.find_environment import registered_in_script
from juggler.learner.algorithms.registry import register_algorithm
from juggler.runtime.connectors.config import own_connectors
from juggler.runtime.modules import import_by_name


def must_be_given_again(
    config: RunConfig, env: object, module: object, own: Mapping[str, type[Any]]
) -> None:
    """Check that everything that cannot be imported by name was passed.

    Raises:
        ConfigError: the run was trained with a script's object, which was not passed again.
    """
    with config_errors():
        import_by_name.must_be_given_again("env", config.env_runner.env, env)
        mapping = config.agents.mapping or None
        import_by_name.must_be_given_again("mapping", mapping, own.get(str(mapping)))
        for module_id in config.module_ids:
            of_module = config.of(module_id)
            algorithm, name = of_module.learner.algorithm, of_module.module.module
            import_by_name.must_be_given_again("algorithm", algorithm, own.get(algorithm))
            built_by = import_by_name.given_or_named(
                name, module if callable(module) else None, own
            )
            import_by_name.must_be_given_again("module", name, built_by)
            of_module.connectors.parsed().must_be_given_again(own)


def is_of_a_script(config: RunConfig) -> bool:
    """Return whether the run needs its script to continue."""
    try:
        must_be_given_again(config, None, None, {})
    except ConfigError:
        return True
    return registered_in_script(config.env_runner.env) is not None


def own_classes(keys: dict[str, Any]) -> dict[str, type[Any]]:
    """Replace classes and functions in keys by names; return them."""
    own = own_connectors(keys)
    algorithm = keys.get("algorithm")
    if algorithm is not None and not isinstance(algorithm, str):
        with config_errors():
            keys["algorithm"] = register_algorithm(algorithm)
        own[keys["algorithm"]] = algorithm
        if isinstance(brought := getattr(algorithm, "module", None), type):
            own[str(import_by_name.name_of(brought))] = brought
    # Configurations and messages have names, so each object gets one.
    if callable(mapping := keys.get("mapping")):
        keys["mapping"] = str(import_by_name.name_of(mapping))
        own[keys["mapping"]] = mapping
    league = keys.get("league")
    if isinstance(league, dict) and isinstance(league.get("builder"), type):
        builder = league["builder"]
        with config_errors("league: "):
            keys["league"] = {**league, "builder": register_builder(builder)}
        own[keys["league"]["builder"]] = builder
    if isinstance(wrappers := keys.get("env_wrappers"), list | tuple):
        keys["env_wrappers"] = [_wrapper(each) for each in wrappers]
    # Evaluations elsewhere import the encoder without the script.
    model = keys.get("model")
    if isinstance(model, Mapping) and isinstance(encoder := model.get("encoder"), type):
        name = str(import_by_name.name_of(encoder))
        if name.startswith(import_by_name.SCRIPT) or "<locals>" in name:
            raise ConfigError(
                f"model.encoder: {encoder.__name__} is defined in a script or a function, and "
                f"workers cannot import it: name it as 'package.module:{encoder.__name__}'"
            )
        keys["model"] = {**model, "encoder": name}
    tables = keys.get("modules")
    if isinstance(tables, dict):
        keys["modules"] = {module_id: _named_in(table, own) for module_id, table in tables.items()}
    return own


def _wrapper(piece: Any) -> Any:
    """Replace the class in an entry of `env_wrappers` by its name."""
    if isinstance(piece, Mapping):
        return {**piece, "use": _wrapper(piece.get("use"))}
    if not isinstance(piece, type):
        return piece
    if (name := str(import_by_name.name_of(piece))).startswith(import_by_name.SCRIPT):
        raise ConfigError(
            f"env_wrappers: {piece.__qualname__} is of a script that workers cannot import: "
            f"name it as 'package.module:{piece.__qualname__}', or give "
            f"env=lambda: {piece.__qualname__}(gymnasium.make(...))"
        )
    return name


def _named_in(table: Any, own: dict[str, type[Any]]) -> Any:
    """Replace classes in a module's table by names."""
    if not isinstance(table, dict):
        return table
    table = dict(table)
    own |= own_classes(table)
    module = table.get("module")
    if isinstance(module, type):
        table["module"] = str(import_by_name.name_of(module))
        own[table["module"]] = module
    return table


def give_names(
    env: str | Callable[..., Any] | None,
    module: str | Callable[..., Any] | None,
    keys: dict[str, Any],
) -> None:
    """Put the names of environment and module into the keys."""
    makers = {"env": "function, such as lambda: gymnasium.make(...)", "module": "class"}
    for key, value in (("env", env), ("module", module)):
        if callable(value) or isinstance(value, str):
            keys[key] = import_by_name.name_of(value)
        elif value is not None:
            raise ConfigError(f"{key} must be a name, or a {makers[key]}, not {value!r}")


def own_module(
    config: RunConfig, module: str | Callable[..., Any] | None, own: Mapping[str, type[Any]]
) -> str | Callable[..., Any] | None:
    """Return the given module, else the algorithm's own class."""
    algorithm = own.get(config.learner.algorithm)
    brought = getattr(algorithm, "module", None)
    if module is None and import_by_name.name_of(brought) == config.module.module:
        return brought
    return module


def pack(
    config: RunConfig,
    env: str | Callable[..., Any] | None,
    module: str | Callable[..., Any] | None,
    own: Mapping[str, type[Any]],
) -> bytes:
    """Pickle a script's classes and functions for local workers.

    Raises:
        ConfigError: a class or function cannot be pickled.
    """
    factories = [value if callable(value) else None for value in (env, module)]
    name = config.env_runner.env
    registered = {name: there} if (there := registered_in_script(name)) else {}
    brought = {**own, **registered}
    if not any(factories) and not brought:
        return b""
    try:
        packed: bytes = cloudpickle.dumps((*factories, brought))
    except Exception as error:
        # One by one, to name the value that cannot be pickled.
        named = {"env": factories[0], "module": factories[1], **brought}
        for key, value in named.items():
            if why := _why_unsent(value):
                used, name = _unsent_within(value), getattr(value, "__qualname__", str(value))
                raise ConfigError(
                    f"{key} = {name} cannot be sent to the processes of the run ({why})"
                    + (f", because it uses {used}" if used else "")
                    + ". Create them where they are used, or write the code into a module "
                    'and name it as "module:name"'
                ) from error
        raise
    return packed


def _why_unsent(value: object) -> str:
    """Return why a value cannot be pickled; "": it can be pickled."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def _unsent_within(value: object) -> str:
    """Name the first variable or attribute that makes a value unpicklable."""
    brought = dict(vars(value)) if isinstance(value, type) else {value.__class__.__name__: value}
    for each in list(brought.values()):
        if inspect.isfunction(each):
            closure = inspect.getclosurevars(each)
            brought |= {**closure.globals, **closure.nonlocals}
    for name, each in brought.items():
        if each is not value and not inspect.isfunction(each) and _why_unsent(each):
            return f"`{name}`, a {type(each).__qualname__}"
    return ""
