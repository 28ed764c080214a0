"""Options of simulators that a run dials: `env_kwargs` if `env` is dm_env_rpc://…"""

from __future__ import annotations

from typing import Any, Final

import msgspec

SCHEME: Final = "dm_env_rpc://"


class SimulatorOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Options for making and joining worlds, and for their tensors.

    Attributes:
        create_world: settings of the world that each environment creates.
        world: existing world to join instead; {index} stands for the number of the environment, and
            {runner} for the number of its EnvRunner.
        join_world: settings of joining.
        observations: names of the observations to learn from; none: all but reward and discount.
        actions: names of the actions to choose; none: all. The simulator chooses the rest.
        reward: the observation that is the reward.
        discount: the observation that is the discount. It is only in infos; the run has its gamma.
        seed_setting: the setting of a reset that takes a seed; "": the simulator gets none.
        connect_seconds: how long to try to reach a simulator that does not answer.
        tls: a directory made by `juggler certs`; "": without TLS.
        token_file: file with the token to send; "": the token in `tls`, if any.
    """

    create_world: dict[str, Any] = {}
    world: str | None = None
    join_world: dict[str, Any] = {}
    observations: list[str] | None = None
    actions: list[str] | None = None
    reward: str = "reward"
    discount: str = "discount"
    seed_setting: str = ""
    connect_seconds: float = 30.0
    tls: str = ""
    token_file: str = ""

    @classmethod
    def parse(cls, env_kwargs: dict[str, Any]) -> SimulatorOptions:
        """Read the options in `env_kwargs`.

        Raises:
            ValueError: an unknown key, or a value that is not allowed.
        """
        try:
            options = msgspec.convert(env_kwargs, cls)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise ValueError(f"env_kwargs of a dm_env_rpc:// env: {error}; keys: {known}") from None
        if options.world is not None and options.create_world:
            raise ValueError("env_kwargs: a world that is there has no create_world; give one")
        if not 0 < options.connect_seconds < float("inf"):
            raise ValueError("env_kwargs.connect_seconds must be a number of seconds above 0")
        return options

    def of_runner(self, runner: int) -> SimulatorOptions:
        """Fill an EnvRunner's number into the name of the world."""
        world = None if self.world is None else self.world.replace("{runner}", str(runner))
        return msgspec.structs.replace(self, world=world)


def addresses(env: str) -> list[str]:
    """Return the addresses in `env`, as "host:port" or "unix:path".

    Raises:
        ValueError: it is not of the form dm_env_rpc://HOST:PORT[,HOST:PORT…].
    """
    each = env.removeprefix(SCHEME).rstrip("/").split(",")
    for address in each:
        host, _, port = address.rpartition(":")
        is_port = port.isdigit() and 0 < int(port) < 65536
        if not address.startswith("unix:") and not (host and is_port):
            raise ValueError(
                f"env {env!r}: {address!r} is not an address; expected {SCHEME}HOST:PORT, and more "
                "with commas between them if there are several servers"
            )
    return each
