"""What an EnvRunner answers when its environments are made."""

from __future__ import annotations

from typing import Any

from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.v1 import training_pb2


def ready_message(*module_ids: str, **keys: Any) -> training_pb2.Ready:
    """A Ready with these fields of each module; without an id, of the only one of a run."""
    modules = [
        training_pb2.Ready.Module(module_id=module_id, **keys)
        for module_id in module_ids or (DEFAULT_MODULE,)
    ]
    return training_pb2.Ready(modules=modules)
