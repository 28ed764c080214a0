"""Parts of one's own by their names, on workers that dial in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.commands import status_of
from support.place import REPOSITORY, Place, assert_books_balance, summary
from support.seeds import first_of

EXAMPLES = REPOSITORY / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(["custom_module", "custom_connector"]))
def test_a_part_of_ones_own_works_on_workers_that_dial_in(place: Place, name: str) -> None:
    path = {"PYTHONPATH": f"{REPOSITORY}:{EXAMPLES}"}
    options = ["--bind", "127.0.0.1:0", "--run-dir", "run", "--stop-steps", 20_000]
    driver = place.start("driver", EXAMPLES / f"{name}.toml", *options)
    driver.wait_for("waiting for workers at")
    line = next(line for line in driver.output.splitlines() if "waiting for workers" in line)
    dial = ["--driver", line.split()[-1]]
    workers = [place.start(role, *dial, **path) for role in ("learner", "envrunner")]
    assert driver.wait(110) == 0, driver.output
    for worker in workers:
        assert worker.wait(60) == 0, worker.output
    assert summary(place.path / "run")["env_steps_trained"] >= 20_000
    assert_books_balance(place.path / "run")
    played = place.run("evaluate", "run", "--episodes", 2, **path)
    assert played.status == 0, played.output
    place.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
def test_a_learner_computes_in_as_many_threads_as_it_is_told(place: Place, threads: int) -> None:
    place.write(
        "telling.py",
        "import pathlib, juggler, torch\n"
        "class Telling(juggler.ActorCritic):\n"
        "    def _forward_train(self, batch):\n"
        "        pathlib.Path(f'of-{torch.get_num_threads()}').touch()\n"
        "        return super()._forward_train(batch)\n",
    )
    options = ("--module", "telling:Telling", "--run-dir", "run", "--stop-steps", 3000)
    run = place.run("train", "cartpole", *options, "--learner-threads", threads)
    assert run.status == 0, run.output
    told = {path.name.partition("-")[2] for path in place.path.glob("of-*")}
    assert told <= {"1", f"{threads}"}, "the rehearsal has one"
    assert f"{threads}" in told
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_module_of_parts_of_a_script_is_asked_for_again(place: Place) -> None:
    script = place.write(
        "script.py",
        "import juggler\n"
        "from custom_distribution import curious\n"
        "from custom_encoder import Waves\n"
        "parts = {'encoder': Waves, 'distribution': curious}\n"
        "module = juggler.RLModuleSpec(model_config=parts)\n"
        "run = dict(run_dir='run', progress='off', module=module)\n"
        "result = juggler.train('cartpole', stop_steps=5000, **run)\n"
        "try:\n"
        "    juggler.resume('run', stop_steps=10000)\n"
        "except juggler.ConfigError as error:\n"
        "    print(error)\n"
        "juggler.resume('run', stop_steps=10000, module=module)\n"
        "print(len(juggler.evaluate('run', episodes=2, module=module).returns), 'played')\n",
    )
    path = {"PYTHONPATH": f"{REPOSITORY}:{EXAMPLES}"}
    run = place.start_program([sys.executable, str(script)], **path)
    assert run.wait(110) == 0, run.output
    assert "this run's module is RLModuleSpec, of a script: pass module=" in run.output
    assert "2 played" in run.output
    assert summary(place.path / "run")["env_steps_trained"] >= 10_000
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_module_that_hides_how_probable_its_actions_are_is_refused_at_once(place: Place) -> None:
    place.write(
        "silent.py",
        "import juggler\n"
        "class Silent(juggler.ActorCritic):\n"
        "    def _forward_exploration(self, batch):\n"
        "        outputs = self._forward(batch)\n"
        "        inputs = outputs.pop('action_dist_inputs')\n"
        "        return {**outputs, 'actions': self.action_distribution()(inputs).mode()}\n",
    )
    run = place.run("train", "cartpole", "--module", "silent:Silent", "--run-dir", "run")
    assert run.status == 1
    assert "Silent returns 'actions' without 'action_dist_inputs'" in run.output
    assert "Traceback" not in run.output
    assert summary(place.path / "run")["env_steps_sampled"] == 0
    place.assert_nothing_is_left()


@pytest.mark.usefixtures("no_forkserver")
def test_a_part_that_is_not_here_is_named(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "custom_encoder", raising=False)  # of another test
    monkeypatch.setattr(sys, "path", [each for each in sys.path if Path(each) != EXAMPLES])
    assert status_of("train", EXAMPLES / "custom_encoder.toml", "--run-dir", "run") == 2
    said = capsys.readouterr().err
    assert "encoder 'custom_encoder:Waves' cannot be imported" in said
    assert "put its directory on PYTHONPATH" in said
    assert list(in_a_directory.iterdir()) == []
