"""What messages tell people to install works where they read it."""

from __future__ import annotations

import json
import sys
import urllib.request  # noqa: F401  # Python 3.14 makes paths into addresses with it
from pathlib import Path

import pytest

from juggler.runtime.install_commands import installing


@pytest.fixture(autouse=True)
def only_what_a_test_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])


def noted(monkeypatch: pytest.MonkeyPatch, site: Path, origin: object) -> None:
    """An installation as pip records it, with its origin."""
    there = site / "juggler-0.2.0.dist-info"
    there.mkdir(parents=True)
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: juggler\nVersion: 0.2.0\n")
    (there / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])


def test_an_editable_checkout_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "my checkout"
    built = checkout / "juggler.egg-info"
    built.mkdir(parents=True)
    (built / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: juggler\nVersion: 0.2.0\n")
    monkeypatch.setattr(sys, "path", [str(checkout)])  # where the command is given, first of all
    url = checkout.as_uri()
    noted(monkeypatch, tmp_path / "site", {"url": url, "dir_info": {"editable": True}})
    assert installing("atari").endswith(f"pip install -e '{checkout}[atari]'")
    monkeypatch.chdir(checkout)
    assert installing("atari").endswith("pip install -e '.[atari]'")


@pytest.mark.parametrize("version", [(3, 13), (3, 14), (3, 15)])
def test_an_extra_that_this_python_cannot_have_says_so(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    told = "box2d has no wheels for Python 3.14 or newer, so it needs an older one"
    assert (installing("box2d") == told) == (version >= (3, 14))
    assert installing("atari").endswith("pip install 'juggler[atari]'")


@pytest.mark.parametrize(
    ("origin", "what"),
    [
        ({"url": "file:///gone/juggler.whl", "archive_info": {}}, "'juggler[onnx]'"),
        (
            {"url": "https://host/juggler.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
            "'juggler[onnx] @ git+https://host/juggler.git'",
        ),
    ],
)
def test_it_comes_from_where_juggler_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: object, what: str
) -> None:
    noted(monkeypatch, tmp_path, origin)
    assert installing("onnx").endswith(f"pip install {what}")


def test_a_wheel_that_is_still_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "juggler-0.2.0-py3-none-any.whl"
    wheel.touch()
    noted(monkeypatch, tmp_path / "site", {"url": wheel.as_uri(), "archive_info": {}})
    assert installing("certs").endswith(f"pip install '{wheel}[certs]'")


def test_pip_is_that_of_the_python_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = tmp_path / "pip"
    pip.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installing("onnx") == f"{sys.executable} -m pip install 'juggler[onnx]'"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert installing("onnx") == "pip install 'juggler[onnx]'"
