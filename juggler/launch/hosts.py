"""The file that names the hosts of a run."""

from __future__ import annotations

import dataclasses
import ipaddress
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.launch.commands import LaunchError
from juggler.runtime.actors.endpoints import EndpointError, split_address
from juggler.runtime.nearest import nearest

#: Of one role at one host, and of hosts: more is a slip of the keyboard.
_MOST = 4096


@dataclass(frozen=True, slots=True)
class Host:
    """A host and what runs there.

    Attributes:
        name: as `ssh` takes it: a host, an alias of ~/.ssh/config, or user@host.
        env_runners: how many EnvRunners it gets.
        learners: how many learners.
        evaluators: how many evaluators.
        address: by which EnvRunners dial its learners; "": the name, without the user.
        directory: where its commands run; "": the home directory.
        juggler: the command there.
    """

    name: str
    env_runners: int = 0
    learners: int = 0
    evaluators: int = 0
    address: str = ""
    directory: str = ""
    juggler: str = "juggler"

    @property
    def dialed(self) -> str:
        return self.address or self.name.rpartition("@")[2]


@dataclass(frozen=True, slots=True)
class Hosts:
    """All hosts of a run.

    Attributes:
        driver: the address of this host, HOST:PORT, by which the others dial the driver.
        hosts: where the workers run.
    """

    driver: str
    hosts: tuple[Host, ...]

    @property
    def dialed(self) -> list[str]:
        """Names and addresses by which the driver and the learners are dialed."""
        learners = [host.dialed for host in self.hosts if host.learners]
        return list(dict.fromkeys([split_address(self.driver)[0], *learners]))


def read_hosts(path: Path) -> Hosts:
    """Read the file of hosts: see docs/clusters.md.

    Raises:
        LaunchError: it cannot be read, or says something that cannot be.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise LaunchError(f"cannot read the file of hosts {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path} is not valid TOML: {error}") from error
    own = {field.name: field for field in dataclasses.fields(Host) if field.name != "name"}
    common = {key: values.pop(key) for key in ("directory", "juggler") if key in values}
    driver, tables = values.pop("driver", None), values.pop("hosts", None)
    if values:
        key = next(iter(values))
        known = ["driver", "hosts", "directory", "juggler"]
        raise LaunchError(f"{path} has a key {key!r} that is not known{nearest(key, known)}")
    if not isinstance(driver, str):
        raise LaunchError(
            f"{path}: `driver` must be the address of this host, by which the others dial the "
            'driver, as in driver = "10.77.0.1:5005"'
        )
    try:
        host, port = split_address(driver)
    except EndpointError as error:
        raise LaunchError(
            f"{path}: driver = {driver!r} is not an address: expected HOST:PORT, as in "
            "10.77.0.1:5005"
        ) from error
    if not port or _is_of_all(host):
        raise LaunchError(
            f"{path}: driver = {driver!r} cannot be dialed: give the address and the port by which "
            'the others dial this host, as in driver = "10.77.0.1:5005"'
        )
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise LaunchError(f"{path} names no hosts: give each one a table, such as [hosts.gpu1]")
    hosts = []
    for name, table in tables.items():
        for key, value in {**common, **table}.items():
            if key not in own:
                raise LaunchError(f"{path}: hosts.{name} has no key {key!r}{nearest(key, own)}")
            _check(value, own[key].type, f"{path}: hosts.{name}.{key}")
        if name.startswith("-"):
            raise LaunchError(f"{path}: {name!r} is not the name of a host")
        hosts.append(Host(name, **{**common, **table}))
    for what in ("learners", "env_runners"):
        if not sum(getattr(host, what) for host in hosts):
            raise LaunchError(f"{path}: no host has {what}: a run needs at least one")
    return Hosts(driver, tuple(hosts))


def _check(value: Any, kind: Any, where: str) -> None:
    if kind == "int":
        if type(value) is not int or not 0 <= value <= _MOST:
            raise LaunchError(f"{where} must be a whole number from 0 to {_MOST}, not {value!r}")
    elif not isinstance(value, str):
        raise LaunchError(f"{where} must be a text, not {value!r}")


def _is_of_all(host: str) -> bool:
    """Whether it is an address at which a process can listen, and that nobody can dial."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False  # a name
