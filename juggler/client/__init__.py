"""A client for simulators: a gateway's policies act in your environments.

    from juggler.client import box, connect, discrete

    with connect("127.0.0.1:5005", box([4]), discrete(2)) as session:
        observation, reward, terminated, truncated = simulator.reset(), 0.0, False, False
        while True:
            action = session.step(observation, reward, terminated, truncated)
            if terminated or truncated:
                observation, reward, terminated, truncated = simulator.reset(), 0.0, False, False
            else:
                observation, reward, terminated, truncated = simulator.step(action)

It needs only grpcio, protobuf and NumPy. With `mode="local"` this process acts by itself, which
needs onnxruntime. Gymnasium spaces are also accepted.
"""

from __future__ import annotations

from juggler.client.connection import GatewayError
from juggler.client.playing import play, play_agents
from juggler.client.session import (
    AgentsSession,
    Session,
    connect,
    connect_agents,
)
from juggler.client.space_values import (
    box,
    dict_of,
    discrete,
    multi_binary,
    multi_discrete,
    tuple_of,
)

__all__ = [
    "AgentsSession",
    "GatewayError",
    "Session",
    "box",
    "connect",
    "connect_agents",
    "dict_of",
    "discrete",
    "multi_binary",
    "multi_discrete",
    "play",
    "play_agents",
    "tuple_of",
]
