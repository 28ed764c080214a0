from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.containers import Cluster, Engine, missing
from support.place import Place


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    if why := missing():
        pytest.skip(why)
    made = Engine()
    try:
        made.start()
        made.build()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def cluster(engine: Engine) -> Iterator[Cluster]:
    made = Cluster(engine)
    made.compose("-f", "certs.yaml", "run", "--rm", "certs")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()
