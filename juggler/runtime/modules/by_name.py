"""Imports custom parts by name, as in "package.module:Class". No torch here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from juggler.runtime.nearest import closest

#: Prefix of the names of things in a script or a notebook, which cannot be imported.
SCRIPT: Final = "__main__:"


def found(name: str, what: str) -> Callable[..., Any]:
    """The object with this name, imported here.

    Args:
        name: "package.module:Class", or with a function in place of the class.
        what: the kind of object, for the error: "module", "encoder", …

    Raises:
        ValueError: the name cannot be imported, or is not callable.
    """
    package, colon, attribute = name.partition(":")
    if not (package and colon and attribute):
        raise ValueError(f"{what} {name!r} must be named as 'package.module:Class'")
    _check_is_no_path(name, what)
    try:
        imported = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not (package + ".").startswith(error.name + "."):
            raise  # the package exists, but something that it imports does not
        raise ValueError(no_module(name, what, error.name)) from error
    called = getattr(imported, attribute, None)
    if called is None:
        near = closest(attribute, vars(imported))
        hint = f": did you mean {near!r}?" if near else ""
        raise ValueError(
            f"{what} {name!r}: the Python module {package!r} has no {attribute!r}{hint}"
        )
    if not callable(called):
        raise ValueError(f"{what} {name!r} is of type {type(called).__name__}: it cannot be called")
    made: Callable[..., Any] = called
    return made


def name_of(given: Any) -> str | None:
    """The name of a class, as `found` takes it: where it would be found if its script were a
    module. Of an object, which is to be found nowhere but in its script, that of its class; a name,
    or None, as it is."""
    if given is None or isinstance(given, str):
        return given
    if hasattr(given, "__qualname__"):
        return f"{given.__module__}:{given.__qualname__}"
    return f"{SCRIPT}{type(given).__qualname__}"


def given_or_named(
    name: str | None, factory: Callable[..., Any] | None, own: Mapping[str, type[Any]] | None
) -> str | Callable[..., Any] | None:
    """What builds a module: the class of a script that its name stands for, or else the name.

    Args:
        name: of the module in a configuration.
        factory: what the run's own key `module` was given in Python.
        own: other classes of the script, by the names that stand for them.
    """
    if name is None or name_of(factory) == name:
        return factory
    return (own or {}).get(name, name)


def is_there(module: str) -> bool:
    """Whether a Python module, or its outermost package, can be found. Nothing is imported."""
    outermost = module.partition(".")[0]
    return outermost in sys.modules or importlib.util.find_spec(outermost) is not None


def check_there(name: str, what: str) -> None:
    """Check that the package in a name can be found.

    Args:
        name: "package.module:Class".
        what: the kind of object, for the error.

    Raises:
        ValueError: there is no such package.
    """
    _check_is_no_path(name, what)
    package = name.partition(":")[0]
    if not is_there(package):
        raise ValueError(no_module(name, what, package.partition(".")[0]))


def _check_is_no_path(name: str, what: str) -> None:
    """
    Raises:
        ValueError: the name has the path of a file in place of a Python module.
    """
    file, _, attribute = name.partition(":")
    if not file.endswith(".py") and all(part.isidentifier() for part in file.split(".")):
        return
    directory, _, module = file.removesuffix(".py").rpartition("/")
    where = f", with {directory!r} on PYTHONPATH" if directory not in ("", ".") else ""
    raise ValueError(
        f"{what} {name!r} names a file, and a Python module is wanted: "
        f"write {f'{module}:{attribute}'!r}{where}"
    )


def no_module(name: str, what: str, module: str) -> str:
    """The message for a name whose Python module cannot be found."""
    return (
        f"{what} {name!r} cannot be imported: there is no Python module {module!r} here; "
        "install it, or put its directory on PYTHONPATH, wherever this run has workers"
    )


def must_be_given_again(key: str, name: str | None, given: object) -> None:
    """Check that an object of a script is available in this process.

    Args:
        key: a key of the configuration.
        name: its value.
        given: the object that the name stands for, if it was passed again.

    Raises:
        ValueError: the name belongs to a script, and its object was not passed again.
    """
    if name is not None and name.startswith(SCRIPT) and not callable(given):
        mine = name.removeprefix(SCRIPT)
        raise ValueError(
            f"this run's {key} is {mine}, of a script: pass {key}={mine} again, in Python"
        )
