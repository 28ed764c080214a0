"""Imports custom parts by name, as in "package.module:Class". No torch here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from traceback import TracebackException
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from juggler.runtime.near_matches import closest, nearest
from juggler.runtime.user_tracebacks import own_frames, place_of

#: Prefix of names in a script or a notebook, which cannot be imported.
SCRIPT: Final = "__main__:"
#: Kinds of objects that workers do not need.
_OF_THE_DRIVER: Final = ("builder", "weighting")


class ImportFailed(ValueError):
    """A user's Python module raised an error during its import.

    Attributes:
        traceback: the error as Python shows it, with only the frames of the user's files.

    Args:
        name: "package.module:Class".
        what: the kind of object, for the message.
        error: the import's exception; loses the frames of Python's import system.
    """

    def __init__(self, name: str, what: str, error: Exception) -> None:
        error.with_traceback(_behind_the_import(error.__traceback__))
        shown = TracebackException.from_exception(error)
        shown.stack = own_frames(error.__traceback__)
        self.traceback = "".join(shown.format()).rstrip()
        line = f"{type(error).__name__}: {error}{place_of(error)}"
        super().__init__(f"{what} {name!r} cannot be imported: {line}")


def _behind_the_import(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback frames after this file's and the import system's."""
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file not in (__file__, importlib.__file__) and not file.startswith("<frozen importlib"):
            break
        frames = frames.tb_next
    return frames


def found(name: str, what: str) -> Callable[..., Any]:
    """Import the object with this name.

    Args:
        name: "package.module:Class", or with a function instead of the class.
        what: the kind of object, for the error: "module", "encoder", …

    Raises:
        ValueError: the name cannot be imported, or is not callable; ImportFailed if its Python
            module raised an error.
    """
    package, colon, attribute = name.partition(":")
    if not (package and colon and attribute):
        raise ValueError(f"{what} {name!r} must be named as 'package.module:Class'")
    _check_is_no_path(name, what)
    try:
        imported = importlib.import_module(package)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (package + ".").startswith(missing + "."):
            raise ValueError(no_module(name, what, missing)) from error
        raise ImportFailed(name, what, error) from error  # raised by the module, or by its imports
    # The Python module exists, so the nearest of its names is probably meant.
    called = getattr(imported, attribute, None)
    if called is None:
        near = closest(attribute, (each for each, x in vars(imported).items() if callable(x)))
        hint = f": did you mean {near!r}?" if near else ""
        raise ValueError(
            f"{what} {name!r}: the Python module {package!r} has no {attribute!r}{hint}"
        )
    if not callable(called):
        raise ValueError(f"{what} {name!r} is of type {type(called).__name__}: it cannot be called")
    made: Callable[..., Any] = called
    return made


def name_of(given: Any) -> str | None:
    """Return the name under which `found` finds a class.

    Names and None are returned unchanged.
    """
    if given is None or isinstance(given, str):
        return given
    if hasattr(given, "__qualname__"):
        return f"{given.__module__}:{given.__qualname__}"
    return f"{SCRIPT}{type(given).__qualname__}"


def given_or_named(
    name: str | None, factory: Callable[..., Any] | None, own: Mapping[str, type[Any]] | None
) -> str | Callable[..., Any] | None:
    """Resolve a module's name: a script's class, or the name.

    Args:
        name: of the module in a configuration.
        factory: the run's own key `module`, if given in Python.
        own: other classes of the script, by their names in the configuration.
    """
    if name is None or name_of(factory) == name:
        return factory
    return (own or {}).get(name, name)


def is_there(module: str) -> bool:
    """Return whether a module or its outermost package exists, without import."""
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
    """Raise ValueError if a name has a path, not a Python module."""
    file, _, attribute = name.partition(":")
    if not file.endswith(".py") and all(part.isidentifier() for part in file.split(".")):
        return
    directory, _, module = file.removesuffix(".py").rpartition("/")
    where = f", with {directory!r} on PYTHONPATH" if directory not in ("", ".") else ""
    raise ValueError(
        f"{what} {name!r} names a file instead of a Python module: "
        f"write {f'{module}:{attribute}'!r}{where}"
    )


def no_module(name: str, what: str, module: str) -> str:
    """Describe that the Python module of a name cannot be found."""
    where = "where the driver runs" if what in _OF_THE_DRIVER else "wherever this run has workers"
    return (
        f"{what} {name!r} cannot be imported: there is no Python module {module!r} here; "
        f"install it, or put its directory on PYTHONPATH, {where}"
    )


def must_be_given_again(
    key: str, name: str | None, given: object, passed: str | None = None
) -> None:
    """Check that an object of a script is available in this process.

    Args:
        key: a key of the configuration.
        name: its value.
        given: the object with this name, if it was passed again.
        passed: how to pass it, with {} for its name; by default as `key`.

    Raises:
        ValueError: the name belongs to a script, and its object was not passed again.
    """
    if name is not None and name.startswith(SCRIPT) and not callable(given):
        mine = name.removeprefix(SCRIPT)
        how = f"{key}={mine}" if passed is None else passed.format(mine)
        raise ValueError(f"this run's {key} is {mine}, of a script: pass {how} again, in Python")


Named = TypeVar("Named")


class NamedClasses(Generic[Named]):
    """The classes that a configuration key can name.

    Args:
        key: the key, as in "builder".
        shipped: the classes that ship, by name.
        checked: returns the object of a name if it is a class for this key; otherwise raises
            ValueError.
        passed: how a script passes its own class, with {} for its name.
        elsewhere: what to name instead of another library's name; "": nothing.
    """

    def __init__(
        self,
        key: str,
        shipped: Mapping[str, type[Named]],
        checked: Callable[[str, Any], type[Named]],
        passed: str,
        elsewhere: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._key, self._shipped, self._checked, self._passed = key, shipped, checked, passed
        self._elsewhere = elsewhere
        #: Classes of a script that were passed to this process, by name.
        self._given: dict[str, type[Named]] = {}

    def find(self, name: object) -> type[Named]:
        """Find a class by its name.

        Args:
            name: of a shipped class, or "package.module:Class", which is imported here.

        Raises:
            ValueError: there is no such class, or it is not for this key; names the nearest one,
                or the problem.
        """
        if not isinstance(name, str) or (":" not in name and name not in self._shipped):
            unknown = f"{self._key} = {name!r} is not known"
            if answer := self._elsewhere(str(name)):
                raise ValueError(
                    f"{unknown}: {answer}. Known are {', '.join(sorted(self._shipped))}"
                )
            raise ValueError(
                unknown
                + nearest(name, self._shipped, own="name your own as 'package.module:Class'")
            )
        if name in self._shipped:
            return self._shipped[name]
        if name not in self._given:
            must_be_given_again(self._key, name, None, self._passed)
        return self._checked(name, self._given.get(name) or found(name, self._key))

    def register(self, given: object) -> str:
        """Register a class of a script, and return its name.

        Raises:
            ValueError: it is not a class for this key.
        """
        name = str(name_of(given))
        self._given[name] = self._checked(name, given)
        return name
