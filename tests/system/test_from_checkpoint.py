"""A run that begins with the weights of another one, by the real command."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.place import Place, assert_books_balance, checkpoints, metrics, summary
from support.seeds import left_to_long

pytestmark = pytest.mark.slow

#: Nothing is learned meanwhile: what a run plays is what it has begun with. Drawn from a seed, a
#: policy gets to 22.
KEEPS = ("--lr", 1e-9, "--stop-steps", 60_000)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that plays CartPole well."""
    place = Place()
    try:
        run = place.run("train", "cartpole", "--stop-return", 400, "--run-dir", "run")
        assert run.status == 0, run.output
        return Path(shutil.copytree(place.path / "run", tmp_path_factory.mktemp("t") / "run"))
    finally:
        place.close()


@pytest.mark.parametrize("algorithm", ["impala", left_to_long("ppo"), "appo"])
@pytest.mark.long
def test_its_first_episodes_are_good_whatever_the_algorithm(
    place: Place, trained: Path, algorithm: str
) -> None:
    run = place.run(
        *("train", "cartpole", "--algorithm", algorithm, "--from", trained, "--run-dir", "run"),
        *KEEPS,
    )
    assert run.status == 0, run.output
    assert "beginning with the weights of update " in run.output
    lines = metrics(place.path / "run")
    assert lines[0]["updates"] < summary(trained)["updates"], "they are counted anew"
    assert summary(place.path / "run")["episode_return_mean"] > 150
    played = place.run("evaluate", "run", "--episodes", 5)
    assert played.status == 0, played.output
    (mean,) = re.findall(r"^5 episodes: return ([\d.]+)", played.output, re.MULTILINE)
    assert float(mean) > 150, played.output
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


def test_several_learners_begin_with_them_and_a_run_that_is_resumed_does_not_load_again(
    place: Place, trained: Path
) -> None:
    directory = place.path / "run"
    begun = shutil.copytree(trained, place.path / "before")
    run = place.run(
        *("train", "cartpole", "--from", "before", "--num-learners", 2, "--run-dir", "run"),
        *KEEPS,
    )
    assert run.status == 0, run.output
    assert summary(directory)["episode_return_mean"] > 150
    updates = summary(directory)["updates"]
    shutil.rmtree(begun)
    run = place.run("train", "--resume", "run", "--stop-steps", 80_000)
    assert run.status == 0, run.output
    assert f"going on from update {updates}" in run.output
    assert "beginning with" not in run.output
    assert len(checkpoints(directory)) >= 2
    assert_books_balance(directory)
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_part_of_a_module_is_taken_and_what_does_not_fit_is_one_sentence(
    place: Place, trained: Path
) -> None:
    options = ("train", "cartpole", "--from", trained, "--stop-steps", 1)
    model = ("--model", '{"hidden_sizes": [64, 64], "activation": "relu"}')
    run = place.run(*options, *model, "--run-dir", "part", "--from-parameters", "encoder.*")
    assert run.status == 0, run.output
    run = place.run(*options, "--model", '{"hidden_sizes": [16]}', "--run-dir", "other")
    assert run.status == 2
    assert f"from_checkpoint = '{trained}': weights 'encoder.0." in run.output
    assert "have shape (64" in run.output
    assert not (place.path / "other").exists(), "it is told before there is a run"
    assert "Traceback" not in run.output
    place.assert_nothing_is_left()
