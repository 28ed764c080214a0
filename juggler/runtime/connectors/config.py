"""The connectors of a run as a config, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, get_args

from juggler.runtime.modules.import_by_name import SCRIPT
from juggler.runtime.near_matches import nearest
from juggler.runtime.wrong_value import wrong_where

Place = Literal["env_to_module", "module_to_env", "learner"]
PLACES: Final[tuple[Place, ...]] = get_args(Place)

_HERE = "juggler.runtime.connectors"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A connector that ships.

    Attributes:
        place: the pipeline it belongs to.
        path: package.module:Class.
        options: names of its options.
        runner_half: the connector that a learner's piece needs in the EnvRunners; it gets the
            options that both have, and is added automatically.
    """

    place: Place
    path: str
    options: tuple[str, ...] = field(default=())
    runner_half: str = ""


BUILT_IN: Final[dict[str, BuiltIn]] = {
    "flatten": BuiltIn("env_to_module", f"{_HERE}.encoding:Flatten"),
    "one_hot": BuiltIn("env_to_module", f"{_HERE}.encoding:OneHot"),
    "mean_std_filter": BuiltIn(
        "env_to_module", f"{_HERE}.encoding:MeanStdFilter", ("clip", "epsilon")
    ),
    "frame_stack": BuiltIn("env_to_module", f"{_HERE}.contexts:FrameStack", ("k",)),
    "previous_actions_and_rewards": BuiltIn(
        "env_to_module", f"{_HERE}.contexts:PreviousActionsAndRewards"
    ),
    "discounted_returns": BuiltIn(
        "env_to_module", f"{_HERE}.learning:DiscountedReturns", ("gamma",)
    ),
    "clip_actions": BuiltIn("module_to_env", f"{_HERE}.encoding:ClipActions"),
    "rescale_actions": BuiltIn("module_to_env", f"{_HERE}.encoding:RescaleActions"),
    "clip_rewards": BuiltIn("learner", f"{_HERE}.learning:ClipRewards", ("limit",)),
    "scale_rewards": BuiltIn("learner", f"{_HERE}.learning:ScaleRewards", ("factor",)),
    "normalize_rewards": BuiltIn(
        "learner",
        f"{_HERE}.learning:NormalizeRewards",
        ("gamma", "limit", "epsilon"),
        runner_half="discounted_returns",
    ),
    "next_observations": BuiltIn("learner", f"{_HERE}.learning:NextObservations"),
    "returns_to_go": BuiltIn("learner", f"{_HERE}.learning:ReturnsToGo", ("gamma",)),
}

