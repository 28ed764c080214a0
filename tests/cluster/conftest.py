from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import Cluster
from support.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
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
