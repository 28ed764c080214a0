"""What an EnvRunner is held up by, as its stack tells."""

from __future__ import annotations

from types import FrameType

from gymnasium.vector import VectorEnv

from juggler.envrunner.environments.environments_in_turn import EnvironmentsInTurn
from juggler.envrunner.environments.vector import make_vector_env


def environment_in(frame: FrameType | None) -> str:
    """For people: the call of an environment that a thread is in, such as
    "step of environment 3 (CartPole-v1)"; "" where it is in none.

    Read off the stack, so that steps that take no longer than they should pay nothing for it.

    Args:
        frame: the innermost of the thread.
    """
    found = ""
    while frame is not None:
        call, there = frame.f_code.co_name, frame.f_locals
        env = there.get("self")
        if isinstance(env, VectorEnv) and call in ("step", "reset"):
            if isinstance(env, EnvironmentsInTurn) and "i" in there:
                return f"{there.get('call', call)} of {env.name_of(there['i'])}"
            found = found or f"{call} of {type(env).__name__}"
        elif frame.f_code is make_vector_env.__code__:
            found = found or "the constructor of an environment"
        frame = frame.f_back
    return found
