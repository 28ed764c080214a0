"""Records demonstrations with the policy in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from juggler.driver.config import RunConfig
from juggler.driver.evaluating import Evaluated, evaluate
from juggler.runtime.checkpoints.frozen import run_of

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from juggler.envrunner.datasets.episode_recorder import EpisodeRecorder

#: Where demonstrations are in a run's directory, if nobody says otherwise.
DEMONSTRATIONS: Final = "demonstrations"


@dataclass(frozen=True, slots=True)
class Demonstrations(Evaluated):
    """A data set of episodes that a checkpoint's policy played deterministically.

    Attributes:
        dataset: its directory.
    """

    dataset: Path = Path()


def record(
    checkpoint: str | Path,
    episodes: int = 100,
    seed: int = 0,
    *,
    to: str | Path | None = None,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    connectors: Mapping[str, Any] | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Demonstrations:
    """Play whole episodes with the policy in a checkpoint, as `evaluate` does, and write them as a
    Minari data set: observations as the environment gave them, and actions as it got them.

    The data set is there when all episodes are; if recording fails, there is none.

    Args:
        checkpoint: as in `evaluate`; so are all others.
        episodes: number of episodes.
        seed: of the environments.
        to: the data set's directory, which must not exist; None: `demonstrations` in the run's
            directory.
        env: another environment than the run's.
        module: the class that the run trained, if it cannot be imported by name.
        connectors: the run's connectors again.
        watch: as in `evaluate`.

    Raises:
        ConfigError: as `evaluate`, or the run has several agents.
        CheckpointError: as `evaluate`.
        EnvironmentFailed: an environment failed.
        DatasetError: the data set cannot be written.
    """
    places: list[Path] = []

    @contextmanager
    def recording(
        config: RunConfig, where: Path, envs: VectorEnv[Any, Any, Any]
    ) -> Iterator[EpisodeRecorder]:
        from juggler.envrunner.datasets.describing import spec_of, words_of
        from juggler.envrunner.datasets.episode_recorder import EpisodeRecorder
        from juggler.envrunner.datasets.writing import writing

        place = Path(to).expanduser() if to is not None else run_of(where) / DEMONSTRATIONS
        about = {
            "algorithm_name": "juggler",
            "description": f"{episodes} episodes of the policy in {where.name}, which took its "
            "most likely actions",
        }
        spaces = envs.single_observation_space, envs.single_action_space
        spec = spec_of(config.env_runner, env if callable(env) else None)
        dataset_id = f"juggler/{words_of(config.env_runner.env)}-v0"
        with writing(place, dataset_id, *spaces, spec, about) as writer:
            yield EpisodeRecorder(envs, writer.add)
        places.append(place)

    played = evaluate(
        checkpoint,
        episodes,
        seed,
        env=env,
        module=module,
        connectors=connectors,
        watch=watch,
        recording=recording,
    )
    return Demonstrations(
        played.checkpoint, played.returns, played.lengths, [], {}, dataset=places[0]
    )