#: The default pieces of each pipeline.
DEFAULTS: Final[dict[Place, tuple[str, ...]]] = {
    "env_to_module": (),
    "module_to_env": ("clip_actions",),
    "learner": (),
}


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
    def of(cls, given: object) -> Piece:
        """Parse a piece: a name, a class, or a table.

        The table has the name or class as "use", optionally a "name", and the connector's options.

        Raises:
            ValueError: it does not name a connector, or has an unknown option.
        """
        table = dict(given) if isinstance(given, Mapping) else {"use": given}
        use, name = table.pop("use", None), table.pop("name", None)
        if isinstance(use, type):
            use = class_path(use)
        if not isinstance(use, str):
            raise ValueError(
                f"a connector is a name, or a table with one under 'use', not {given!r}"
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


def _index(pieces: Sequence[Piece], where: object) -> int:
    """Return the index of the piece with this name or class."""
    wanted = class_path(where) if isinstance(where, type) else where
    if not isinstance(wanted, str):
        raise ValueError(f"a connector is found by its name or its class, not by {where!r}")
    found = [k for k, each in enumerate(pieces) if wanted in (each.name, each.path, each.use)]
    if len(found) == 1:
        return found[0]
    names = [piece.name for piece in pieces]
    if found:
        which = ", ".join(repr(names[index]) for index in found)
        raise ValueError(f"{len(found)} connectors are {wanted!r}: use one of the names {which}")
    short = wanted.rpartition(":")[2]
    raise ValueError(f"the pipeline has no connector {short!r}{nearest(short, names)}")


def _apply(pieces: list[Piece], entry: object) -> None:
    """Change a pipeline according to one entry of its list."""
    table = entry if isinstance(entry, Mapping) else {"use": entry}
    placing = {key: table[key] for key in _PLACING if key in table}
    rest = {key: value for key, value in table.items() if key not in _PLACING}
    if len(placing) > 1:
        raise ValueError(f"give only one of {', '.join(map(repr, placing))}: {dict(table)}")
    index = len(pieces)
    # Later entries see the changes of earlier ones.
    match placing:
        case {"remove": where}:
            if rest:
                raise ValueError(f"a table with 'remove' must have no other keys: {sorted(rest)}")
            del pieces[_index(pieces, where)]
            return
        case {"before": where}:
            index = _index(pieces, where)
        case {"after": where}:
            index = _index(pieces, where) + 1
        case {"first": True}:
            index = 0
    # States go by name, so each name belongs to one piece.
    piece = Piece.of(rest if isinstance(entry, Mapping) else entry)
    if any(piece.name == other.name for other in pieces):
        raise ValueError(
            f"two connectors are called {piece.name!r}: give one of them another 'name'"
        )
    pieces.insert(index, piece)


def class_path(connector: type[Any]) -> str:
    """Return a class as package.module:Class."""
    return f"{connector.__module__}:{connector.__qualname__}"


def own_connectors(keys: dict[str, Any]) -> dict[str, type[Any]]:
    """Replace connector classes in `keys` by names; return them by name."""
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
    """Raise ValueError if the connector has no such option name."""
    known = list(known)
    for option in options:
        if option not in known:
            raise ValueError(f"connector {name!r} has no option {option!r}{nearest(option, known)}")


#: Keys of a piece's table that place it in a pipeline. Other keys are "use", "name" and options.
_PLACING = ("first", "before", "after", "remove")


@dataclass(kw_only=True)
class ConnectorsConfig:
    """The three pipelines.

    Data pass through the pieces of each list in order. A piece is the name of a connector that
    ships, `"package.module:Class"`, or a table. The table has `use` (one of these names) and the
    connector's options. It may also have `name`, and one of `first = true`, `before` and `after`,
    the last two with the name of another piece. `{remove = "clip_actions"}` removes a piece.

    ```toml
    [connectors]
    env_to_module = ["mean_std_filter", {use = "frame_stack", k = 2}]
    module_to_env = [{use = "my_package.actions:Delay", first = true}]
    learner = [{use = "clip_rewards", limit = 5.0}]
    ```
    """

    env_to_module: list[str | dict[str, Any]] = field(default_factory=list)
    """From the environment's observations to the module's: flatten, one_hot, mean_std_filter (clip,
    epsilon), frame_stack (k), previous_actions_and_rewards."""

    module_to_env: list[str | dict[str, Any]] = field(default_factory=list)
    """From the policy's actions to the environment's: clip_actions, the default, and
    rescale_actions, from [-1, 1] to the bounds of a Box."""

    learner: list[str | dict[str, Any]] = field(default_factory=list)
    """From batches to what the algorithm learns from: clip_rewards (limit), scale_rewards (factor),
    normalize_rewards (gamma, limit, epsilon), next_observations, returns_to_go (gamma)."""

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> ConnectorsConfig:
        """Make a config of the table `connectors`.

        Raises:
            ValueError: a key is unknown, or a pipeline is impossible; names the nearest known key.
        """
        for key in table:
            if key not in PLACES:
                raise ValueError(f"connectors has no key {key!r}{nearest(key, PLACES)}")
        config = cls(**table)
        config.validate()
        return config

    def validate(self) -> None:
        """Check the pipelines.

        Raises:
            ValueError: a pipeline is impossible; names the piece, and the nearest known one.
        """
        for key in fields(self):
            if not isinstance(getattr(self, key.name), list):
                raise ValueError(
                    f"connectors.{key.name} must be a list of connectors, not "
                    f"{getattr(self, key.name)!r}"
                )
        for place in PLACES:
            self.pipeline(place)

    def pipeline(self, place: Place) -> list[Piece]:
        """Return the pieces of a pipeline: defaults, configured and required ones.

        Raises:
            ValueError: as for `validate`.
        """
        halves = self._runner_halves() if place == "env_to_module" else []
        try:
            pipeline = [Piece.of(name) for name in DEFAULTS[place]]
            for entry in getattr(self, place):
                _apply(pipeline, entry)
            # The learner's piece decides the options of its half: two values could differ.
            for half in halves:
                present = [piece for piece in pipeline if piece.use == half.use]
                if not present:
                    pipeline.append(half)
                elif present != [half]:
                    raise ValueError(
                        f"{half.use!r} is added automatically with options of the learner's piece: "
                        f"{dict(half.options)}. Leave it out, and use that piece once"
                    )
            for piece in pipeline:
                # Own classes are checked when they are imported.
                home = BUILT_IN[piece.use].place if piece.use in BUILT_IN else place
                if home != place:
                    raise ValueError(f"{piece.use!r} belongs in connectors.{home}")
        except ValueError as error:
            raise ValueError(f"connectors.{place}: {error}") from error
        return pipeline

    def must_be_given_again(
        self, own: Mapping[str, type[Any]], places: Sequence[Place] = PLACES
    ) -> None:
        """Check that a script's connector classes are available here.

        Args:
            own: classes of this process, by their names in a configuration.
            places: the pipelines that are needed here.

        Raises:
            ValueError: a piece is a script's class that was not passed again.
        """
        for place in places:
            for piece in self.pipeline(place):
                if piece.path.startswith(SCRIPT) and piece.path not in own:
                    raise ValueError(
                        f"this run's connector {piece.name!r} is of a script: pass connectors=... "
                        "with its class again"
                    )

    def _runner_halves(self) -> list[Piece]:
        """Return the pieces that EnvRunners need because of the learner's pieces."""
        halves = []
        for piece in self.pipeline("learner"):
            half = BUILT_IN[piece.use].runner_half if piece.use in BUILT_IN else ""
            if half:
                shared = piece.options.keys() & set(BUILT_IN[half].options)
                halves.append(Piece(half, half, {key: piece.options[key] for key in shared}))
        return halves


@dataclass(kw_only=True)
class ConnectorsTable:
    """The table `connectors` of a run."""

    connectors: dict[str, Any] = field(default_factory=dict)
    """Connectors of the three pipelines between environment, module and learner: a table, or JSON
    on the command line."""

    def parsed(self) -> ConnectorsConfig:
        """Parse the table; raises like `ConnectorsConfig.parse`."""
        return ConnectorsConfig.parse(self.connectors)

    def validate(self) -> None:
        """Check the table; raises like `ConnectorsConfig.parse`."""
        with wrong_where("connectors"):
            self.parsed()
