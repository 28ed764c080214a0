"""The connectors of a run, as a config. No torch here, because the driver reads it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from juggler.runtime.connectors.built_in import BUILT_IN, DEFAULTS, PLACES, Place
from juggler.runtime.connectors.pipeline import Piece, Pipeline
from juggler.runtime.modules.by_name import SCRIPT
from juggler.runtime.nearest import nearest
from juggler.runtime.wrong_value import wrong_where

#: Keys of a piece's table that place it in a pipeline. The others are "use", "name" and options.
_PLACING = ("first", "before", "after", "remove")


@dataclass(kw_only=True)
class ConnectorsConfig:
    """The three pipelines.

    Data pass the pieces of each list in order. A piece is the name of a connector that ships,
    `"package.module:Class"`, or a table. The table has `use` (one of these) and the connector's
    options. It may also have `name`, and one of `first = true`, `before` and `after`, the last two
    with the name of another piece. `{remove = "clip_actions"}` removes a piece.

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
    """From the policy's actions to the environment's: clip_actions, which is there by default, and
    rescale_actions, which maps [-1, 1] to the bounds of a Box."""

    learner: list[str | dict[str, Any]] = field(default_factory=list)
    """From batches to what the algorithm learns from: clip_rewards (limit), scale_rewards (factor),
    normalize_rewards (gamma, limit, epsilon), next_observations, returns_to_go (gamma)."""

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> ConnectorsConfig:
        """Make a config of the table `connectors`.

        Raises:
            ValueError: a key is unknown, or a pipeline is not possible; names the nearest right
                one.
        """
        for key in table:
            if key not in PLACES:
                raise ValueError(f"connectors has no key {key!r}{nearest(key, PLACES)}")
        config = cls(**table)
        config.validate()
        return config

    def validate(self) -> None:
        """
        Raises:
            ValueError: a pipeline is not possible; names the piece, and the nearest right one.
        """
        for key in fields(self):
            if not isinstance(getattr(self, key.name), list):
                raise ValueError(
                    f"connectors.{key.name} must be a list of pieces, not "
                    f"{getattr(self, key.name)!r}"
                )
        for place in PLACES:
            self.pipeline(place)

    def pipeline(self, place: Place) -> Pipeline:
        """One of the three pipelines, with its default pieces and those that other pieces need in
        it.

        Raises:
            ValueError: as `validate`.
        """
        halves = self._runner_halves() if place == "env_to_module" else []
        try:
            pipeline = Pipeline(DEFAULTS[place])
            for entry in getattr(self, place):
                _apply(pipeline, entry)
            for half in halves:
                present = [piece for piece in pipeline if piece.use == half.use]
                if not present:
                    pipeline.append(half)
                elif present != [half]:
                    raise ValueError(
                        f"{half.use!r} comes by itself with what the learner's piece needs, which "
                        f"is {dict(half.options)}: leave it out, and use that piece once"
                    )
            for piece in pipeline:
                home = BUILT_IN[piece.use].place if piece.use in BUILT_IN else place
                if home != place:
                    raise ValueError(f"{piece.use!r} belongs in connectors.{home}")
        except ValueError as error:
            raise ValueError(f"connectors.{place}: {error}") from error
        return pipeline

    def must_be_given_again(
        self, own: Mapping[str, type[Any]], places: Sequence[Place] = PLACES
    ) -> None:
        """Check that every connector class of a script is available in this process.

        Args:
            own: classes of this process, by the names that stand for them in a configuration.
            places: the pipelines that are needed here.

        Raises:
            ValueError: a piece is a class of a script that was not passed again.
        """
        for place in places:
            for piece in self.pipeline(place):
                if piece.path.startswith(SCRIPT) and piece.path not in own:
                    raise ValueError(
                        f"this run's connector {piece.name!r} is of a script: pass connectors=... "
                        "with its class again"
                    )

    def _runner_halves(self) -> list[Piece]:
        """The pieces that EnvRunners need because of the learner's pieces."""
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
    """The pieces of the three pipelines between environment, module and learner: a table in a file,
    JSON on the command line."""

    def parsed(self) -> ConnectorsConfig:
        """
        Raises:
            ValueError: as `ConnectorsConfig.parse`.
        """
        return ConnectorsConfig.parse(self.connectors)

    def validate(self) -> None:
        """
        Raises:
            ValueError: as `ConnectorsConfig.parse`.
        """
        with wrong_where("connectors"):
            self.parsed()


def _apply(pipeline: Pipeline, entry: object) -> None:
    """Change a pipeline according to one entry of its list."""
    if not isinstance(entry, Mapping):
        pipeline.append(entry)  # type: ignore[arg-type]  # it checks the type itself
        return
    placing = {key: entry[key] for key in _PLACING if key in entry}
    piece = {key: value for key, value in entry.items() if key not in _PLACING}
    if len(placing) > 1:
        raise ValueError(f"one of {', '.join(map(repr, placing))} can be, not all: {dict(entry)}")
    match placing:
        case {"remove": where}:
            if piece:
                raise ValueError(f"'remove' stands alone in its table, not with {sorted(piece)}")
            pipeline.remove(where)
        case {"before": where}:
            pipeline.insert_before(where, piece)
        case {"after": where}:
            pipeline.insert_after(where, piece)
        case {"first": True}:
            pipeline.prepend(piece)
        case _:
            pipeline.append(piece)
