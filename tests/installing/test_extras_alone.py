"""Each extra works alone, after the command in the error."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from support.alone import ROOT, Alone
from support.network import free_address

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

EXPORT = """
import juggler, numpy, onnxruntime
juggler.load_policy("run").export_onnx("policy.onnx")
model = onnxruntime.InferenceSession("policy.onnx")
(actions,) = model.run(["action"], {"observation": numpy.zeros([3, 4], numpy.float32)})
print(actions.shape)
"""
AGENTS = """
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
print(*make_multi_agent_envs(EnvRunnerConfig(env="NAME")).agents)
"""
LIST = """
import sys, grpc
from grpc_reflection.v1alpha import proto_reflection_descriptor_database as reflection
with grpc.insecure_channel(sys.argv[1]) as channel:
    grpc.channel_ready_future(channel).result(60)
    print(*reflection.ProtoReflectionDescriptorDatabase(channel).get_services())
"""


def _juggler(*words: object) -> tuple[object, ...]:
    return ("-m", "juggler", *words)


def _trained(name: str) -> list[tuple[object, ...]]:
    return [
        _juggler("train", name, *SHORT, "--run-dir", "own"),
        _juggler("evaluate", "own", "--episodes", 1),
    ]


#: By extra: programs, of which the first one says that it is missing, and what the last one prints,
#: or a file that is there then.
USES: dict[str, tuple[list[tuple[object, ...]], str]] = {
    "box2d": (_trained("lunarlander"), "1 episode: return"),
    "atari": (_trained("pong"), "1 episode: return"),
    "mujoco": (_trained("hopper"), "1 episode: return"),
    "openspiel": ([("-c", AGENTS.replace("NAME", "open_spiel:kuhn_poker"))], "player_0 player_1"),
    "pettingzoo": (
        [("-c", AGENTS.replace("NAME", "pettingzoo:classic/connect_four_v3"))],
        "player_0 player_1",
    ),
    "certs": ([_juggler("certs", "tls")], "tls/cert.pem"),
    "datasets": (
        [
            _juggler("record", "run", "--episodes", 1, "--to", "shown"),
            _juggler(
                *("train", "--algorithm", "bc", "--dataset", "shown", "--run-dir", "own", *SHORT)
            ),
        ],
        "own/summary.json",
    ),
    "onnx": ([("-c", EXPORT)], "(3,)"),
    "sweep": (
        [
            _juggler(
                *("sweep", "cartpole", *SHORT, "--trials", 1, "--space", "lr=1e-4,1e-3"),
                *("--metric", "env_steps_trained", "--run-dir", "sweep"),
            )
        ],
        "sweep/best.toml",
    ),
    "video": ([_juggler("evaluate", "run", "--episodes", 1, "--video", "videos")], "videos/*.mp4"),
}


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
def test_without_any_extra_a_run_trains_is_played_and_drawn(plain: Alone, trained: Path) -> None:
    there = f"""
import importlib.util
print([name for name in {BROUGHT.split()} if importlib.util.find_spec(name)])
"""
    assert plain.run("-c", there) == "[]\n"
    assert "2 episodes: return" in plain.run("-m", "juggler", "evaluate", trained, "--episodes", 2)
    assert f"plot: {trained}/plot.png" in plain.run("-m", "juggler", "plot", trained)


@pytest.mark.long
@pytest.mark.parametrize("extra", USES)
def test_an_extra_does_what_it_is_for(alone: Alone, trained: Path, extra: str) -> None:
    programs, shown = USES[extra]
    (alone.path / "run").symlink_to(trained)
    install(alone, extra, told=alone.try_to_run(*programs[0]))
    said = [alone.run(*each) for each in programs]
    assert shown in said[-1] or list(alone.path.glob(shown))


@pytest.mark.long
def test_services_are_listed(alone: Alone) -> None:
    assert {*USES, "reflection"} == EXTRAS.keys() - LEFT_OUT, "every extra is tried"
    address = free_address()
    driver = _juggler("driver", "cartpole", "--bind", address, "--reflection")
    install(alone, "reflection", told=alone.try_to_run(*driver))
    command = [str(alone.python), *map(str, driver)]
    running = subprocess.Popen(command, cwd=alone.path, env=alone.variables())
    try:
        assert "juggler.v1.Driver" in alone.run("-c", LIST, address).split()
    finally:
        running.terminate()
        running.wait(60)


def install(alone: Alone, extra: str, told: subprocess.CompletedProcess[str]) -> None:
    """Runs the command that is named where an extra is missing."""
    assert told.returncode != 0, told.stdout
    said = re.search(r"-m pip install ('[^']+\[(\w+)\]')", told.stdout + told.stderr)
    assert said is not None, told.stdout + told.stderr
    assert said[2] == extra
    alone.run("-m", "pip", "install", "-q", "--no-compile", *shlex.split(said[1]))
