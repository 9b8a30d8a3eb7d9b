"""Runs on the list of this user: how they are found, named, remembered and stopped; and a real one."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.control.runs import HEARD
from tests.launch.small_runs import SAMPLES, make, make_optimizer, step
from uneven import Ddp, Run, TrainedState
from uneven.errors import InputError, RankError, StoppedError, Terminated
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.control import ask
from uneven.launch.control.ask import choose_to_leave, ignores_interrupt, stop_run
from uneven.launch.control.known_runs import (
    MOST,
    NAME,
    choose_known,
    ended_runs,
    known_runs,
    live_runs,
    remember,
    state_folder,
)
from uneven.launch.control.listing import (
    FAILED,
    FINISHED,
    LEFT,
    STOPPED,
    Listing,
    describe,
    describe_result,
    listed,
    new_run_id,
)
from uneven.launch.control.read_logs import LogReader
from uneven.launch.nodes.remote import AllRanks, RemoteNode
from uneven.launch.watch.generations import Generations
from uneven.results.progress import Reporter
from uneven.train.requests import Requests


def test_a_status_is_what_the_heartbeats_say() -> None:
    found = describe(HEARD, ["cpu", "cuda:0"], ["a", "b"], generation=2, lost=1, why="rank 2 was killed")
    assert (found["slot"], found["samples"], found["samples_per_s"], found["epoch"]) == (12, 400, 200.0, 2)
    assert (found["generation"], found["lost"], found["out"], found["policy"]) == (2, 1, "runs/a", "async")
    first, second = found["ranks"]
    assert (first["share"], first["round"], first["machine"], second["device"]) == (0.75, 3.0, "a", "cuda:0")
    assert second["loss"] is None, "JSON has no NaN"
    nothing = describe([{}], ["cpu"], ["a"])
    assert (nothing["ranks"][0]["phase"], nothing["ranks"][0]["share"], nothing["has_begun"]) == ("start", None, False)
    over = describe([{"slot": 0, "reached": 12, "is_past": True, "saved": "runs/a"}], ["cpu"], ["a"])
    assert (over["slot"], over["saved"]) == (12, "runs/a")


def test_a_run_is_listed_while_it_is_on_and_remembered_afterwards(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs" / "a"
    out.mkdir(parents=True)
    reporter = Reporter("off")
    reporter.say(["said before the run was listed"])
    monkeypatch.setattr("uneven.launch.control.listing.EVERY_S", 3600.0)
    with suppress(KeyboardInterrupt), listed(Listing("/home/me/train.py")) as listing:
        listing.attach(reporter)
        (run,) = live_runs()
        assert (run.id, run.script, run.record["pid"], run.leader) == (listing.id, "train.py", os.getpid(), None)
        assert [one.text for one in LogReader(run.log_folders).read()] == ["said before the run was listed"]
        roster = Roster.on_one_machine(parse_devices("cpu,cpu@0.5"))
        listing.hear([{**HEARD[0], "out": str(out)}, HEARD[1]], Generations(roster, ("a", "b")))
        (run,) = live_runs()
        assert (run.record["slot"], run.record["out"]) == (12, str(out))
        assert [one["device"] for one in run.record["ranks"]] == ["cpu", "cpu@0.5"]
        assert (out / "logs" / "launcher.log").read_text().endswith("said before the run was listed\n")
        listing.hear([{**HEARD[0], "slot": 13, "out": str(out), "saved": str(out)}, HEARD[1]],
                     Generations(roster, ("a", "b")))  # fmt: skip
        assert live_runs()[0].record["slot"] == 12, "no more often than once a second"
        (listing.folder / "payload").touch()
        listing.clear()
        assert {path.name for path in listing.folder.iterdir()} <= {"run.json", "logs"}
        raise KeyboardInterrupt
    assert not listing.folder.exists()
    assert live_runs() == []
    (record,) = ended_runs()
    assert (record["id"], record["result"], record["slot"], record["saved"]) == (listing.id, STOPPED, 13, str(out))
    assert not known_runs()[0].is_live


def test_a_killed_launcher_and_a_stranger_with_its_number_are_not_listed(home: Path) -> None:
    listing = Listing("train.py")
    about = json.loads((listing.folder / "run.json").read_text())
    (listing.folder / "run.json").write_text(json.dumps({**about, "start": "1"}))
    assert live_runs() == []
    listing.close(FINISHED)


def test_how_it_ended_is_read_from_what_was_raised() -> None:
    assert describe_result(None) == (FINISHED, "")
    assert describe_result(Terminated()) == describe_result(KeyboardInterrupt()) == (STOPPED, "")
    assert describe_result(StoppedError("nothing was trained")) == (STOPPED, "nothing was trained")
    assert describe_result(RankError("rank 1 was killed")) == (FAILED, "rank 1 was killed")


def test_the_history_is_bounded_and_never_disturbs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(MOST + 5):
        remember({"id": f"r{number}"})
    ids = [record["id"] for record in ended_runs()]
    assert (ids[0], ids[-1], len(ids)) == (f"r{MOST + 4}", "r5", MOST)
    with (state_folder() / NAME).open("a") as file:
        file.write('{"id": "cut')
    assert len(ended_runs()) == MOST
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path / "file"))
    remember({"id": "a"})
    assert ended_runs() == []
    monkeypatch.delenv("UNEVEN_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_folder() == Path("/state/uneven")


def test_a_run_is_named_by_its_id_its_folder_its_script_or_as_the_last(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="no run of yours is on here; none is known"):
        choose_known(None)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs" / "old"
    remember({"id": "aaa111", "script": "old.py", "since": 1.0, "out": str(out), "result": FINISHED})
    remember({"id": "aab222", "script": "old.py", "since": 2.0, "result": FAILED})
    one, two = Listing("/home/me/train.py", run_id="abc123"), Listing("/home/me/other.py", run_id="abd456")
    try:
        assert choose_known("abc").id == choose_known("train.py").id == "abc123"
        assert choose_known("last").id == "abd456"
        assert choose_known("runs/old").id == choose_known("aaa").id == "aaa111"
        assert choose_known("old.py").id == "aab222", "of those that have ended the newest"
        with pytest.raises(InputError, match=r"2 runs of yours are on; known are abc123 \(train.py\), abd456"):
            choose_known(None)
        with pytest.raises(InputError, match="run 'ab': 2 runs are meant"):
            choose_known("ab")
        with pytest.raises(InputError, match=r"'zz': there is no such run; known are abc123 .*aab222 \(old.py, ended"):
            choose_known("zz")
        with pytest.raises(InputError, match="no such live run"):
            choose_known("aaa111", live_only=True)
        two.close(FINISHED)
        assert choose_known(None).id == choose_known(str(os.getpid())).id == "abc123"
        (tmp_path / "elsewhere" / "logs").mkdir(parents=True)
        assert choose_known("elsewhere").log_folders == [tmp_path / "elsewhere" / "logs"]
    finally:
        one.close(FINISHED)
        two.close(FINISHED)
    assert new_run_id()[0].isalpha()


def test_who_only_takes_part_is_told_where_the_run_is_led(home: Path) -> None:
    listing = Listing("train.py", leader="pc1 (192.0.2.10)", run_id="abc123")
    try:
        with pytest.raises(
            RankError, match=r"led on pc1 .*uneven leave abc123 takes it out, and uneven stop abc123 on pc1"
        ):
            stop_run(choose_known("abc"), 1.0, now=False, say=print)
    finally:
        listing.close(FINISHED)


def test_joined_machines_are_told_where_the_run_is(home: Path, tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    session: Any = SimpleNamespace(send=lambda **message: sent.append(message), why_lost=None)
    nodes = [RemoteNode(session, "pc2", {}, 1), RemoteNode(session, "pc3", {}, 1, is_let_go=True)]
    AllRanks(None, nodes, tmp_path, Requests()).tell(describe(HEARD, ["cpu", "cpu"], ["pc1", "pc2"]))  # type: ignore[arg-type]
    assert len(sent) == 1, "not the one that has left"
    listing = Listing("train.py", leader="pc1 (192.0.2.10)", run_id="abc123")
    listing.show(json.loads(json.dumps(sent[0]["status"])))
    (run,) = live_runs()
    assert (run.record["slot"], run.record["out"], run.leader) == (12, "runs/a", "pc1 (192.0.2.10)")
    assert run.log_folders == [listing.folder / "logs"], "its folder is on the leader's machine"
    assert choose_to_leave("abc").id == "abc123", "uneven leave takes the same names"
    listing.close(LEFT)
    assert ended_runs()[0]["result"] == LEFT


@pytest.mark.parametrize(("now", "signals"), [(False, 1), (True, 2)])
def test_a_stop_is_a_ctrl_c_and_now_is_a_second_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, now: bool, signals: int
) -> None:
    listing = Listing("train.py")
    sent: list[int] = []

    def kill(pid: int, number: int) -> None:
        if number:
            sent.append(number)
            if len(sent) == signals:
                listing.close(STOPPED)

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(ask, "AGAIN_S", 0.0)
    assert stop_run(choose_known(None), 60.0, now=now, say=print)["result"] == STOPPED
    assert sent == [signal.SIGINT] * signals


def test_a_run_that_does_not_stop_is_named_and_one_that_ignores_ctrl_c_gets_sigterm(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, mask in (("1", "0000000000000002"), ("2", "0000000000000001")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "status").write_text(f"Name:\tpython\nSigIgn:\t{mask}\n")
    assert (ignores_interrupt(1, tmp_path), ignores_interrupt(2, tmp_path)) == (True, False)
    listing, sent = Listing("train.py"), list[int]()
    monkeypatch.setattr(ask, "ignores_interrupt", lambda _: True)
    monkeypatch.setattr(os, "kill", lambda _, number: sent.append(number))
    with pytest.raises(RankError, match="was told to stop and has not ended within 0 s; look again by uneven status"):
        stop_run(choose_known(None), 0.01, now=False, say=print)
    assert [number for number in sent if number] == [signal.SIGTERM]
    monkeypatch.undo()
    listing.close(FINISHED)


def chatty(model: Any, batch: Any) -> Any:
    print("a step is trained")
    return step(model, batch)


def test_a_run_on_two_processes_is_listed_logged_stopped_and_saved(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "a"
    found: dict[str, Any] = {}

    def stop() -> None:
        while not (runs := live_runs()) or not runs[0].record.get("samples"):
            time.sleep(0.02)
        (found["run"],) = runs
        reader = LogReader([])
        while not found.get("lines"):
            (run,) = live_runs()
            reader.folders = run.log_folders
            found["lines"] = [line for line in reader.read() if line.rank is not None]
        found["record"] = stop_run(choose_known(found["run"].id[:4]), 100.0, now=False, say=print)

    builder = Ddp.builder(make, make_optimizer, chatty).dataset(SAMPLES)
    run = builder.settings(batch_size=4, epochs=100_000, devices="cpu,cpu", out=out, progress="off").run()
    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run.join()
    thread.join()
    record = found["run"].record
    assert [rank["device"] for rank in record["ranks"]] == ["cpu", "cpu"]
    assert (record["policy"], record["out"], record["epochs"]) == ("balanced", str(out), 100_000)
    assert {line.text for line in found["lines"]} == {"a step is trained"}
    state = TrainedState.load(out)
    assert found["record"] | {"slot": 0} == found["record"] | {"slot": 0, "result": STOPPED, "saved": str(out)}
    assert found["record"]["samples"] == state.samples > 0
    assert not state.finished
    assert any(out.glob("step-*/state.json"))
    assert live_runs() == []


def test_a_run_in_this_process_is_listed_and_its_figures_are_its_own(home: Path) -> None:
    seen: list[Any] = []

    class Look:
        def on_step(self, info: Any) -> None:
            seen.append(live_runs())

    builder = Ddp.builder(make, make_optimizer, step).dataset(SAMPLES).callbacks(Look())
    builder.settings(batch_size=4, epochs=1, devices="cpu", progress="off").run().join()
    (run,) = seen[0]
    assert [rank["device"] for rank in run.record["ranks"]] == ["cpu"]
    (record,) = ended_runs()
    assert (record["id"], record["result"], record["samples"]) == (run.id, FINISHED, 64)


def test_every_run_of_a_process_has_a_log_and_an_entry_of_its_own(home: Path, tmp_path: Path) -> None:
    """However short it is. What is shown before it has a worker is of the run before, whose folder is another one."""
    for name in ("first", "second"):
        builder = Ddp.builder(make, make_optimizer, step).dataset(SAMPLES).settings(out=tmp_path / name)
        builder.settings(batch_size=4, epochs=1, devices="cpu", progress="off").run().join()
    for record, name in zip(ended_runs(), ("second", "first"), strict=True):
        assert record["out"] == str(tmp_path / name)
        log = (tmp_path / name / "logs" / "launcher.log").read_text()
        assert log.count("1 device: cpu") == 1
        assert f"state and timeline are in {tmp_path / name}" in log


MAY_START = threading.Event()


class Waits:
    def on_start(self, info: Any) -> None:
        MAY_START.wait()


@pytest.mark.usefixtures("home")
def test_two_runs_at_once_in_a_process_tell_their_epochs_to_their_own_listeners() -> None:
    told: tuple[list[Any], list[Any]] = ([], [])

    def begin(epochs: int, entries: list[Any], *callbacks: Any) -> Run:
        builder = Ddp.builder(make, make_optimizer, step).dataset(SAMPLES).callbacks(*callbacks)
        builder.on_epoch(entries.append)
        return builder.settings(batch_size=4, epochs=epochs, devices="cpu", progress="off").run()

    first = begin(3, told[0], Waits())
    begin(2, told[1]).join()
    MAY_START.set()
    first.join()
    assert [[entry["epoch"] for entry in entries] for entries in told] == [[1, 2, 3], [1, 2]]
