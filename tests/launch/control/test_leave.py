"""`uneven leave`: how a run is found and asked, what a joined machine passes on, and a real run that a rank leaves."""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.documents import check_document
from tests.launch.small_runs import SAMPLES, make, make_optimizer, step
from uneven import Callback, fit
from uneven.cli import main as command_line
from uneven.errors import InputError, RankError
from uneven.launch import cleanup
from uneven.launch.control import leave_requests
from uneven.launch.control.ask import ask_to_leave, choose_to_leave
from uneven.launch.control.known_runs import STATUS, KnownRun, live_runs
from uneven.launch.control.leave_requests import AskedToLeave, RequestFiles, await_readers
from uneven.launch.nodes.node import Departure
from uneven.launch.nodes.remote import RemoteNode


def make_run(home: Path, name: str, **about: Any) -> Path:
    folder = home / f"uneven-{cleanup.pid_namespace()}-{os.getpid()}-{name}"
    folder.mkdir()
    (folder / STATUS).write_text(json.dumps({"id": name, **about}))
    return folder


def answering(folder: Path, answer: Mapping[str, Any]) -> tuple[threading.Thread, list[Any]]:
    """A launcher that answers the next request so."""
    files, found = RequestFiles(folder), list[Any]()

    def look() -> None:
        while not found:
            found.extend(files.take().items())
        files.answer(found[0][0], answer)

    thread = threading.Thread(target=look)
    thread.start()
    return thread, found


def test_a_run_is_found_by_its_folder_and_asked_by_a_file(home: Path) -> None:
    folder = make_run(home, "a", script="/home/me/train.py", leader="192.0.2.10:29400")
    (home / "uneven-x").mkdir()
    (home / f"uneven-{cleanup.pid_namespace()}-{2**22 + 1}-gone").mkdir()
    (run,) = live_runs()
    assert (run.folder, run.pid) == (folder, os.getpid())
    assert choose_to_leave("train.py") == choose_to_leave(str(os.getpid())) == choose_to_leave(None) == run
    thread, asked = answering(folder, {"left": "rank 2 has left"})
    assert ask_to_leave(run, [2, 3], 60.0) == {"left": "rank 2 has left"}
    thread.join()
    assert asked[0][1] == (2, 3)
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_it_must_be_clear_which_run_is_meant(home: Path) -> None:
    with pytest.raises(RankError, match="no run of yours is on here"):
        choose_to_leave(None)
    make_run(home, "a", script="/home/me/train.py")
    with pytest.raises(InputError, match=r"run 'other.py': there is no such live run; known is a \(train.py\)"):
        choose_to_leave("other.py")
    make_run(home, "b", script="/home/me/other.py")
    with pytest.raises(InputError, match="2 runs of yours are on"):
        choose_to_leave(None)


def test_who_does_not_answer_in_time_is_asked_no_more(home: Path) -> None:
    folder = make_run(home, "a", script="train.py")
    answer = ask_to_leave(choose_to_leave(None), None, 0.1)
    assert "not left within 0.1 s" in answer["refused"]
    assert not RequestFiles(folder).take()
    run = KnownRun("gone", {}, home / "gone")
    with pytest.raises(RankError, match="has just ended"):
        ask_to_leave(run, None, 0.1)


def test_the_command_prints_what_was_handed_in_or_why_not(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(home, "a", script="train.py")

    def call(answer: Mapping[str, Any], *args: str) -> tuple[int, str, str]:
        thread, _ = answering(folder, answer)
        monkeypatch.setattr(sys, "argv", ["uneven", "leave", *args])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        thread.join()
        return int(ended.value.code or 0), *capsys.readouterr()

    code, out, err = call({"left": "rank 1 has handed in 5 samples and left: 2 ranks go on"}, "--json")
    check_document("leave", json.loads(out))
    assert (code, json.loads(out)["left"]) == (0, "rank 1 has handed in 5 samples and left: 2 ranks go on")
    assert "rank 1 has handed in 5 samples" in err
    code, out, err = call({"refused": "it is a loop of your own"}, "--rank", "1")
    assert (code, out) == (1, "")
    assert "cannot leave run a (train.py): it is a loop of your own" in err


class Line:
    """A session whose other side is the test."""

    why_lost: str | None = None

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, **message: Any) -> None:
        self.sent.append(message)


def departing(tmp_path: Path) -> tuple[Departure, Line, list[str]]:
    line, said = Line(), list[str]()
    return Departure(line, tmp_path, said.append), line, said  # type: ignore[arg-type]


