"""A leader for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.launch.nodes.leaders import Leader


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.door.close()
