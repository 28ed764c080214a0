"""Each extra does what it is for, in an environment that has nothing else, once the command is run
that Juggler names where it is missing."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest
from support.alone import ROOT, Alone
from support.seeds import first_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # pip fetches what it installs

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
#: Of these, one would take most of a gigabyte, one is what these tests run in, and the trackers
#: have tests of their own.
LEFT_OUT = {"envpool", "dev", "mlflow", "wandb"}
#: What extras bring, by the names that are imported.
BROUGHT = """
Box2D ale_py cryptography envpool grpc_reflection h5py imageio imageio_ffmpeg minari mlflow mujoco
onnx onnxruntime onnxscript optuna open_spiel pettingzoo pygame wandb
"""
DOCTOR = ("-m", "juggler", "doctor")
SHORT = ("--stop-steps", 1, "--num-env-runners", 1)
#: Environments with two agents, by extra.
GAMES = {"openspiel": "open_spiel:kuhn_poker", "pettingzoo": "pettingzoo:classic/connect_four_v3"}
ENVIRONMENTS = {"box2d": "lunarlander", "atari": "pong", "mujoco": "hopper"}


@pytest.fixture
def alone(tmp_path: Path, installed: Path) -> Alone:
    return Alone(tmp_path, installed)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Alone:
    """Without any extra."""
    return Alone(tmp_path_factory.mktemp("plain"), installed)


@pytest.fixture(scope="module")
def trained(plain: Alone) -> Path:
    """A run."""
    plain.run("-m", "juggler", "train", "cartpole", *SHORT, "--run-dir", "run")
    return plain.path / "run"


@pytest.mark.long
def test_every_extra_is_tried() -> None:
    assert {
        *ENVIRONMENTS,
        "certs",
        "datasets",
        "onnx",
        *GAMES,
        "reflection",
        "sweep",
        "video",
    } == EXTRAS.keys() - LEFT_OUT


@pytest.mark.long
def test_without_any_extra_a_run_trains_is_played_and_drawn(plain: Alone, trained: Path) -> None:
    there = f"""
