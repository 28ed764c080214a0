"""The answer of an EnvRunner that acts with the one module of a run."""

from __future__ import annotations

from typing import Any

from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.v1 import training_pb2


def ready_message(**keys: Any) -> training_pb2.Ready:
    """A Ready with these fields of its only module."""
    module = training_pb2.Ready.Module(module_id=DEFAULT_MODULE, **keys)
    return training_pb2.Ready(modules=[module])
