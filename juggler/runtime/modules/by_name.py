"""Custom parts by name: what "package.module:Class" leads to. No torch here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, Final

from juggler.runtime.nearest import closest

#: How names begin of what stands in a script or a notebook, where no import leads to.
SCRIPT: Final = "__main__:"


def found(name: str, what: str) -> Callable[..., Any]:
    """What a name leads to, imported here.

    Args:
        name: "package.module:Class", or a function's name in place of the class's.
        what: it is to be, for the error: "module", "encoder", …

    Raises:
        ValueError: the name leads nowhere, or to something that cannot be called.
    """
    package, colon, attribute = name.partition(":")
    if not (package and colon and attribute):
        raise ValueError(f"{what} {name!r} must be named as 'package.module:Class'")
    try:
        imported = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not (package + ".").startswith(error.name + "."):
            raise  # The package is there; something that it imports is not.
        raise ValueError(no_module(name, what, error.name)) from error
    called = getattr(imported, attribute, None)
    if called is None:
        near = closest(attribute, vars(imported))
        hint = f": did you mean {near!r}?" if near else ""
        raise ValueError(f"{what} {name!r}: {package!r} is there and has no {attribute!r}{hint}")
    if not callable(called):
        raise ValueError(f"{what} {name!r} is of type {type(called).__name__}: it cannot be called")
    made: Callable[..., Any] = called
    return made


def is_there(module: str) -> bool:
    """Whether there is a Python module, or the package that it is to be in. Nothing is imported."""
    outermost = module.partition(".")[0]
    return outermost in sys.modules or importlib.util.find_spec(outermost) is not None


def check_there(name: str, what: str) -> None:
    """
    Args:
        name: "package.module:Class".
        what: it is to be, for the error.

    Raises:
        ValueError: there is no such package.
    """
    package = name.partition(":")[0]
    if not is_there(package):
        raise ValueError(no_module(name, what, package.partition(".")[0]))


def no_module(name: str, what: str, module: str) -> str:
    """For people: a name leads to a module that is not here."""
    return (
        f"{what} {name!r} cannot be imported: there is no Python module {module!r} here; "
        "install it, or put its directory on PYTHONPATH, wherever this run has workers"
    )


def must_be_given_again(key: str, name: str | None, given: object) -> None:
    """
    Args:
        key: of the configuration.
        name: what it says.
        given: what it stands for, where that is here.

    Raises:
        ValueError: it is something of a script, to which no name leads.
    """
    if name is not None and name.startswith(SCRIPT) and not callable(given):
        mine = name.removeprefix(SCRIPT)
        raise ValueError(
            f"this run's {key} is {mine}, of a script: pass {key}={mine} again, in Python"
        )
