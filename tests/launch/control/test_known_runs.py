"""Which run is meant where several processes or paths could be, and what is known about one that was stopped."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uneven.errors import InputError
from uneven.launch.cleanup import live_folders
from uneven.launch.control.ask import stop_run
from uneven.launch.control.known_runs import KnownRun, choose_known, ended_runs, live_runs, remember, state_folder
from uneven.launch.control.listing import FINISHED, STOPPED, Listing
from uneven.launch.find_script import Script
from uneven.launch.nodes import lead
from uneven.launch.nodes.gathering import Gathering
from uneven.launch.nodes.lead import lead_script
from uneven.launch.run import Run
from uneven.machines.options import LeadOptions
from uneven.train.requests import Requests

LEADER = "pc1 (192.0.2.10)"


def stop(monkeypatch: pytest.MonkeyPatch, listing: Listing, end: Callable[[], None]) -> dict[str, Any]:
    """`uneven stop` of a run that does `end` when it is told."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda _, number: end() if number else None)
        return stop_run(choose_known(listing.id, live_only=True), 60.0, now=False, say=print)


def test_the_record_of_a_stopped_run_is_that_of_the_process_that_leads_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`uneven join` on the same machine leaves a line with the same id, and may write it last."""
    led, joined = Listing("train.py", run_id="abc123"), Listing("train.py", run_id="abc123", leader=LEADER)

    def end() -> None:
        led.saved = "/runs/a"
        led.close(STOPPED)
        joined.close(FINISHED)
        remember({"id": "abc123", "leader": None, "pid": os.getpid() + 1, "saved": "/runs/other"})

    assert stop(monkeypatch, led, end)["saved"] == "/runs/a"


@pytest.mark.parametrize("saved", ["/runs/a", None])
def test_without_a_record_the_last_status_tells_what_is_known(
    home: Path, monkeypatch: pytest.MonkeyPatch, saved: str | None
) -> None:
    """The run has another $UNEVEN_HOME, or cannot write its history."""
    listing = Listing("train.py")
    listing.show({"slot": 12, "out": "/runs/a", "saved": saved})
    known = stop(monkeypatch, listing, lambda: shutil.rmtree(listing.folder))
    assert known == {"slot": 12, "out": "/runs/a", **({"saved": saved} if saved else {})}
    listing.close(STOPPED)


def test_a_run_that_a_second_ctrl_c_ends_is_remembered_before_its_folder_goes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    def end_all_runs() -> None:
        assert listing.folder.exists()
        assert [(one["id"], one["result"]) for one in ended_runs()] == [(listing.id, STOPPED)]

    def leave(code: int) -> None:
        raise SystemExit(code)

    listing, run = Listing("train.py"), Run.__new__(Run)
    run._requests, run._config = Requests(), SimpleNamespace(grace=1.0)  # type: ignore[assignment]
    run._done = SimpleNamespace(wait=interrupt)  # type: ignore[assignment]
    run._start = SimpleNamespace(listing=listing)  # type: ignore[assignment]
    monkeypatch.setattr("uneven.launch.run.end_all_runs", end_all_runs)
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", leave)
        with pytest.raises(SystemExit) as ended:
            run._finish_interrupted()
    assert ended.value.code == 130
    shutil.rmtree(listing.folder)


def test_a_run_that_is_led_and_joined_here_is_one_run(home: Path) -> None:
    joined = Listing("train.py", run_id="abc123", leader=LEADER)
    led = Listing("train.py", run_id="abc123")
    again = Listing("train.py", run_id="abc123", leader=LEADER)
    try:
        for named in (None, "abc123", "abc", "train.py", "last"):
            assert choose_known(named).folder == led.folder
        led.close(FINISHED)
        pid = os.getpid()
        words = rf"abc123 \(train.py, pid {pid}\), abc123 \(train.py, pid {pid}\); name one by its id, or by its pid"
        with pytest.raises(InputError, match=words):
            choose_known("abc123", live_only=True)
        joined.close(FINISHED)
        again.close(FINISHED)
        assert choose_known("abc123").leader is None
    finally:
        for one in (joined, led, again):
            one.close(FINISHED)


def test_a_script_is_named_by_any_path_to_it(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop.py").touch()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    listing = Listing("loop.py", run_id="abc123")
    try:
        assert choose_known("abc123").record["script"] == str(tmp_path / "loop.py")
        for named in ("loop.py", "./loop.py", "other/../loop.py", str(tmp_path / "loop.py")):
            assert choose_known(named).id == "abc123"
        monkeypatch.chdir(tmp_path / "other")
        assert choose_known("../loop.py").id == choose_known("loop.py").id == "abc123"
        with pytest.raises(InputError, match="no such run"):
            choose_known("./loop.py")
        (tmp_path / "other").rmdir()
        assert choose_known("abc").id == "abc123", "also where the current folder is gone"
    finally:
        listing.close(FINISHED)


def test_the_folder_of_the_history_is_never_below_the_current_one_by_accident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UNEVEN_HOME", "~/xx")
    assert state_folder() == tmp_path / "xx"
    monkeypatch.delenv("UNEVEN_HOME")
    for relative in ("state", ""):
        monkeypatch.setenv("XDG_STATE_HOME", relative)
        assert state_folder() == tmp_path / ".local" / "state" / "uneven"


def test_a_run_that_waits_for_machines_is_listed_and_can_be_stopped(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token that the leader prints is in none of its files; it was in launcher.log, which everybody could read."""
    seen: list[KnownRun] = []
    logged: list[str] = []

    def wait(_: Gathering, hosts: object) -> None:
        seen.extend(live_runs())
        for folder, _ in live_folders():
            logged.extend(path.read_text() for path in folder.rglob("*") if path.is_file())
        raise KeyboardInterrupt  # as `uneven stop` does it

    monkeypatch.setattr(Gathering, "wait", wait)
    monkeypatch.setattr(lead, "collect_facts", lambda *_: {"host": "here", "devices": ["cpu"]})
    monkeypatch.setattr(lead, "own_devices", lambda _: ())
    script = tmp_path / "train.py"
    script.write_text("import uneven\n\nuneven.fit()\n")
    options = LeadOptions(2, 2, "a-token-that-was-made", bind="127.0.0.1")
    for is_check in (True, False):
        with pytest.raises(KeyboardInterrupt):
            lead_script(Script(script), {"devices": "cpu"}, options, is_check=is_check)
    (run,) = seen
    assert any("uneven join 127.0.0.1:" in text for text in logged)
    assert not any(options.token in text for text in logged)
    assert options.token in capsys.readouterr().err
    assert (run.record["phase"], run.record["script"], run.leader) == (lead.WAITING, str(script), None)
    assert live_runs() == []
    assert [(one["id"], one["result"]) for one in ended_runs()] == [(run.id, STOPPED)]
