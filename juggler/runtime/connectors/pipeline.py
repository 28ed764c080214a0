"""A pipeline before it is built: its pieces and their order. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from juggler.runtime.connectors.built_in import BUILT_IN
from juggler.runtime.nearest import nearest

#: A piece: a built-in's name, "package.module:Class", a connector class, or a table with one of
#: these as "use", perhaps a "name", and the options that it is built with.
PieceLike: TypeAlias = "str | type[Any] | Mapping[str, Any] | Piece"
#: How to find a piece of a pipeline: by its name or its class.
Where: TypeAlias = "str | type[Any]"

_OWN: Final = "your own must be named as 'package.module:Class'"


@dataclass(frozen=True, slots=True)
class Piece:
    """One connector of a pipeline, before it is built.

    Attributes:
        use: a built-in's name, or package.module:Class.
        name: its name in the pipeline.
        options: its options.
    """

    use: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: PieceLike) -> Piece:
        """A piece from any of the forms in which it may be written.

        Raises:
            ValueError: it names no connector, or a built-in has no such option.
        """
        if isinstance(given, Piece):
            return given
        table = dict(given) if isinstance(given, Mapping) else {"use": given}
        use, name = table.pop("use", None), table.pop("name", None)
        if isinstance(use, type):
            use = class_path(use)
        if not isinstance(use, str):
            raise ValueError(
                f"a connector is a name, or a table that has one under 'use', not {given!r}"
            )
        if use not in BUILT_IN and ":" not in use:
            raise ValueError(f"there is no connector {use!r}{nearest(use, BUILT_IN, own=_OWN)}")
        if name is not None and (not isinstance(name, str) or not name or "/" in name):
            raise ValueError(f"the name of connector {use!r} must be a word, not {name!r}")
        if use in BUILT_IN:
            check_options(use, table, BUILT_IN[use].options)
        return cls(use, name or use.rpartition(":")[2].rpartition(".")[2], table)

    @property
    def path(self) -> str:
        """The connector's class, as package.module:Class."""
        return BUILT_IN[self.use].path if self.use in BUILT_IN else self.use


class Pipeline:
    """Connectors in the order in which data pass them.

        Pipeline(["mean_std_filter", "frame_stack"]).insert_before("frame_stack", MyConnector)

    Every method that changes the pipeline returns it.

    Raises:
        ValueError: in every method: the argument is not a piece, its name is taken, or the piece
            that was referred to does not exist.
    """

    def __init__(self, pieces: Iterable[PieceLike] = ()) -> None:
        self._pieces: list[Piece] = []
        for piece in pieces:
            self.append(piece)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __repr__(self) -> str:
        return f"Pipeline({[piece.name for piece in self]})"

    def prepend(self, piece: PieceLike) -> Pipeline:
        """Add a piece at the start."""
        return self._insert(0, piece)

    def append(self, piece: PieceLike) -> Pipeline:
        """Add a piece at the end."""
        return self._insert(len(self), piece)

    def insert_before(self, where: Where, piece: PieceLike) -> Pipeline:
        """Add a piece right before the one with this name or class."""
        return self._insert(self._index(where), piece)

    def insert_after(self, where: Where, piece: PieceLike) -> Pipeline:
        """Add a piece right after the one with this name or class."""
        return self._insert(self._index(where) + 1, piece)

    def remove(self, where: Where) -> Pipeline:
        """Remove the piece with this name or class."""
        del self._pieces[self._index(where)]
        return self

    def _insert(self, index: int, given: PieceLike) -> Pipeline:
        piece = Piece.of(given)
        if any(piece.name == other.name for other in self):
            raise ValueError(
                f"two connectors are called {piece.name!r}: give one of them another 'name'"
            )
        self._pieces.insert(index, piece)
        return self

    def _index(self, where: Where) -> int:
        if not isinstance(where, str | type):
            raise ValueError(f"a connector is found by its name or its class, not by {where!r}")
        of_class = isinstance(where, type)
        wanted = class_path(where) if isinstance(where, type) else where
        found = [
            index
            for index, piece in enumerate(self)
            if wanted in ((piece.path,) if of_class else (piece.name, piece.path, piece.use))
        ]
        if len(found) == 1:
            return found[0]
        names = [piece.name for piece in self]
        if found:
            which = ", ".join(repr(names[index]) for index in found)
            raise ValueError(f"{len(found)} connectors are {wanted!r}: name one of {which}")
        short = wanted.rpartition(":")[2]
        raise ValueError(f"the pipeline has no connector {short!r}{nearest(short, names)}")


def class_path(connector: type[Any]) -> str:
    """A class as package.module:Class."""
    return f"{connector.__module__}:{connector.__qualname__}"


def own_connectors(keys: dict[str, Any]) -> dict[str, type[Any]]:
    """Replaces connector classes in `keys` by names, and returns the classes by these names."""
    own: dict[str, type[Any]] = {}
    if "connectors" in keys:
        keys["connectors"] = _with_names(keys["connectors"], own)
    return own


def _with_names(value: Any, own: dict[str, type[Any]]) -> Any:
    if isinstance(value, type):
        own[class_path(value)] = value
        return class_path(value)
    if isinstance(value, dict):
        return {key: _with_names(each, own) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_names(each, own) for each in value]
    return value


def check_options(name: str, options: Iterable[str], known: Iterable[str]) -> None:
    """
    Raises:
        ValueError: the connector of this name has no such option.
    """
    known = list(known)
    for option in options:
        if option not in known:
            raise ValueError(f"connector {name!r} has no option {option!r}{nearest(option, known)}")
