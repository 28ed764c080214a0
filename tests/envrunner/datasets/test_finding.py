"""Data sets are found by path or name; episodes end whole."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from support.random_episodes import CHOICES, VECTOR, random_episodes
from support.scripted_environments import Script, Scripted, masked
from support.vectors import MODES, vector_of_functions

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.datasets.dataset_writer import EpisodeRecorder, spec_of, writing
from juggler.envrunner.environments.action_masks import observe_masks
from juggler.runtime.datasets.dataset import (
    DatasetError,
    RecordedEpisode,
    environment_of,
    find_dataset,
    read_metadata,
)
from juggler.runtime.modules.import_by_name import name_of

WHOLE: dict[str, Any] = {
    "observation_space": "{}",
    "action_space": "{}",
    "dataset_id": "poles/human-v0",
    "total_episodes": 1,
}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Minari keeps data sets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "kept"))
    return tmp_path / "kept"


def put(directory: Path, **metadata: Any) -> Path:
    data = directory / "data"
    data.mkdir(parents=True)
    (data / "metadata.json").write_text(json.dumps(WHOLE | metadata))
    return data


def test_a_data_set_is_found_by_path_by_its_data_and_by_name(kept: Path, tmp_path: Path) -> None:
    here, named = put(tmp_path / "mine"), put(kept / "poles" / "human-v0")
    assert find_dataset(str(tmp_path / "mine")) == [here]
    assert find_dataset(str(here)) == [here]
    assert find_dataset("poles/human-v0") == [named]
    assert read_metadata(named)["dataset_id"] == "poles/human-v0"


def test_a_wrong_name_names_the_nearest(kept: Path) -> None:
    put(kept / "poles" / "human-v0")
    put(kept / "doors" / "expert-v2")
    with pytest.raises(DatasetError, match=r"'poles/humans-v0'.*did you mean"):
        find_dataset("poles/humans-v0")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("runs/demo-datset", "runs/demo-dataset"),
        ("runs/sampeld", "runs/sampled"),
        ("rnus/demo-dataset", "runs/demo-dataset"),
        ("demonstratoins", "demonstrations"),
        ("~/runs/demo-datset", "~/runs/demo-dataset"),
    ],
)
def test_a_wrong_path_names_the_nearest(
    wrong: str, meant: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path / "demonstrations")
    put(tmp_path / "runs" / "demo-dataset")
    put(tmp_path / "runs" / "sampled" / "envrunner-0-part-1-v0")
    put(tmp_path / "runs" / ".demo-datset.partial-1")
    (tmp_path / "runs" / "demo-datsets").mkdir()  # nearer, and no data set
    with pytest.raises(DatasetError, match=rf"no data set '{wrong}'.*did you mean '{meant}'\?"):
        find_dataset(wrong)


def test_a_directory_that_is_no_data_set_is_told(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"is not a Minari data set: .* data/metadata\.json"):
        find_dataset(str(tmp_path))
    with pytest.raises(DatasetError, match=r"no data set 'nowhere'.* give the path"):
        find_dataset("nowhere")


def test_the_directory_of_a_run_is_told_with_what_makes_a_data_set_of_it(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/expert/checkpoints/000000007").mkdir(parents=True)
    with pytest.raises(DatasetError) as told:
        find_dataset("runs/expert")
    assert str(told.value) == (
        "runs/expert is not a Minari data set: it is the directory of a run, and `juggler record "
        "runs/expert` makes a data set with its policy"
    )


def test_a_directory_with_data_sets_in_it_names_them(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/expert/checkpoints/000000007").mkdir(parents=True)
    put(tmp_path / "runs/expert/demonstrations")
    with pytest.raises(DatasetError, match="did you mean"):
        find_dataset("runs/expert")
    put(tmp_path / "runs/expert/better")
    with pytest.raises(DatasetError, match="'runs/expert/better' or"):
        find_dataset("runs/expert/")
    (tmp_path / "runs/notes.txt").touch()
    with pytest.raises(DatasetError, match=r"it has no file data/metadata\.json"):
        find_dataset("runs/notes.txt")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"total_epi', r"metadata\.json is damaged"),
        ("[1]", r"metadata\.json has no JSON object"),
        (json.dumps({k: v for k, v in WHOLE.items() if k != "dataset_id"}), "has no dataset_id"),
        (json.dumps({k: v for k, v in WHOLE.items() if "space" not in k}), "has no observation_sp"),
    ],
)
def test_a_damaged_or_unfinished_data_set_is_refused(tmp_path: Path, text: str, said: str) -> None:
    data = put(tmp_path / "mine")
    (data / "metadata.json").write_text(text)
    with pytest.raises(DatasetError, match=said):
        read_metadata(data)


def test_a_data_set_may_say_which_environment_it_is_of(tmp_path: Path) -> None:
    put(tmp_path / "silent")
    assert environment_of(str(tmp_path / "silent")) == {}
    put(tmp_path / "told", env_spec=json.dumps({"id": "Pendulum-v1", "kwargs": {"g": 9.81}}))
    told = {"env": "Pendulum-v1", "env_kwargs": {"g": 9.81}}
    assert environment_of(str(tmp_path / "told")) == told
    for name, odd in enumerate(["[", '{"id": 4}', '{"id": "Pendulum-v1", "kwargs": [1]}']):
        put(tmp_path / str(name), env_spec=odd)
        with pytest.raises(DatasetError, match=r"metadata\.json is damaged: env_spec"):
            environment_of(str(tmp_path / str(name)))


# What a data set says of its environment is enough to make it again.


class Arm(gymnasium.Env[Any, Any]):
    """An environment of one's own."""

    observation_space = VECTOR
    action_space = spaces.Discrete(3, start=1)

    def __init__(self, joints: int = 1) -> None:
        self.joints = joints


