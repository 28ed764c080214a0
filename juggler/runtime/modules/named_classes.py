"""Classes that a key of a configuration names: those that ship, and those of users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from juggler.runtime.modules.by_name import found, must_be_given_again, name_of
from juggler.runtime.nearest import nearest

Named = TypeVar("Named")


class NamedClasses(Generic[Named]):
    """The classes that one key can name.

    Args:
        key: the key, as in "builder".
        shipped: the classes that ship, by name.
        checked: takes a name and what it stands for, and returns the latter. It raises ValueError
            if that is no class for this key.
        passed: how a script passes a class of its own, with {} for its name.
        elsewhere: says what to name in place of a name that other libraries have; "": nothing.
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
        #: Classes of a script that were given to this process, by the names that stand for them.
        self._given: dict[str, type[Named]] = {}

    def find(self, name: object) -> type[Named]:
        """
        Args:
            name: of one that ships, or "package.module:Class", which is imported here.

        Raises:
            ValueError: nothing has that name, or what has it is no class for this key; says which
                name is nearest, or what is wrong.
        """
        if not isinstance(name, str) or (":" not in name and name not in self._shipped):
            said = f"{self._key} = {name!r} is not known"
            if answer := self._elsewhere(str(name)):
                raise ValueError(f"{said}: {answer}. Known are {', '.join(sorted(self._shipped))}")
            raise ValueError(
                said
                + nearest(
                    name, self._shipped, own="one of your own is named as 'package.module:Class'"
                )
            )
        if name in self._shipped:
            return self._shipped[name]
        if name not in self._given:
            must_be_given_again(self._key, name, None, self._passed)
        return self._checked(name, self._given.get(name) or found(name, self._key))

    def give(self, given: object) -> str:
        """Have this process find a class of a script, and return the name that stands for it.

        Raises:
            ValueError: it is no class for this key.
        """
        name = str(name_of(given))
        self._given[name] = self._checked(name, given)
        return name
