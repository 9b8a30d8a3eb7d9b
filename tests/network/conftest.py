"""Two machines for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network.namespaces import Machine, network


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    with network(tmp_path, 2, names="debian") as found:
        yield found
