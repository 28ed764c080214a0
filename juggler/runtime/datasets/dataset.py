"""Reads the episodes of a Minari data set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from juggler.runtime.checkpoints.checkpoint import DIRECTORY, newest_first
from juggler.runtime.install_commands import installing
from juggler.runtime.near_matches import all_of, closest, listed, one_of
from juggler.runtime.wire.structures import (
    choices_of,
    find_outside,
    space_leaves,
    to_tree,
)
from juggler.runtime.wire.trees import Path as TreePath
from juggler.runtime.wire.trees import Tree, flatten, path_name, unflatten

#: Exceptions seen when reading damaged files.
_DAMAGED = (OSError, KeyError, ValueError, TypeError, RuntimeError, AssertionError)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedEpisode:
    """A whole episode of L steps, as an environment sees it.

    Attributes:
        observations: a tree of arrays [L + 1, ...]
        actions: a tree of arrays [L, ...], as the environment received them.
        rewards: [L]
        terminated: the environment ended the episode. Otherwise it was cut off.
    """

    observations: Tree
    actions: Tree
    rewards: NDArray[np.float32]
    terminated: bool

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def nbytes(self) -> int:
        """Bytes of observations, actions and rewards."""
        trees = {"observations": self.observations, "actions": self.actions}
        return self.rewards.nbytes + sum(leaf.nbytes for _, leaf in flatten(trees))


class Dataset:
    """A Minari data set of this host, or its parts.

    Args:
        name: its directory, or its name in Minari's directory.

    Attributes:
        name: as given.
        observation_space: of the environment.
        action_space: of the environment.

    Raises:
        DatasetError: there is no such data set, it is damaged or empty, its parts have different
            spaces, or the package minari is missing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # Minari handles relative paths wrongly.
        self._parts = [_SingleDataset(name, place.absolute()) for place in find_dataset(name)]
        self._ends = np.cumsum([part.count for part in self._parts])  # [parts]
        first = self._parts[0]
        self.observation_space, self.action_space = first.observation_space, first.action_space
        for part in self._parts[1:]:
            both = part.observation_space, part.action_space
            if both != (self.observation_space, self.action_space):
                raise DatasetError(
                    f"data set {name!r}: {part.data} has other spaces than {first.data}: "
                    f"observations in {both[0]} and actions in {both[1]}, not "
                    f"{self.observation_space} and {self.action_space}"
                )

    def __len__(self) -> int:
        """Return the number of episodes."""
        return int(self._ends[-1])

    def episode(self, index: int, finite: Sequence[str] = ()) -> RecordedEpisode:
        """Read one episode from the disk.

        Args:
            index: of the episode.
            finite: the keys among "observations", "actions" and "rewards" that must be finite,
                except the last observation of the episode.

        Raises:
            DatasetError: it is damaged, does not fit the spaces, or is not finite.
        """
        at = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[at].episode(index - (int(self._ends[at - 1]) if at else 0), finite)

    def must_have_the_spaces_of(self, env: str, vector: VectorEnv[Any, Any, Any]) -> None:
        """Raise DatasetError if environments have other spaces."""
        for what, own, other in (
            ("observations", self.observation_space, vector.single_observation_space),
            ("actions", self.action_space, vector.single_action_space),
        ):
            if own != other:
                raise DatasetError(
                    f"data set {self.name!r} has {what} in {own}, and the environment {env} has "
                    f"them in {other}: choose a data set of this environment, or another env"
                )


