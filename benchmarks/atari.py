"""Pong from single frames and from stacked ones: bytes on the wire, and throughput of a run.

python benchmarks/atari.py

prints one JSON line: the bytes that a runner sends for each live step.
"""

from __future__ import annotations

import json
import statistics

from commands import pairs, steady_rate, table, train

from juggler.driver.config_files import load_config_and_keys
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.episodes.batch import DEFAULT_MODULE
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import episodes_pb2

PONG = "pong"
FRAGMENTS = 4
SECONDS = 25


def bytes_per_step(stacked: bool) -> float:
    """The frames of some fragments, as a runner encodes them.

    Args:
        stacked: by the environment, and not in the learner.
    """
    config = load_config_and_keys(PONG)[0]
    connectors = config.connectors.parsed()
    if stacked:
        config.env_runner.env_kwargs["stack_num"] = 4
        connectors = ConnectorsConfig()
    env = make_vector_env(config.env_runner)
    spaces = env.single_observation_space, env.single_action_space
    env_to_module, module_to_env = build_runner_pipelines(connectors, *spaces)
    module = build_module(
        None, env_to_module.module_observation_space, spaces[1], config.module.model
    )
    steps = config.env_runner.fragment_steps
    policy = Actor(module, env.num_envs, steps, 0, module_to_env, env_to_module)
    sampler = Sampler(env, policy, steps, 0)
    sent = live = 0
    for update in range(FRAGMENTS):
        batch = sampler.sample((1, update)).batch
        frame = encode_frame(episodes_pb2.BatchHeader(), {DEFAULT_MODULE: batch.to_tree()})
        sent += sum(map(len, frame))
        live += batch.live_steps
    env.close()
    return sent / live


def measure() -> str:
    """The tables."""
    single, stacked = bytes_per_step(stacked=False), bytes_per_step(stacked=True)
    seconds: dict[str, dict[str, float]] = {}

    def rate(*options: object) -> float:
        summary, lines = train(PONG, "--stop-seconds", SECONDS, *options)
        seconds.update(summary["seconds"])  # of the newest run
        return steady_rate(lines)

    env_kwargs = load_config_and_keys(PONG)[0].env_runner.env_kwargs | {"stack_num": 4}
    theirs_alone = ("--connectors", "{}", "--env-kwargs", json.dumps(env_kwargs))
    ours, theirs, ratios = pairs(rate, lambda: rate(*theirs_alone), 3)
    spread = f"({min(ratios):.2f}–{max(ratios):.2f})"
    rows = [
        [
            "bytes a step on the wire",
            f"{single:.0f}",
            f"{stacked:.0f}",
            f"**1/{stacked / single:.2f}**",
            "≤ 1/3.5",
        ],
        [
            "trained steps a second",
            f"{ours:.0f}",
            f"{theirs:.0f}",
            f"**{statistics.median(ratios):.2f}** {spread}",
            "",
        ],
    ]
    head = ["Pong, nature_cnn", "stacked in the learner", "by the environment", "ratio", "goal"]
    shares = []
    for role, spent in sorted(seconds.items()):
        total = sum(spent.values())
        parts = sorted(spent.items(), key=lambda item: -item[1])
        shares.append([role, ", ".join(f"{name} {each / total:.0%}" for name, each in parts)])
    return "\n".join(
        [table("Atari", head, rows), table("Where its time goes", ["processes", "shares"], shares)]
    )


if __name__ == "__main__":
    single, stacked = bytes_per_step(stacked=False), bytes_per_step(stacked=True)
    print(json.dumps({"single": single, "stacked": stacked, "saved": stacked / single}))
