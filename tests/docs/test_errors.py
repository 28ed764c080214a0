"""What people read of their mistakes: sentences change only together with `errors.txt`.

`JUGGLER_RENEW=1 python -m pytest tests/docs/test_errors.py` renews the file.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from support.made_files import checkpoint
from support.place import status_of
from support.scripted_environments import Failing, Scripted, masked
from support.scripted_modules import LinearPolicy
from support.vectors import vector_of_functions

import juggler
from juggler.driver.config import RunConfig
from juggler.envrunner.environments.action_masks import observe_masks
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.actors import hub
from juggler.runtime.actors.credentials import WITHOUT_TOKEN
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.actors.hub import ProtocolViolation, read_hello
from juggler.runtime.checkpoints.checkpoint import CheckpointError, read, write
from juggler.runtime.wire.v1 import attach_pb2

LISTED = Path(__file__).with_name("errors.txt")
KNOWN = (
    ValueError,
    TypeError,
    RuntimeError,
    EnvironmentFailed,
    CheckpointError,
    EndpointError,
    ProtocolViolation,
)

#: Arguments of commands that end before anything starts.
COMMANDS = r"""
train nowhere
train nowhere.toml
train runs
train cartpole --max-stalenes 3
train cartpole --lr fast
train cartpole --lr 0 1 2
train cartpole --num-env-runners 1.5
train cartpole --stop-steps many
train cartpole --model {x
train cartpole --stop-return high
train cartpole --learning-rate 3
train cartpole --n_steps=128 3
train cartpole --model.hidden-sizes 3
train cartpole --learner.grad-clip=1
driver cartpole --learning-rate 3
train --env CartPol-v1
train --env CartPole-v1 --distribution nowhere:made
train cartpole --num-workers 3
train cartpole --hidden-sizes 3
train --env nowhere.deep:Env
train --env CartPole-v1 --module nowhere:Module
train --env CartPole-v1 --model '{"encoder":"nowhere:Waves"}'
train --env CartPole-v1 --env-wrappers nowhere:Wrapper
train --env CartPole-v1 --connectors '{"learner":["nowhere:C"]}'
train cartpole --algorithm pppo
train cartpole --resume nowhere
train --resume nowhere
train --resume runs
train cartpole --jobs 2
train cartpole --seeds 0
train --env Acrobot-v1 --seeds 2
envrunner
evaluate
evaluate nowhere
evaluate runs
evaluate nowhere --episodes 0
plot nowhere
plot runs
runs nowhere
sweep
sweep cartpole --space lr=1..2
sweep cartpole --stop-steps 9 --space lr
sweep cartpole --stop-steps 9 --space lr=1,2 --trials 0
sweep --resume nowhere
new runs
nowhere
trian
resume runs/demo
train CartPole-v1
train --env CartPole-v1 --save-replay false
tune cartpole --synchronous=True
driver cartpole --resume nowhere
driver cartpole --token-file nowhere
driver cartpole --evaluation-seconds 5 --num-evaluators 2
envrunner --driver here
envrunner --dirver here
worker lerner
record
scale
league
certs
check-simulator
check-simulator '/no/such/game {address}'
check-simulator 'game --fast'
check-simulator "game 'open {address}"
status nowhere
status runs
evaluate run --videos 5
league run --tournament -1
league run --tournament 1
new my-project
new 2fast
new class
new random
new juggler
new tests
train pendulum-td3 --exploration-noise x
train cartpole-ppo --clip x
train cartpole-ppo --stop-steps 1.5
train cartpole --vectorize x
train cartpole --seeds x
tune --write nowhere/tuned.toml
tune --gateway 127.0.0.1:0
tune --seconds 0.1
tune --seconds nan
tune --env CartPol-v1
scale here
scale here --env-runners 0
scale here --env-runners 5000
scale here --env-runners 2
launch slurn
launch slurm cartpol --dry-run
launch ssh cartpole --hosts none.toml
launch slurm cartpole --env-runners 0 --dry-run
launch slurm cartpole --learners 5000 --dry-run
launch slurm cartpole --evaluators -1 --dry-run
launch slurm cartpole -- --evaluation-video 5
launch slurm cartpole --sbatch account=lab --dry-run
launch slurm cartpole --dry-run -- --gateway 127.0.0.1:5005
launch swarm cartpole --dry-run -- --gateway 127.0.0.1:5005
launch swarm cartpole --image x --compose none.yaml --dry-run
train cartpole --seeds 2 --jobs 0
train cartpole --seeds 2 --record sampled
train --resume here --seeds 2
train cartpole --resume here --seeds 2 --lr 1e-3 --stop-steps 9
train cartpole --seeds 2 --metrics-bind 127.0.0.1:0
train cartpole --seeds 2 --reflection
sweep cartpole --stop-steps 9
sweep cartpole --space lr=1,2 --space lr=3,4
sweep --resume runs/x --lr 1.0
sweep cartpole --resume runs/x
sweep cartpole --stop-steps 9 --space stop_steps=9,10
sweep cartpole --stop-steps 9 --space lr=1,2 --record sampled
sweep cartpole --stop-steps 9 --space lr=1,2 --space record=a,b
sweep cartpole --stop-steps 9 --space lr=1,2 --jobs 0
sweep cartpole --stop-steps 9 --space lr=1,2 --jobs -3
sweep cartpole --stop-steps 9 --space lr=1,2 --metric episode_retrun_mean
sweep cartpole --stop-steps 9 --space lr=1,2 --metric modules/defualt/entropy
sweep cartpole --stop-steps 9 --space lr=1,2 --metric modules/default/polcy_loss
sweep cartpole-dqn --stop-steps 9 --space lr=1,2 --metric modules/default/policy_loss
sweep cartpole-appo --stop-steps 9 --space lr=1,2 --metric modules/default/kl_from_target
sweep --env CartPole-v1 --stop-steps 9 --space algorithm=ppo,dqn --metric modules/default/kl
sweep cartpole --stop-steps 9 --space lrr=1e-4..1e-2
sweep cartpole --stop-steps 9 --space model.hiden_sizes=[64],[128]
sweep cartpole --stop-steps 9 --space lr=1e-2..1e-4
sweep cartpole --stop-steps 9 --space lr=0..1:log
sweep cartpole --stop-steps 9 --space lr=1e-4..1e-2:lgo
sweep cartpole --stop-steps 9 --space lr=fast,slow
sweep cartpole --stop-steps 9 --space lr=0.001
sweep cartpole --stop-steps 9 --space gamma=0.9..1.5
sweep cartpole --stop-steps 9 --space batch_size=16..64.5
sweep cartpole --stop-steps 9 --space env.size=3,4
sweep cartpole --stop-steps 9 --space clip=0.1..0.3
sweep --env CartPole-v1 --stop-steps 9 --space algorithm=ppo,impala --space clip=0.1..0.3
sweep cartpole --stop-steps 9 --space algorithm=ppo,appoo
""".strip().splitlines()

#: Keys that do not go together, or have a value that they cannot have.
KEYS: list[dict[str, Any]] = [
    {"lr": -1.0},
    {"lr": []},
    {"gamma": 1.5},
    {"lambda_": -0.1},
    {"algorithm": "pppo"},
    {"batch_size": 0},
    {"fragment_steps": 0},
    {"envs_per_runner": 0},
    {"num_env_runners": -1},
    {"num_learners": 0},
    {"max_staleness": -1},
    {"weights_interval": 0},
    {"weights_dtype": "float8"},
    {"autoreset": "sometimes"},
    {"vectorize": "asnyc"},
    {"progress": "loud"},
    {"seed": -1},
    {"stop_return": "high"},
    {"stop_steps": 10.5},
    {"stop_seconds": -1.0},
    {"checkpoint_seconds": -1.0},
    {"keep_checkpoints": 0},
    {"hang_seconds": 0.0},
    {"evaluation_episodes": 0},
    {"worker_timeout_seconds": 0.0},
    {"grad_clip": -1.0},
    {"optimizer": "adamm"},
    {"optimizer": "sgd", "learning_rate": 1.0},
    {"env_kwargs": []},
    {"model": {"hidden_size": [8]}},
    {"model": {"hidden_sizes": [0]}},
    {"model": {"recurrent": "rnn"}},
    {"model": {"activation": "reluu"}},
    {"connectors": {"learner": ["normalise_rewards"]}},
    {"connectors": {"env_to_modules": []}},
    {"connectors": {"env_to_module": [{"use": "frame_stack", "n": 4}]}},
    {"agents": {"*": "all"}, "modules": {"other": {"lr": 1.0}}},
    {"modules": {"default": {"lrr": 1.0}}},
    {"algorithm": "ppo", "epochs": 0},
    {"algorithm": "ppo", "minibatches": 0},
    {"algorithm": "dqn", "replay_ratio": 0.0},
    {"algorithm": "dqn", "replay_capacity": 10, "replay_begin": 100},
    {"algorithm": "dqn", "n_step": 0},
    {"algorithm": "dqn", "atoms": 1},
    {"algorithm": "r2d2", "model": {"recurrent": "lstm"}, "burn_in": -1},
    {"algorithm": "impala", "rho_bar": 0.0},
    {"algorithm": "impala", "replay_share": 1.0},
    {"intrinsic": {"scalee": 1.0}},
    {"batchsize": 1},
    {"Seed": 1},
    {"driver": {"seed": 1}},
    {"algorithm": 3},
    {"frame_stack": 1},
    {"framestack": 1},
    {"self_play": 1},
    {"optimizer_class": 1},
    {"gae": 1},
    {"max_norm": 1},
    {"num_updates": 1},
    {"optimizer_kwargs": 1},
    {"training_iteration": 1},
    {"checkpoint_freq": 1},
    {"weight_decay": 1},
    {"num_learners": 65},
    {"checkpoint_updates": 0},
    {"evaluation_seconds": -1.0},
    {"step_deadline_seconds": 0.0},
    {"rmsprop_decay": 1.0},
    {"adam_betas": [0.9, 1.0]},
    {"c_bar": 0.0},
    {"rho_bar": 0.5},
    {"lr": [[0, 1e-3], [0, 1e-4]]},
    {"micro_batches": 0},
    {"burn_in": 32},
    {"module": "nowhere"},
    {"env": ""},
    {"devices": "gpu"},
    {"from_parameters": ["encoder.*"]},
    {"synchronous": True, "weights_interval": 2},
    {"synchronous": True, "checkpoint_seconds": 5.0},
    {"checkpoint_updates": 50},
    {"agents": {"*": "connectors"}},
    {"modules": {"replay": {}}},
    {"agents": {"*": "a b"}},
    {"agents": {"*": 3}},
    {"agents": {"cat": []}},
    {"agents": {"cat": "random"}},
    {"module": {"a": {"gamma": 0.9}}},
    {"modules": {"a": 3}},
    {"modules": {"a": {"seed": 1}}},
    {"modules": {"a": {"num_env_runners": 1}}},
    {"modules": {"a": {"epochs": 1}}},
    {"modules": {"a": {"gamma": 2}}},
    {"modules": {"a": {"algorithm": "pppo"}}},
    {"modules": {"a": {"hidden_sizes": [1]}}},
    {"modules": {"a": {"num_learners": 0}}},
    {"modules": {"a": {"waited_for": 1}}},
    {"modules": {"a": {"weights_interval": 2}}, "synchronous": True},
    {"modules": {"a": {}}, "agents": {"x": "b"}},
    {"modules": {"default": {}}, "env": "dm_env_rpc://h:1"},
    {"agents": {"x": "b"}, "env": "dm_env_rpc://h:1"},
    {"modules": {"old": {"train": False}}},
    {"modules": {"old": {"train": 0}}},
    {"modules": {"old": {"from": 3}}},
    {"modules": {"old": {"digest": "ab"}}},
    {"modules": {"old": {"train": False, "from": "x", "lr": 1.0}}},
    {"modules": {"old": {"form": "x"}}},
    {"modules": {"old": {"train": False, "from": "x"}}, "agents": {"*": "old"}},
    {"modules": {"b": {"num_learners": 2}}, "agents": {"x": "a", "y": "b"}, "num_learners": 2},
    {"modules": {"b": {"num_learners": 2}}, "agents": {"*": "b"}, "num_learners": 1},
    {"modules": {"b": {"num_learners": 2}}, "agents": {"*": "b"}, "num_learners": 3},
    {"modules": {"b": {"num_learners": 2}}, "shared": {"x.*": ["a", "b"]}, "num_learners": 9},
    {"modules": {"b": {"num_learners": 2}}, "league": {"builder": "rllib"}, "num_learners": 9},
    {"agents": {"x": "hunter", "y": "prey"}, "shared": {"*": ["hunter", "pray"]}},
    {"agents": {"x": "a", "y": "b"}, "shared": {"*": ["a"]}},
    {"agents": {"x": "a", "y": "b"}, "shared": {"*": ["a", "b/c"]}},
    {"gateway": "127.0.0.1:0", "shared": {"*": ["a", "b"]}},
    *(
        {"league": table}
        for table in (
            {"bilder": "none"},
            {"builder": "alpha_star"},
            {"options": {"main": 2}},
            {"options": {"mains": 0}},
            {"options": {"mains": "2"}},
            {"options": {"mains": 1.5}},
            {"builder": "alphastar", "options": {"main_above": 2}},
            {"builder": "alphastar", "options": {"max_phase_steps": 10}},
            {"builder": "alphastar", "options": {"pfsp_probability": 0.9}},
            {"builder": "alphastar", "options": {"main_weighting": "sqared"}},
            {"builder": "alphastar", "options": {"last_copy_steps": "nnoe"}},
            {"builder": "rllib", "options": {"league_exploiter_probability": 0.7}},
            {"decay": 0},
            {"evaluation_probability": 0.6},
            {"draw_margin": -1},
            {"min_games": True},
            {"max_historical": 501},
            {"max_learning": 65},
            {"recycled": "odlest"},
            {"teams": [["a"], ["b", "a"]]},
            {"teams": ["a"]},
            {"fixed": "random"},
            {"fixed": ["random", "random"]},
            {"mains": 2},
        )
    ),
    *(
        {"model": table}
        for table in (
            {"zzz": 1},
            {"hidden_sizes": 64},
            {"activation": ["tanh"]},
            {"shared_value_layers": 1},
            {"free_log_std": 1},
            {"squash": "no"},
            {"recurrent_size": 1.5},
            {"initializer": "xavier"},
            {"recurrent": "gru", "shared_value_layers": False},
        )
    ),
    {"env": 3},
    {"env_kwargs": [1]},
    {"envs_per_runner": True},
    {"step_deadline_seconds": math.inf},
    *(
        {"connectors": {pipeline: pieces}}
        for pipeline, pieces in (
            ("learner", "clip_rewards"),
            ("env_to_module", ["frame_stak"]),
            ("env_to_module", ["clip_rewards"]),
            ("learner", [{"use": "clip_rewards", "limt": 1}]),
            ("learner", [{"limit": 1}]),
            ("learner", [1]),
            ("module_to_env", [{"remove": "clip"}]),
            ("module_to_env", [{"remove": "clip_actions", "use": "rescale_actions"}]),
            (
                "module_to_env",
                [{"use": "rescale_actions", "first": True, "after": "clip_actions"}],
            ),
            ("module_to_env", [{"use": "rescale_actions", "before": 1}]),
            ("env_to_module", ["zzz"]),
            ("env_to_module", [{"use": "flatten", "k": 4}]),
            ("env_to_module", [{"use": "flatten", "name": "a/b"}]),
            ("env_to_module", [{"remove": "x"}]),
            ("learner", [{"use": "a:B"}, {"use": "a:B", "name": "c"}, {"remove": "a:B"}]),
            ("env_to_module", ["flatten", "flatten"]),
        )
    ),
    {"record": "sampled", "record_dir": 3},
    {"record": "sampled", "agents": {"a": "default"}},
    {"record": "sampled", "algorithm": "bc", "dataset": "mine"},
    {"record_gb": 1.0},
    {"track": ["wandbb"]},
    *({"algorithm": name} for name in ("a2c", "DDPG", "Dreamer-V3", "ppo_lstm")),
]


def _of_commands(directory: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, str]]:
    for line in COMMANDS:
        status = status_of(*shlex.split(line))
        said = capsys.readouterr().err
        words = re.sub(r"[│╭╰╮╯─]", " ", said).split("\n")
        text = " ".join(" ".join(words).split())
        yield f"juggler {line}", f"[{status}] {text}"
    assert list(directory.iterdir()) == [directory / "runs"], "nothing was begun"


def _of_keys() -> Iterator[tuple[str, str]]:
    for keys in KEYS:
        yield json.dumps(keys), _error(partial(RunConfig.from_flat, {"env": "CartPole-v1", **keys}))


def _vector(*makes: Callable[[], Any]) -> Any:
    return observe_masks(vector_of_functions("in turn", AutoresetMode.SAME_STEP, makes))


def _sampled(*makes: Callable[[], Any]) -> None:
    env = _vector(*makes)
    module = LinearPolicy(env.single_observation_space, env.single_action_space)
    Sampler(env, Actor(module, env.num_envs, 4, 0), 4, 5).sample((0, 0))


class _Odd(Scripted):
    """Returns something else in its second step."""

    def __init__(self, place: int, value: Any) -> None:
        super().__init__()
        self._place, self._value = place, value

    def step(self, action: Any) -> Any:
        result = [*super().step(action)]
        if self.steps == 2:
            result[self._place] = self._value
        return tuple(result)


def _of_environments() -> Iterator[tuple[str, str]]:
    cases: dict[str, list[Callable[[], Any]]] = {
        f"raises in {call}": [Scripted, partial(Failing, call)] for call in ("reset", "step")
    }
    odd = {
        "reward None": (1, None),
        "reward 'much'": (1, "much"),
        "terminated 'no'": (2, "no"),
        "truncated None": (3, None),
        "info a list": (4, []),
        "observation of another shape": (0, np.zeros(7, np.float32)),
        "observation None": (0, None),
    }
    cases |= {name: [Scripted, partial(_Odd, *value)] for name, value in odd.items()}
    cases["one action mask of two"] = [partial(masked, ((9, "truncated"),)), Scripted]
    cases["no legal action"] = [
        partial(masked, ((9, "truncated"),), mask=lambda _: np.zeros(3, np.int8))
    ]
    cases["a mask of another length"] = [
        partial(masked, ((9, "truncated"),), mask=lambda _: np.ones(4, np.int8))
    ]
    for name, makes in cases.items():
        yield name, _error(partial(_sampled, *makes))


def _of_checkpoints(directory: Path) -> Iterator[tuple[str, str]]:
    written = write(directory / "good", checkpoint(), keep=1)

    def damaged(name: str, damage: Callable[[Path], object]) -> tuple[str, str]:
        copy = directory / name.replace(" ", "-") / written.name
        shutil.copytree(written, copy)
        damage(copy)
        return name, _error(partial(read, copy))

    metadata, state = "checkpoint.json", "state.safetensors"
    yield damaged("no metadata", lambda path: (path / metadata).unlink())
    yield damaged("no state", lambda path: (path / state).unlink())
    yield damaged("metadata cut short", lambda path: os.truncate(path / metadata, 20))
    yield damaged("state cut short", lambda path: os.truncate(path / state, 20))
    yield damaged("metadata no JSON", lambda path: (path / metadata).write_text("oops"))
    yield damaged("metadata of a list", lambda path: (path / metadata).write_text("[]"))
    yield "no directory", _error(partial(read, directory / "nowhere"))
    yield "an empty directory", _error(partial(read, directory / "runs"))
    few = {"modules": {"other": {"w": np.zeros(1)}}}
    odd = replace(checkpoint(), tree={**few, "x": np.zeros(1, object)})
    yield "an array of objects", _error(partial(write, directory / "odd", odd, keep=1))


def _of_hellos() -> Iterator[tuple[str, str]]:
    good = {
        "incarnation": "x",
        "token": "secret",
        "protocol_version": hub.PROTOCOL_VERSION,
        "role": "learner",
    }
    changes: dict[str, dict[str, Any]] = {
        "wrong token": {"token": "guess"},
        "no token": {"token": ""},
        "another protocol": {"protocol_version": 1},
        "another run": {"run_id": "other"},
        "another role": {"role": "cook"},
        "no incarnation": {"incarnation": ""},
        "a large index": {"index": 10**8},
    }
    for name, change in changes.items():
        sent = attach_pb2.FromWorker(hello=attach_pb2.Hello(**{**good, **change}))
        raw = sent.SerializeToString()
        yield name, _error(partial(read_hello, raw, "secret", "run", ("learner", "envrunner")))
    yield "no bytes of a hello", _error(partial(read_hello, b"oops", "secret", "run", ()))
    yield "of any call", WITHOUT_TOKEN


def _of_scripts() -> Iterator[tuple[str, str]]:
    calls: dict[str, Callable[[], Any]] = {
        "train(ent_coef=)": lambda: juggler.train("cartpole", ent_coef=0.01),
        "train(num_envs=)": lambda: juggler.train("cartpole", num_envs=8),
        "train(resume=)": lambda: juggler.train(resume="a"),
        "resume(nowhere)": lambda: juggler.resume("nowhere"),
        "load_policy(nowhere)": lambda: juggler.load_policy("nowhere"),
        "evaluate(nowhere)": lambda: juggler.evaluate("nowhere"),
    }
    for name, call in calls.items():
        yield name, _error(call)
    given: list[dict[str, Any]] = [
        {"space": ["lr=1..2"]},
        {"space": {"lr": 1e-3}},
        {"space": {"model": {"hidden_sizes": [[8], [16]]}}},
        {"space": {"lr": {"min": 1e-4, "max": 1e-2}}},
        {"env": Scripted},
        {"module": LinearPolicy},
        {"trials": "3"},
    ]
    for keys in given:
        call = partial(juggler.sweep, **{"space": {"lr": "1..2"}, "stop_steps": 9, **keys})
        yield f"sweep({keys})", _error(call)


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except (*KNOWN, OSError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


@pytest.mark.usefixtures("in_tmp_path", "local_workers")
def test_no_sentence_changes_by_accident(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "runs").mkdir()
    rooms = {
        "commands": _of_commands(tmp_path, capsys),
        "keys": _of_keys(),
        "scripts": _of_scripts(),
        "environments": _of_environments(),
        "workers that say hello": _of_hellos(),
        "checkpoints": _of_checkpoints(tmp_path),
    }
    lines = []
    for room, cases in rooms.items():
        lines.append(f"# {room}")
        for name, text in cases:
            lines += [f"{name}", f"    {_here(text, tmp_path)}"]
    if os.environ.get("JUGGLER_RENEW"):
        LISTED.write_text("\n".join(lines) + "\n")
    assert lines == LISTED.read_text().splitlines(), "renew it with JUGGLER_RENEW=1"


def _here(text: str, directory: Path) -> str:
    """A text in one line, without what depends on this machine."""
    text = text.replace(str(directory), "HERE").replace(str(Path.home()), "~")
    text = re.sub(r"-{5,}", "", text).partition("usage: ")[0]
    text = re.sub(r"(?<=line )\d+", "N", text)
    text = re.sub(r"(shipped ones: )[^;:]*", r"\1...", text)
    return " ".join(text.split())[:400]