class _SingleDataset:
    """One data set, as Minari writes it.

    Args:
        name: of the data set that it belongs to, for errors.
        data: the directory with its data.

    Attributes:
        data: as given.
        count: episodes.
        observation_space: of the environment.
        action_space: of the environment.

    Raises:
        DatasetError: as `Dataset`.
    """

    def __init__(self, name: str, data: Path) -> None:
        self.data = data
        metadata = read_metadata(data)
        # Imported here because it is an extra.
        try:
            from minari.dataset.minari_storage import MinariStorage
        except ModuleNotFoundError as error:
            raise DatasetError(_missing_package(name, error.name)) from error
        try:
            self._storage = MinariStorage.read(self.data)
        except ImportError as error:  # a format whose package is missing
            if "h5py" in str(error):
                raise DatasetError(_missing_package(name, "h5py")) from error
            raise DatasetError(f"data set {name!r}: {error}") from error
        except _DAMAGED as error:
            raise DatasetError(f"{self.data} is damaged: {error}") from error
        self.observation_space: gymnasium.Space[Any] = self._storage.observation_space
        self.action_space: gymnasium.Space[Any] = self._storage.action_space
        # Computed once, since each episode is checked against them.
        self._observed = space_leaves(self.observation_space)
        self._acted = space_leaves(self.action_space)
        # The file may have been edited by hand.
        count = metadata["total_episodes"]
        if type(count) is not int or count < 1:
            raise DatasetError(f"data set {name!r} has {count} episodes: nothing to learn from")
        self.count = count

    def episode(self, index: int, finite: Sequence[str]) -> RecordedEpisode:
        """Read one episode from the disk: see `Dataset.episode`."""
        where = f"episode {index} of the data set in {self.data}"
        try:
            (found,) = self._storage.get_episodes([index])
            rewards = np.asarray(found["rewards"], np.float32)  # [L]
            terminated = np.asarray(found["terminations"], np.bool_)  # [L]
            truncated = np.asarray(found["truncations"], np.bool_)  # [L]
            observations = to_tree(self.observation_space, found["observations"])
            actions = to_tree(self.action_space, found["actions"])
        except _DAMAGED as error:
            raise DatasetError(f"{where} is damaged: {error}") from error
        # Minari does not check what it reads.
        steps = len(rewards)
        if not steps or not rewards.shape == terminated.shape == truncated.shape == (steps,):
            shapes = ", ".join(str(list(x.shape)) for x in (rewards, terminated, truncated))
            raise DatasetError(
                f"{where} is damaged: its rewards, terminations and truncations have the shapes "
                f"{shapes}, not [L] with at least one step"
            )
        if (terminated | truncated)[:-1].any():
            raise DatasetError(f"{where} is damaged: it continues after its end")
        seen = _checked(where, "observations", observations, self._observed, steps + 1)
        acted = _checked(where, "actions", actions, self._acted, steps)
        columns = {"observations": seen, "actions": acted, "rewards": rewards}
        # Otherwise a non-finite number would be blamed on the environment or the learning rate. No
        # action follows the last observation.
        for path, array in flatten({name: columns[name] for name in finite}):
            if array.dtype.kind == "f" and not np.isfinite(array[:steps]).all():
                raise DatasetError(
                    f"{where} holds a number that is not finite, in its {'/'.join(path)}"
                )
        return RecordedEpisode(seen, acted, rewards, bool(terminated[-1]))


def _missing_package(name: str, package: str | None) -> str:
    """Describe a missing package for data sets."""
    return (
        f"data set {name!r} needs the package {package}: {installing('datasets')}, on every host "
        "that reads it"
    )


def _checked(
    where: str, what: str, tree: Any, leaves: list[tuple[TreePath, Any]], rows: int
) -> Tree:
    """Read a space's tree of arrays [rows, ...] in its dtypes.

    Raises:
        DatasetError: it does not fit the space.
    """
    arrays, kept = dict(flatten(tree)), []
    for path, space in leaves:
        if path not in arrays:
            raise DatasetError(f"{where} is damaged: its {what} have no {path_name(path)}")
        array, name = np.asarray(arrays[path]), "/".join((what, *path))
        shape = (rows, *space.shape)
        if array.shape != shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise DatasetError(
                f"{where} is damaged: its {name} have the shape {list(array.shape)} and the dtype "
                f"{array.dtype}, not {list(shape)} and {space.dtype}"
            )
        if find_outside(choices_of([((), space)]), array):
            raise DatasetError(f"{where} is damaged: its {name} hold a number outside {space}")
        kept.append((path, array.astype(space.dtype, copy=False)))
    return unflatten(kept)


#: Within the directory of a data set.
DATA: Final = "data"
METADATA: Final = "metadata.json"
#: Names of a data set's parts within its directory: each EnvRunner of a run writes its own part.
PARTS: Final = "envrunner-*-part-*-v0"
#: Maximum number of directories searched for a data set with a similar name.
_MOST_LOOKED_AT: Final = 10_000


class DatasetError(ValueError):
    """A data set is missing, damaged, or does not fit."""


def must_be_installed() -> None:
    """Raise DatasetError if a package for writing data sets is missing."""
    for name in ("minari", "h5py"):
        if find_spec(name) is None:
            raise DatasetError(
                f"writing a data set needs the package {name}: {installing('datasets')}"
            )


def find_dataset(name: str) -> list[Path]:
    """Return the directories of a data set: one, or its parts.

    Args:
        name: its directory, or its name among Minari's data sets on this host.

    Raises:
        DatasetError: there is no such data set; names the nearest one.
    """
    path, kept = Path(name).expanduser(), _minari_directory()
    for directory in (path, kept / name):
        if places := _places_in(directory):
            return places
    if path.exists():
        raise DatasetError(f"{name} is not a Minari data set: {_instead(path, Path(name))}")
    near = _nearest_path(Path(name)) or closest(name, _names_in(kept))
    raise DatasetError(
        f"there is no data set {name!r}, neither as a directory nor in Minari's directory "
        f"{kept}: "
        + (f"did you mean {near!r}?" if near else "give the path of its directory")
        + _unfinished(path.parent, path.name)
    )


