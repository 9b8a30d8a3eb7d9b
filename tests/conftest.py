"""Shared by all tests: a cuda test without a GPU is skipped with its reason, never passed silently."""

import os
import threading
from collections.abc import Iterator

# As many tests run at once as there are cores: threads of torch would only wait for each other, in this process and
# in those that tests start. It is read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device (torch {torch.__version__})"))


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    """A run that ended, well or badly, has stopped its sampler: a test that leaks one fails."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name == "uneven-sampler"]
    assert not left, "a sampler outlived its run"