import importlib.util
print([name for name in {BROUGHT.split()} if importlib.util.find_spec(name)])
"""
    assert plain.run("-c", there) == "[]\n"
    assert "2 episodes: return" in plain.run("-m", "juggler", "evaluate", trained, "--episodes", 2)
    assert f"plot: {trained}/plot.png" in plain.run("-m", "juggler", "plot", trained)


@pytest.mark.long
def test_without_any_extra_the_machine_is_looked_at_and_a_project_is_written(plain: Alone) -> None:
    found = {each["name"]: each for each in json.loads(plain.run(*DOCTOR, "--json"))}
    assert found["torch"]["state"] == "ok"
    assert found["extra sweep"]["state"] == "absent"
    assert re.search(r"pip install '[^']+\[sweep\]'", found["extra sweep"]["advice"])
    assert "heat/heat/environment.py" in plain.run("-m", "juggler", "new", "heat")
    assert "heat.environment" in (plain.path / "heat" / "train.toml").read_text()


@pytest.mark.parametrize("extra", first_of(ENVIRONMENTS))
@pytest.mark.long
def test_environments_are_trained_on_and_played(extra: str, alone: Alone) -> None:
    train = ("-m", "juggler", "train", ENVIRONMENTS[extra], *SHORT, "--run-dir")
    install(alone, extra, told=alone.try_to_run(*train, "failed"))
    alone.run(*train, "run")
    assert "1 episode: return" in alone.run("-m", "juggler", "evaluate", "run", "--episodes", 1)


@pytest.mark.parametrize("extra", first_of(GAMES))
@pytest.mark.long
def test_games_with_several_agents_are_made(alone: Alone, extra: str) -> None:
    play = f"""
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.multi_agent.making import make_multi_agent_envs
envs = make_multi_agent_envs(EnvRunnerConfig(env={GAMES[extra]!r}))
print(*envs.agents)
"""
    install(alone, extra, told=alone.try_to_run("-c", play))
    assert alone.run("-c", play) == "player_0 player_1\n"


@pytest.mark.long
def test_certificates_are_made(alone: Alone) -> None:
    certs = ("-m", "juggler", "certs", "tls")
    install(alone, "certs", told=alone.try_to_run(*certs))
    alone.run(*certs)
    names = {path.name for path in (alone.path / "tls").iterdir()}
    assert names == {"ca.pem", "cert.pem", "key.pem", "token"}


@pytest.mark.long
def test_demonstrations_are_recorded_and_learned_from(alone: Alone, trained: Path) -> None:
    record = ("-m", "juggler", "record", trained, "--episodes", 1, "--to", "shown")
    install(alone, "datasets", told=alone.try_to_run(*record))
    alone.run(*record)
    learn = ("--algorithm", "bc", "--dataset", "shown", "--run-dir", "learned")
    alone.run("-m", "juggler", "train", *learn, *SHORT)


EXPORT = """
import juggler, sys
juggler.load_policy(sys.argv[1]).export_onnx("policy.onnx")
"""
ACT = """
import numpy, onnxruntime
model = onnxruntime.InferenceSession("policy.onnx")
(actions,) = model.run(["action"], {"observation": numpy.zeros([3, 4], numpy.float32)})
print(actions.shape)
"""


@pytest.mark.long
def test_policies_are_exported_and_act(alone: Alone, trained: Path) -> None:
    install(alone, "onnx", told=alone.try_to_run("-c", EXPORT, trained))
    alone.run("-c", EXPORT, trained)
    assert alone.run("-c", ACT) == "(3,)\n"


@pytest.mark.long
def test_settings_are_looked_for(alone: Alone) -> None:
    sweep = ("-m", "juggler", "sweep", "cartpole", *SHORT, "--trials", 1, "--space", "lr=1e-4,1e-3")
    install(alone, "sweep", told=alone.try_to_run(*sweep))
    alone.run(*sweep, "--metric", "env_steps_trained", "--run-dir", "sweep")
    assert "lr = 0.00" in (alone.path / "sweep" / "best.toml").read_text()


@pytest.mark.long
def test_videos_are_written(alone: Alone, trained: Path) -> None:
    video = ("-m", "juggler", "evaluate", trained, "--episodes", 1, "--video", "videos")
    install(alone, "video", told=alone.try_to_run(*video))
    alone.run(*video)
    (written,) = (alone.path / "videos").iterdir()
    assert written.read_bytes()[4:8] == b"ftyp", "an MP4 file"


LIST = """
import sys, grpc
from grpc_reflection.v1alpha import proto_reflection_descriptor_database as reflection
with grpc.insecure_channel(sys.argv[1]) as channel:
    grpc.channel_ready_future(channel).result(60)
    print(*reflection.ProtoReflectionDescriptorDatabase(channel).get_services())
"""


@pytest.mark.long
def test_services_are_listed(alone: Alone, address: str) -> None:
    driver = ("-m", "juggler", "driver", "cartpole", "--bind", address, "--reflection")
    install(alone, "reflection", told=alone.try_to_run(*driver))
    running = subprocess.Popen([alone.python, *driver], cwd=alone.path, env=alone.variables())
    try:
        assert "juggler.v1.Driver" in alone.run("-c", LIST, address).split()
    finally:
        running.terminate()
        running.wait(60)


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return f"127.0.0.1:{port}"


def install(alone: Alone, extra: str, told: subprocess.CompletedProcess[str]) -> None:
    """Runs the command that is named where an extra is missing."""
    assert told.returncode != 0, told.stdout
    said = re.search(r"-m pip install ('[^']+\[(\w+)\]')", told.stdout + told.stderr)
    assert said is not None, told.stdout + told.stderr
    assert said[2] == extra
    alone.run("-m", "pip", "install", "-q", "--no-compile", *shlex.split(said[1]))
