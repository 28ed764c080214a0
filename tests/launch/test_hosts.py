from __future__ import annotations

from pathlib import Path

import pytest

from juggler.launch.commands import LaunchError
from juggler.launch.hosts import Host, read_hosts

GOOD = """
driver = "10.77.0.1:5005"
juggler = "/opt/juggler/bin/juggler"

[hosts."root@gpu1"]
learners = 2

[hosts.cpu1]
env_runners = 16
directory = "/data"
juggler = "juggler"
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    return path


def test_hosts_have_what_the_file_says_of_all_and_of_each(tmp_path: Path) -> None:
    hosts = read_hosts(_file(tmp_path, GOOD))
    assert hosts.driver == "10.77.0.1:5005"
    assert hosts.hosts == (
        Host("root@gpu1", learners=2, juggler="/opt/juggler/bin/juggler"),
        Host("cpu1", env_runners=16, directory="/data", juggler="juggler"),
    )


def test_certificates_are_for_the_driver_and_the_hosts_of_learners(tmp_path: Path) -> None:
    assert read_hosts(_file(tmp_path, GOOD)).dialed == ["10.77.0.1", "gpu1"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("learners = 2", "learnes = 2", "has no key 'learnes': did you mean 'learners'?"),
        ("learners = 2", 'learners = "two"', "must be a whole number from 0 to 4096, not 'two'"),
        ("learners = 2", "learners = 0", "no host has learners: a run needs at least one"),
        ("env_runners = 16", "env_runners = -1", "must be a whole number from 0 to 4096, not -1"),
        ('"10.77.0.1:5005"', '"10.77.0.1"', "'10.77.0.1' is not an address"),
        ('"10.77.0.1:5005"', '"0.0.0.0:5005"', "driver = '0.0.0.0:5005' cannot be dialed: give"),
        ('"10.77.0.1:5005"', '"[::0]:5005"', "driver = '[::0]:5005' cannot be dialed: give"),
        ('"10.77.0.1:5005"', '"[::]:5005"', "driver = '[::]:5005' cannot be dialed: give"),
        ('"10.77.0.1:5005"', '"10.77.0.1:0"', "driver = '10.77.0.1:0' cannot be dialed: give"),
        ('driver = "10.77.0.1:5005"', "", "`driver` must be the address of this host"),
        ("juggler =", "jugler =", "has a key 'jugler' that is not known: did you mean 'juggler'?"),
        ('"root@gpu1"', '"-oProxyCommand=x"', "'-oProxyCommand=x' is not the name of a host"),
        ("[hosts.cpu1]", "[hosts.cpu1", "is not valid TOML"),
        ('directory = "/data"', "directory = 3", "must be a text, not 3"),
    ],
)
def test_a_mistake_in_the_file_is_told(tmp_path: Path, before: str, after: str, said: str) -> None:
    assert before in GOOD
    with pytest.raises(LaunchError) as raised:
        read_hosts(_file(tmp_path, GOOD.replace(before, after, 1)))
    assert said in str(raised.value)
    assert "hosts.toml" in str(raised.value)


def test_a_file_without_hosts_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="names no hosts"):
        read_hosts(_file(tmp_path, 'driver = "a:1"'))
    with pytest.raises(LaunchError, match="cannot read the file of hosts"):
        read_hosts(tmp_path / "missing.toml")