NAME = f"{__name__}:Arm"
KWARGS = {"joints": 3}


def described(
    place: Path, factory: Callable[..., Any] | None = None, **config: Any
) -> dict[str, Any]:
    """The description of a data set with this environment's episodes."""
    pytest.importorskip("minari", reason="needs juggler[datasets]")
    spec = spec_of(EnvRunnerConfig(**config), factory)
    with writing(place, "juggler/arm-v0", VECTOR, CHOICES, spec, {}) as writer:
        writer.add(*random_episodes([3]))
    return environment_of(str(place))


def test_a_class_of_ones_own_is_named(tmp_path: Path) -> None:
    named = {"env": NAME, "env_kwargs": KWARGS}
    assert described(tmp_path / "by-name", **named) == named
    assert described(tmp_path / "by-class", Arm, **named) == named


def test_minari_makes_an_environment_of_ones_own_again(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari", reason="needs juggler[datasets]")
    described(tmp_path / "mine", env=NAME, env_kwargs=KWARGS, max_episode_steps=7)
    env = minari.MinariDataset(tmp_path / "mine" / "data").recover_environment()
    assert env.unwrapped.joints == 3
    assert env.spec.max_episode_steps == 7


@pytest.mark.parametrize(
    ("env", "factory"),
    [
        ("__main__:Arm", Arm),
        (name_of(functools.partial(Arm, 2)), functools.partial(Arm, 2)),
        (NAME, lambda: Arm(2)),
        (f"{__name__}:test.<locals>.Arm", Arm),
        ("a_module_that_is_not_there:Arm", Arm),
    ],
)
def test_what_others_would_not_find_by_this_name_is_not_named(
    env: str, factory: Callable[..., Any], tmp_path: Path
) -> None:
    assert described(tmp_path / "mine", factory, env=env) == {}


def test_an_environment_that_a_module_registers_is_named_with_the_module(tmp_path: Path) -> None:
    told = described(tmp_path / "mine", env="gymnasium:CartPole-v1")
    assert told == {"env": "gymnasium:CartPole-v1", "env_kwargs": {}}


# Recorded episodes end with their environment's last observation, if known.


SCRIPTS = [((3, "terminated"), (2, "truncated"), (4, "both")), ((1, "terminated"), (2, "both"))]


def recorded(env: VectorEnv[Any, Any, Any], choose: Any) -> list[RecordedEpisode]:
    """Episodes of 20 steps, with actions [N] chosen from observations."""
    episodes: list[RecordedEpisode] = []
    env = EpisodeRecorder(env, episodes.append)
    observations, _ = env.reset(seed=0)
    for _ in range(20):
        observations, _, terminated, truncated, _ = env.step(choose(observations))
        over = terminated | truncated
        if env.metadata["autoreset_mode"] is AutoresetMode.DISABLED and over.any():
            observations, _ = env.reset(options={"reset_mask": over})
    return episodes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["in turn", "async", "sync"])
def test_episodes_with_action_masks_in_infos_are_recorded_whole_however_they_end(
    kind: str, mode: AutoresetMode
) -> None:
    functions = [functools.partial(masked, script) for script in SCRIPTS]
    env = observe_masks(vector_of_functions(kind, mode, functions))
    episodes = recorded(env, lambda seen: seen["action_mask"].argmax(1))
    env.close()
    assert {each.terminated for each in episodes} == {True, False}
    for each in episodes:
        steps = each.observations["observation"][:, 1]
        np.testing.assert_array_equal(steps, np.arange(len(each) + 1))


class Careless(Scripted):
    """Gives no mask and no observation at the end of episodes."""

    def __init__(self, script: Script, mask: Any, last: Any) -> None:
        super().__init__(script)
        self.observation_space = spaces.Dict({"numbers": self.observation_space})
        self.mask, self.last = mask, last

    def reset(self, **options: Any) -> Any:
        observation, _ = super().reset(**options)
        return {"numbers": observation}, {"action_mask": np.ones(3, np.int8)}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        shown = self.last if terminated else {"numbers": observation}
        mask = self.mask if terminated else np.ones(3, np.int8)
        return shown, reward, terminated, truncated, {"action_mask": mask}


@pytest.mark.parametrize("mask", [None, [], -np.ones(3, np.int8)], ids=["None", "empty", "-1"])
@pytest.mark.parametrize("last", [None, {}, {"numbers": np.zeros(2, np.float32)}])
@pytest.mark.parametrize("masks", [True, False])
def test_nobody_reads_what_comes_with_the_end_of_an_episode_that_terminates(
    masks: bool, last: Any, mask: Any
) -> None:
    functions = [functools.partial(Careless, SCRIPTS[0], mask, last)] * 2
    env = vector_of_functions("in turn", AutoresetMode.SAME_STEP, functions)
    if masks:
        env = observe_masks(env)
    episodes = recorded(env, lambda seen: np.zeros(2, np.int64))
    env.close()
    assert {each.terminated for each in episodes} == {True, False}
    for each in episodes:
        steps = np.arange(len(each) + 1)
        if each.terminated:
            steps[-1] -= 1
        np.testing.assert_array_equal(each.observations["numbers"][:, 1], steps)