def _instead(path: Path, name: Path) -> str:
    """Suggest what to name if something is not a data set.

    Args:
        path: its path.
        name: as it was given.
    """
    there = sorted(islice(path.glob("*"), _MOST_LOOKED_AT))
    if found := [str(name / each.name) for each in there if _is_one(each)]:
        return f"did you mean {listed(found, one_of)}?"
    if (path / DIRECTORY).is_dir() and newest_first(path / DIRECTORY):
        return (
            f"it is the directory of a run, and `juggler record {name}` makes a data set with its "
            "policy"
        )
    return (
        f"it has no file {DATA}/{METADATA}, and no parts that a run with record = ... has "
        f"completed{_unfinished(path, PARTS)}"
    )


def read_metadata(data: Path) -> dict[str, Any]:
    """Read a data set's metadata.

    Args:
        data: from `find_dataset`.

    Raises:
        DatasetError: its file is damaged or incomplete.
    """
    file = data / METADATA
    try:
        metadata = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} is damaged: {error}") from error
    # A data set gets its name last. Minari would make the environment to find its spaces, and so
    # run code that the file names.
    needed = ("observation_space", "action_space", "dataset_id", "total_episodes")
    if not isinstance(metadata, dict) or (missing := [k for k in needed if k not in metadata]):
        what = all_of(missing) if isinstance(metadata, dict) else "JSON object"
        raise DatasetError(f"{file} has no {what}: it is damaged or incomplete")
    return metadata


def environment_of(name: str) -> dict[str, Any]:
    """Return the keys env and env_kwargs of a data set; {}: unknown.

    Raises:
        DatasetError: there is no such data set, or it is damaged.
    """
    data = find_dataset(name)[0]
    spec_json = read_metadata(data).get("env_spec")
    try:
        spec = {} if spec_json is None else json.loads(spec_json)
        env, kwargs = spec.get("id", ""), spec.get("kwargs") or {}
    except (TypeError, ValueError, AttributeError) as error:
        raise DatasetError(f"{data / METADATA} is damaged: env_spec: {error}") from error
    if not isinstance(env, str) or not isinstance(kwargs, dict):
        raise DatasetError(f"{data / METADATA} is damaged: env_spec: id is text, and kwargs a map")
    return {"env": env, "env_kwargs": kwargs} if env else {}


def partial_of(name: str) -> str:
    """Return the pattern of directories of incomplete data sets."""
    return f".{name}.partial-*"


def _unfinished(directory: Path, name: str) -> str:
    """Describe incomplete data sets in a directory, or ""."""
    found = sorted(each.name for each in directory.glob(partial_of(name)))
    if not found:
        return ""
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f". {directory / found[0]}{others} cannot be read: it is being written, or its "
        "process was killed before the end"
    )


def _places_in(directory: Path) -> list[Path]:
    """Return the directories that may be data sets, or []."""
    for place in (directory / DATA, directory):
        if (place / METADATA).is_file():
            return [place]
    return sorted(directory.glob(f"{PARTS}/{DATA}"))


def _nearest_path(wrong: Path) -> str | None:
    """Return the path of the data set that was probably meant.

    Assumes that its last name is wrong, or the name before it.
    """
    for count in range(1, 1 + min(2, len(wrong.parts))):
        above = wrong.parents[count - 1]
        directory = above.expanduser()
        if directory.is_dir():
            found = islice(directory.glob("/".join("*" * count)), _MOST_LOOKED_AT)
            known = [each.relative_to(directory).as_posix() for each in found if _is_one(each)]
            near = closest("/".join(wrong.parts[-count:]), known)
            return near and str(above / near)
    return None


def _is_one(directory: Path) -> bool:
    """Return whether a directory has a readable data set."""
    try:
        return not directory.name.startswith(".") and bool(_places_in(directory))
    except OSError:  # not readable
        return False


def _minari_directory() -> Path:
    """Return Minari's directory of data sets on this host."""
    given = os.environ.get("MINARI_DATASETS_PATH")
    return Path(given) if given else Path.home() / ".minari" / "datasets"


def _names_in(directory: Path) -> Iterator[str]:
    for found in directory.glob(f"**/{DATA}/{METADATA}"):
        yield found.parent.parent.relative_to(directory).as_posix()
