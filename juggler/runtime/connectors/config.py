"""What a run says about connectors. No torch here: the driver reads this too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from juggler.runtime.connectors.built_in import BUILT_IN, DEFAULTS, PLACES, Place
from juggler.runtime.connectors.pipeline import Piece, Pipeline
from juggler.runtime.modules.by_name import SCRIPT
from juggler.runtime.nearest import nearest

#: Keys of a piece's table that say where it goes. The others are "use", "name" and options.
_PLACING = ("first", "before", "after", "remove")


@dataclass(kw_only=True)
class ConnectorsConfig:
    """The three pipelines.

    Each list has pieces in the order in which data pass them. A piece is the name of a connector
    that ships, `"package.module:Class"`, or a table of `use` (one of these), the options that it
    takes, and, if wanted, `name`, and `first = true`, `before` or `after` with the name of another
    piece. `{remove = "clip_actions"}` takes one out.

    ```toml
    [connectors]
    env_to_module = ["mean_std_filter", {use = "frame_stack", k = 2}]
    module_to_env = [{use = "my_package.actions:Delay", first = true}]
    learner = [{use = "clip_rewards", limit = 5.0}]
    ```
    """

    env_to_module: list[str | dict[str, Any]] = field(default_factory=list)
    """From what the environment shows to what the module sees: flatten, one_hot, mean_std_filter
    (clip, epsilon), frame_stack (k), previous_actions_and_rewards."""

    module_to_env: list[str | dict[str, Any]] = field(default_factory=list)
    """From what the policy chooses to what the environment gets: clip_actions, which is there
    without being asked for, and rescale_actions."""

    learner: list[str | dict[str, Any]] = field(default_factory=list)
    """From batches to what is learned from: clip_rewards (limit), scale_rewards (factor),
    normalize_rewards (gamma, limit, epsilon), next_observations, returns_to_go (gamma)."""

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> ConnectorsConfig:
        """The table `connectors` of a configuration.

        Raises:
            ValueError: a key is unknown, or a pipeline cannot be; names what is nearest.
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
            ValueError: a pipeline cannot be; names the piece, and what is nearest.
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
        """One of the three, with what stands in it by default and what others need in it.

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
        """
        Args:
            own: classes that are here, by the names that stand for them in a configuration.
            places: the pipelines that are needed here.

        Raises:
            ValueError: a piece is a class of a script, to which no name leads.
        """
        for place in places:
            for piece in self.pipeline(place):
                if piece.path.startswith(SCRIPT) and piece.path not in own:
                    raise ValueError(
                        f"this run's connector {piece.name!r} is of a script: pass connectors=... "
                        "with its class again"
                    )

    def _runner_halves(self) -> list[Piece]:
        """What the learner's pieces need in the runners."""
        halves = []
        for piece in self.pipeline("learner"):
            half = BUILT_IN[piece.use].runner_half if piece.use in BUILT_IN else ""
            if half:
                shared = piece.options.keys() & set(BUILT_IN[half].options)
                halves.append(Piece(half, half, {key: piece.options[key] for key in shared}))
        return halves


@dataclass(kw_only=True)
class ConnectorsTable:
    """What stands between environment, module and learner."""

    connectors: dict[str, Any] = field(default_factory=dict)
    """The pieces of three pipelines: a table in a file, JSON on the command line."""

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
        self.parsed()


def _apply(pipeline: Pipeline, entry: object) -> None:
    """Change a pipeline as one entry of its list says."""
    if not isinstance(entry, Mapping):
        pipeline.append(entry)  # type: ignore[arg-type]  # says itself what it cannot be
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
