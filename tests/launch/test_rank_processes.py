"""Ranks as real processes, and what can go wrong with one: the run ends, says why, and leaves nothing.

One of each here; tests/launch/test_soak.py repeats them against the clock.
"""

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults import (
    Launcher,
    differing,
    ended_by_signal,
    killed,
    nothing_left,
    raising,
    saved_state,
    stopped,
    stopped_for_a_while,
    trains,
)
from tests.faults import start as start
from tests.launch.fake_processes import local_cpus
from uneven.comm.store import get_text
from uneven.errors import MachineError
from uneven.launch.watch import watch


def test_a_machine_that_lets_no_process_start_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback with `ulimit -u 10`."""

    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("subprocess.Popen", refuse)
    with pytest.raises(MachineError, match=r"rank 0 does not start \(Resource temporarily .*ulimit -u"):
        local_cpus(tmp_path, 2)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    killed(tmp_path, "async")


def test_a_stopped_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher's clock, which here goes on by a second with every heartbeat of the healthy rank.

    So that rank is never silent for long, however busy the machine is. The true clock is soaked.
    """
    now_s, last = [0.0], [""]

    def hear(store: Any, key: str) -> str | None:
        text = get_text(store, key)
        is_healthy_rank = text is not None and json.loads(text).get("rank") == 0
        if text is not None and is_healthy_rank and text != last[0] and (tmp_path / "fault").exists():
            now_s[0] += 1.0
            last[0] = text
        return text

    monkeypatch.setattr(watch, "get_text", hear)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=time.sleep))
    stopped(tmp_path, "sync")


def test_a_rank_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    stopped_for_a_while(tmp_path, "async")


def test_a_rank_that_raises_shows_its_own_traceback(tmp_path: Path) -> None:
    raising(tmp_path, "sync")


def test_a_rank_with_another_model_is_named_before_training(tmp_path: Path) -> None:
    differing(tmp_path, "sync")


@pytest.mark.parametrize("policy", ["sync", pytest.param("sync", marks=pytest.mark.soak, id="a real start"), "async"])
def test_ctrl_c_stops_all_ranks_and_the_state_loads(start: Callable[..., Launcher], policy: str) -> None:
    launcher = start("training", policy)
    assert "stopped after" in ended_by_signal(launcher, trains)
    saved_state(launcher.folder)


def test_ctrl_c_during_start_up_ends_a_run_that_never_began(start: Callable[..., Launcher]) -> None:
    launcher = start("starting")
    assert "before its first step" in ended_by_signal(launcher, lambda _: len(launcher.pids) == 2)
    assert not (launcher.folder / "runs").exists()


def test_a_second_ctrl_c_ends_at_once(start: Callable[..., Launcher]) -> None:
    ended_by_signal(start("endless"), lambda lines: lines.count("step") == 2, times=2)


def test_ranks_notice_that_their_launcher_was_killed_and_end_a_stopped_one_too(
    start: Callable[..., Launcher],
) -> None:
    launcher = start("stopping")
    launcher.read_until(lambda lines: lines[-1] == "stopping")
    launcher.process.kill()
    launcher.process.wait()
    nothing_left(launcher.pids, launcher.process.pid)