def test_a_signal_asks_the_leader_and_where_it_refuses_the_run_stops(tmp_path: Path) -> None:
    found, line, said = departing(tmp_path)
    found.on_signal(signal.SIGTERM)
    found.hear({"answer": "signal", "refused": "the run ends"})
    assert line.sent == [{"leave": "signal", "is_urgent": 1}]
    found.hear({"answer": "signal", "refused": "2 ranks are left, and min_ranks=3"})
    assert line.sent[1:] == [{"stop": signal.SIGTERM}]
    assert "min_ranks=3): it stops, and is saved" in said[-1]


def test_a_file_is_passed_on_to_the_leader_and_its_answer_back(tmp_path: Path) -> None:
    found, line, _ = departing(tmp_path)
    asked, withdrawn = AskedToLeave(tmp_path, (4,)), AskedToLeave(tmp_path, None)
    found.look()
    by_ranks = {str(message["ranks"]): message["leave"] for message in line.sent}
    withdrawn.close()
    found.look()
    assert line.sent[-1] == {"stays": by_ranks["None"]}
    node = RemoteNode(Line(), "mini", {}, 0)  # type: ignore[arg-type]
    node.place([3, 4])
    messages = list(line.sent)
    node.session.take = lambda: messages.pop(0) if messages else None  # type: ignore[method-assign]
    node.hear(tmp_path, None)  # type: ignore[arg-type]
    (request,) = node.take_requests()
    assert (request.home, request.ranks, request.is_open()) == ((3, 4), (4,), True)
    assert node.take_requests() == []
    request.answer({"left": "gone"})
    found.hear(node.session.sent[-1])  # type: ignore[attr-defined]
    assert asked.answer() == {"left": "gone"}
    asked.close()


def test_a_machine_may_go_when_all_of_its_ranks_have_left_and_ended() -> None:
    node = RemoteNode(Line(), "mini", {}, 0)  # type: ignore[arg-type]
    node.place([3, 4])
    node.gone[3], node.codes = "rank 3 left", [0, None]
    node.let_go()
    node.gone[4] = "rank 4 left"
    node.let_go()
    assert node.session.sent == []  # type: ignore[attr-defined]
    node.codes = [0, 0]
    node.let_go()
    node.let_go()
    assert node.session.sent == [{"end": "rank 3 left; rank 4 left", "code": 0, "has_left": 1}]  # type: ignore[attr-defined]


def test_a_folder_waits_for_those_who_have_not_read_their_answer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ended with the rank that left, and `uneven leave` read that the run had ended."""
    folder = make_run(home, "a")
    await_readers(folder)
    asked = AskedToLeave(folder, None)
    await_readers(folder)  # nobody has answered it: nothing is missed
    (name,) = RequestFiles(folder).take()
    RequestFiles(folder).answer(name, {"left": "gone"})
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            asked.close()

    monkeypatch.setattr(leave_requests.time, "sleep", sleep)
    await_readers(folder)
    assert len(looks) == 3


class StopAlone(Callback):
    """When the other rank has left, and whoever asked has its answer: the run's folder goes with the run."""

    def __init__(self, answered: Path) -> None:
        self._answered = answered

    def on_step(self, info: Any) -> None:
        if info.world_size == 1 and self._answered.exists():
            info.stop("alone")


def test_a_rank_of_a_real_run_leaves_and_its_samples_count(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answered = tmp_path / "answered"
    answers: list[Mapping[str, Any]] = []

    def ask_the_run() -> None:
        while not (own := [run for run in live_runs() if run.pid == os.getpid()]):
            ended.wait(0.05)
        answers.append(ask_to_leave(own[0], [1], 60.0))
        answered.touch()

    ended = threading.Event()
    thread = threading.Thread(target=ask_the_run)
    thread.start()
    state = fit(
        model=make, optimizer=make_optimizer, step=step, dataset=SAMPLES, batch_size=4, epochs=100_000, seed=3,
        devices="cpu,cpu", policy="cadence", callbacks=[StopAlone(answered)], restarts=1,
    )  # fmt: skip
    thread.join()
    assert "rank 1 (cpu on" in answers[0]["left"], answers
    handed = int(answers[0]["left"].partition(" handed in ")[2].split()[0].replace(",", ""))
    assert state.samples == sum(state.rank_samples)
    assert state.rank_samples[1] == handed
    (segment,) = state.segments[1:]
    assert (segment["again"], segment["again_samples"]) == ([], 0)
    shown = capfd.readouterr().err
    assert "leaves: 1 rank goes on" in shown
    assert "trained again" not in shown
    assert "started again" not in shown
    assert state.timeline is not None
    assert any("leaves: 1 rank" in event.fields.get("why", "") for event in state.timeline.events)
    _, gone = state.timeline.lanes
    assert gone.ended is not None
    assert (gone.device, gone.samples, gone.ended.how) == ("cpu", handed, "left")
    assert "leaves: 1 rank goes on" in gone.ended.why
    assert state.timeline.trained == state.samples
