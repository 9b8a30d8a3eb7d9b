"""Shared by all tests: a cuda test without a GPU is skipped with its reason, never passed silently."""

import os
import subprocess
import threading
from collections.abc import Iterator

# As many tests run at once as there are cores: threads of torch would only wait for each other, in this process and
# in those that tests start. It is read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests import forked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device (torch {torch.__version__})"))


@pytest.fixture(autouse=True, scope="session")
def _processes_are_forked() -> Iterator[None]:
    """From one warmed-up server per process of pytest: see tests/forked.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked.PackagePopen)
        yield
    forked.close_server()


@pytest.fixture(autouse=True)
def _some_are_started_for_real(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if {"real_start", "cuda", "soak"} & set(request.node.keywords):
        monkeypatch.setattr(subprocess, "Popen", forked.RealPopen)


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    """A run that ended, well or badly, has stopped its sampler: a test that leaks one fails."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name == "uneven-sampler"]
    assert not left, "a sampler outlived its run"
