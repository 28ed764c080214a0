"""Builds `juggler_client`, which is `juggler.client` with `juggler.runtime.wire` inside.

It goes by a name of its own, so that whoever installs it beside the whole of Juggler has no file
of one that the other would overwrite, or take along when it is removed.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "build" / "src"
NEEDED = ("grpcio", "numpy", "protobuf")
FOR_GYMNASIUM = ("gymnasium", "ml-dtypes")


def copy_renamed(package: Path, to: Path) -> None:
    """The files of a package, which import one another by their new names."""
    shutil.copytree(package, to, ignore=shutil.ignore_patterns("__pycache__"))
    for path in to.rglob("*.py*"):
        text = re.sub(r"\bjuggler\.client\b", "juggler_client", path.read_text())
        path.write_text(text.replace("juggler.runtime.wire", "juggler_client.wire"))


def requirements(names: tuple[str, ...]) -> list[str]:
    """Those of Juggler's own, with its bounds."""
    return [each for each in JUGGLER["dependencies"] if re.split("[<>=~!]", each)[0] in names]


JUGGLER = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
shutil.rmtree(HERE / "build", ignore_errors=True)
copy_renamed(HERE.parent / "juggler" / "client", SOURCE / "juggler_client")
copy_renamed(HERE.parent / "juggler" / "runtime" / "wire", SOURCE / "juggler_client" / "wire")
(SOURCE / "juggler_client" / "py.typed").touch()

setup(
    version=JUGGLER["version"],
    install_requires=requirements(NEEDED),
    extras_require={"gymnasium": requirements(FOR_GYMNASIUM)},
    package_dir={"": "build/src"},
    packages=find_packages(str(SOURCE)),
    package_data={"juggler_client": ["py.typed", "**/*.pyi"]},
)
