"""What a run with a data set is told before it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.run_datasets import is_of_another, must_be_playable, with_dataset


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The parts of a data set that the driver reads."""
    data = tmp_path / "mine" / "data"
    data.mkdir(parents=True)
    metadata = {
        "observation_space": "",
        "action_space": "",
        "dataset_id": "mine-v0",
        "total_episodes": 1,
        "env_spec": json.dumps({"id": "Pendulum-v1", "kwargs": {"g": 9.0}}),
    }
    (data / "metadata.json").write_text(json.dumps(metadata))
    return tmp_path / "mine"


def begin(**given: Any) -> RunConfig:
    return with_dataset(RunConfig.from_flat(given), given.keys(), is_here=True, is_new=True)


def test_evaluations_play_what_the_data_set_is_of_unless_somebody_says_otherwise(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.parent)
    runner = begin(algorithm="bc", dataset="mine").env_runner
    assert (runner.env, runner.env_kwargs) == ("Pendulum-v1", {"g": 9.0})
    assert runner.dataset == str(place)
    runner = begin(algorithm="bc", dataset="mine", env="Acrobot-v1").env_runner
    assert (runner.env, runner.env_kwargs) == ("Acrobot-v1", {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"algorithm": "bc"}, "'bc' learns from a data set: name"),
        ({"dataset": "mine"}, "algorithm = 'impala', which"),
        ({"dataset": "mine", "stop_return": 1.0}, "choose bc or iql, or"),
        ({"algorithm": "bc", "dataset": "yours"}, "dataset: there is no data set 'yours'"),
        ({"algorithm": "bc", "dataset": "mine", "stop_return": 1.0}, "stop_return = 1.0 with data"),
        ({"algorithm": "bc", "dataset": "mine", "gateway": "localhost:0"}, "leave out the other"),
        (
            {"algorithm": "bc", "dataset": "mine", "agents": {"a": "default"}},
            "a data set has the steps of one",
        ),
    ],
)
def test_what_does_not_go_with_a_data_set_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(place.parent)
    with pytest.raises(ConfigError, match=said):
        begin(**given)


def test_an_evaluation_needs_an_environment(place: Path) -> None:
    file = place / "data" / "metadata.json"
    metadata = json.loads(file.read_text())
    del metadata["env_spec"]
    file.write_text(json.dumps(metadata))
    given = {"algorithm": "bc", "dataset": str(place), "evaluation_seconds": 1.0}
    with pytest.raises(ConfigError, match="does not name its environment"):
        begin(**given)
    assert begin(**given, env="CartPole-v1").env_runner.env == "CartPole-v1"
    unnamed = begin(algorithm="bc", dataset=str(place))
    assert not unnamed.plays
    assert unnamed.env_runner.env == "mine", "and not the default environment"


@pytest.mark.parametrize("name", ["link", "mine/.", "mine/data/.."])
def test_a_data_set_that_names_no_environment_is_called_by_the_place_where_it_is(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = place / "data" / "metadata.json"
    metadata = json.loads(file.read_text())
    del metadata["env_spec"]
    file.write_text(json.dumps(metadata))
    (place.parent / "link").symlink_to(place)
    monkeypatch.chdir(place.parent)
    runner = begin(algorithm="bc", dataset=name).env_runner
    assert (runner.env, runner.dataset) == ("mine", str(place))
    assert not is_of_another(runner)
    with pytest.raises(ConfigError, match="without an environment"):
        must_be_playable({"dataset": runner.dataset}, runner.env)
    monkeypatch.chdir(place)
    assert begin(algorithm="bc", dataset=".").env_runner == runner


def test_code_that_a_data_set_names_is_run_only_if_somebody_says_so(place: Path) -> None:
    file = place / "data" / "metadata.json"
    metadata = json.loads(file.read_text())
    named = {"id": "robots:Arm", "kwargs": {"joints": 3}}
    file.write_text(json.dumps({**metadata, "env_spec": json.dumps(named)}))
    given = {"algorithm": "bc", "dataset": str(place)}
    with pytest.raises(ConfigError) as raised:
        begin(**given, evaluation_seconds=1.0)
    assert "set env = 'robots:Arm' and env_kwargs = {'joints': 3} yourself" in str(raised.value)
    unplayed = begin(**given).env_runner
    assert (unplayed.env, unplayed.env_kwargs) == ("mine", {})
    assert not is_of_another(unplayed)
    said = {"env": "robots:Arm", "env_kwargs": {"joints": 3}}
    played = begin(**given, **said, evaluation_seconds=1.0).env_runner
    assert (played.env, played.env_kwargs) == ("robots:Arm", {"joints": 3})
    assert not is_of_another(played)
    assert is_of_another(begin(**given, env="robots:Leg").env_runner)


def test_who_plays_what_was_learned_from_a_data_set_that_names_no_environment_is_told() -> None:
    with pytest.raises(ConfigError, match="from the data set /data/shown"):
        must_be_playable({"dataset": "/data/shown"}, "shown")
    must_be_playable({"dataset": "/data/shown"}, "envs:Robot")
    must_be_playable({"dataset": "/data/CartPole-v1"}, "CartPole-v1")
    must_be_playable({}, "shown")


@pytest.mark.parametrize("with_simulator", [True, False])
def test_a_run_of_simulators_says_what_it_needs_to_be_played(with_simulator: bool) -> None:
    of_simulators = {"gateway": "127.0.0.1:5005", "env": "catch"}
    with pytest.raises(ConfigError, match="'catch' is only a name") as refused:
        must_be_playable(of_simulators, "catch", with_simulator=with_simulator)
    assert ("--simulator" in str(refused.value)) == with_simulator, "matches have no simulators"
    must_be_playable(of_simulators, "CartPole-v1")
    must_be_playable(of_simulators, "envs:Robot")


def test_what_a_run_records_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = begin(record="sampled")
    assert config.env_runner.record == str(tmp_path / "sampled")
    (tmp_path / "sampled").mkdir()
    assert begin(record="sampled").env_runner == config.env_runner
    (tmp_path / "sampled" / "file").touch()
    with pytest.raises(ConfigError, match=r"record = 'sampled': .* already exists"):
        begin(record="sampled")
    resumed = with_dataset(config, config.flat(), is_here=True, is_new=False)
    assert resumed.env_runner == config.env_runner
    assert RunConfig.to_act(config.flat()).env_runner.record == ""
