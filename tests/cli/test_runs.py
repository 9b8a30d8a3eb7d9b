"""`uneven status`, `uneven stop` and `uneven logs` on made runs: what is printed, as JSON, and the exit codes."""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cli.documents import check_document
from tests.launch.control.runs import HEARD, home
from uneven.cli import main as command_line
from uneven.launch.control import known_runs
from uneven.launch.control.listing import FINISHED, STOPPED, Listing, describe
from uneven.launch.control.rank_log import LogFile

__all__ = ["home"]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["uneven", *args])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


@pytest.fixture
def listing(home: Path, tmp_path: Path) -> Iterator[Listing]:
    """A run that is on, with logs of two ranks."""
    found = Listing("/home/me/train.py", run_id="abc123")
    (tmp_path / "out").mkdir()
    heard = [{**HEARD[0], "out": str(tmp_path / "out")}, HEARD[1]]
    found.show(describe(heard, ["cpu", "cuda:0"], ["here", "there"], 1, 1, "rank 2 was killed: 2 ranks go on"))
    found.log.write(["uneven says hello"])
    for rank in (0, 1):
        log = LogFile(tmp_path / "out" / "logs" / f"rank-{rank}.log")
        log.write([f"line {number} of rank {rank}" for number in range(3)])
    yield found
    found.close(FINISHED)


def test_status_shows_every_rank_and_where_the_run_is(listing: Listing, call: Call, tmp_path: Path) -> None:
    code, out, err = call("status")
    assert (code, err) == (0, "")
    assert f"abc123  /home/me/train.py  pid {os.getpid()}" in out
    assert "async  epoch 2/4  step 12/100  samples 400/4,000  200 samples/s  ETA 0:18" in out
    assert "generation 1, 1 lost: rank 2 was killed: 2 ranks go on" in out
    rows = [line.split() for line in out.splitlines() if "there" in line or " here " in line]
    assert rows == [
        ["0", "cpu", "here", "75", "%", "150", "12", "3", "compute"],
        ["1", "cuda:0", "there", "25", "%", "50", "10", "-", "wait"],
    ]
    code, out, _ = call("status", "abc", "--json")
    (run,) = json.loads(out)["runs"]
    assert (run["id"], run["state"], run["pid"], run["slot"]) == ("abc123", "live", os.getpid(), 12)
    assert (run["out"], run["eta_s"], len(run["ranks"])) == (str(tmp_path / "out"), 18.0, 2)


def test_status_of_ended_runs_and_of_none(home: Path, call: Call) -> None:
    assert call("status")[:2] == (0, "no run of yours is on here; uneven status --all shows ended ones\n")
    assert json.loads(call("status", "--json")[1]) == {"runs": []}
    Listing("/home/me/train.py", run_id="abc123").close(STOPPED, samples=1234)
    code, out, _ = call("status", "--all")
    assert code == 0
    assert out.splitlines()[1].split()[:2] == ["abc123", "train.py"]
    assert "stopped" in out
    assert "1,234" in out
    (run,) = json.loads(call("status", "last", "--json")[1])["runs"]
    assert (run["state"], run["eta_s"]) == ("stopped", None)
    assert call("status", "abc", "--watch")[0] == 0, "it ends with the run that is meant"
    code, out, err = call("status", "zzz")
    assert (code, out) == (2, "")
    assert "run 'zzz': there is no such run; known is abc123 (train.py, ended)" in err
    assert call("status", "--watch", "--json")[0] == 2


@pytest.mark.parametrize(
    "damage",
    [
        b'{"id": "x", "end": "soon"}',
        b'{"id": "x", "samples": [1]}',
        b'{"id": "x", "since": {}}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"7",
        b'{"id": "cut',
    ],
)
def test_a_damaged_line_of_the_history_is_left_out(damage: bytes, home: Path, call: Call) -> None:
    Listing("/home/me/train.py", run_id="abc123").close(STOPPED, samples=1234)
    with (known_runs.state_folder() / known_runs.NAME).open("ab") as file:
        file.write(damage + b"\n")
    Listing("/home/me/train.py", run_id="def456").close(STOPPED, samples=5678)
    for arguments in ((), ("--json",)):
        code, out, err = call("status", "--all", *arguments)
        assert (code, err) == (0, "")
        assert "abc123" in out
        assert "def456" in out
    assert call("status", "last")[0] == 0


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (80, ["rank", "device", "machine", "share", "samples/s", "step", "round", "phase"]),
        (60, ["rank", "device", "machine", "share", "samples/s", "step", "phase"]),
        (50, ["rank", "device", "machine", "share", "samples/s", "phase"]),
        (40, ["rank", "device", "share", "samples/s"]),
    ],
)
def test_in_a_narrow_terminal_columns_are_left_out_and_the_rest_is_whole(
    width: int, headings: list[str], listing: Listing, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uneven.cli.status.WIDTH", width)
    monkeypatch.setattr("uneven.cli.status._heading", lambda _: "")
    lines = [line for line in call("status")[1].splitlines() if line.strip()]
    assert lines[0].split() == headings
    assert len(lines) == 3, "no line is wrapped"
    assert not any("…" in line for line in lines)


def test_watching_into_a_file_writes_every_picture_at_once(
    listing: Listing, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def look(_: float) -> None:
        seen.append(capsys.readouterr().out)
        if len(seen) == 2:
            listing.close(FINISHED)

    monkeypatch.setattr("uneven.cli.status.time.sleep", look)
    code, out, _ = call("status", "abc123", "--watch")
    assert code == 0
    assert [text.startswith("abc123  /home/me/train.py") for text in seen] == [True, True]
    assert "finished" in out


def test_watching_ends_without_a_word_when_nobody_reads_on(
    listing: Listing, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `uneven status -w | head -1`."""
    read, write = os.pipe()
    looks: list[str] = []

    def read_once(_: float) -> None:
        looks.append(os.read(read, 6).decode())
        os.close(read)

    os.set_blocking(read, False)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("uneven.cli.status.time.sleep", read_once)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", pipe)
            code, _, err = call("status", "--watch")
        assert (code, err, looks) == (1, "", ["abc123"])


@pytest.mark.parametrize("name", ["[lr=0.1]", "[/x]", ":cat:"])
def test_status_shows_names_as_they_are(name: str, home: Path, call: Call) -> None:
    """To rich they would be markup, which it leaves out, fails at, or makes a picture of."""
    listing = Listing("/home/me/[b]train.py", run_id="abc123")
    listing.show(describe([{**HEARD[0], "out": f"/runs/{name}"}], ["cpu"], [name]))
    live = call("status")
    listing.close(FINISHED)
    ended = call("status", "--all")
    for code, out, _ in (live, ended):
        assert code == 0
        assert f"/runs/{name}" in out
        assert "[b]train.py" in out
    assert live[1].count(name) == 2, "the machine's, too"


def test_logs_are_merged_chosen_and_cut(listing: Listing, call: Call, tmp_path: Path) -> None:
    code, out, _ = call("logs")
    assert code == 0
    assert "launcher | uneven says hello\n" in out
    assert "rank 1   | line 2 of rank 1\n" in out
    assert len(out.splitlines()) == 7
    assert call("logs", "abc123", "--rank", "0", "-n", "2")[1] == "line 1 of rank 0\nline 2 of rank 0\n"
    found = json.loads(call("logs", "train.py", "--rank", "1", "--json")[1])
    first = found["lines"][0]
    assert (first["rank"], first["text"]) == (1, "line 0 of rank 1")
    check_document("logs", found)
    assert datetime.fromisoformat(first["time"])
    assert call("logs", "-t", "--rank", "1", "-n", "1")[1][10] == "T"
    code, out, err = call("logs", "--rank", "7")
    assert (code, out) == (0, ""), "it may still come"
    assert "--rank 7 has printed nothing; there is rank-0, rank-1" in err
    for args in (("--lines", "-1"), ("-f", "--json"), ("nobody",)):
        assert call("logs", *args)[0] == 2
    listing.close(FINISHED)
    assert "rank 1   | line 2 of rank 1\n" in call("logs", str(tmp_path / "out"))[1], "by the folder, when it has ended"
    code, _, err = call("logs", "last", "--rank", "7")
    assert code == 2
    assert "--rank 7 has printed nothing; there is rank-0, rank-1" in err
    Listing("other.py", run_id="other1").close(FINISHED)
    code, _, err = call("logs", "other1")
    assert code == 2
    assert "had no folder for its logs" in err


def test_logs_follow_a_run_to_its_end(listing: Listing, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([lambda: listing.log.write(["one more"]), lambda: listing.close(FINISHED)])
    monkeypatch.setattr("uneven.cli.logs.time.sleep", lambda _: next(looks)())
    code, out, _ = call("logs", "-f", "-n", "0")
    assert (code, out) == (0, "launcher | one more\n")


def test_ctrl_c_stops_following_alone(listing: Listing, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("uneven.cli.logs.time.sleep", interrupt)
    assert call("logs", "-f")[0] == 130
    assert listing.folder.exists()


def test_stop_says_where_the_state_is(listing: Listing, call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    def end(pid: int, number: int) -> None:
        if number:
            listing.saved = str(tmp_path / "out")
            threading.Thread(target=listing.close, args=(STOPPED,)).start()

    monkeypatch.setattr(os, "kill", end)
    code, out, err = call("stop", "abc", "--json")
    assert code == 0
    (one,) = json.loads(out)["stopped"]
    assert (one["id"], one["result"], one["saved"]) == ("abc123", "stopped", str(tmp_path / "out"))
    assert f"run abc123 (train.py) stopped after 12 steps; its state is in {tmp_path / 'out'}" in err
    assert call("stop", "abc")[0] == 2, "it has ended"
    assert call("stop", "--all")[::2] == (0, "uneven: no run of yours is led here\n")
    for seconds in ("0", "nan"):
        for verb in ("stop", "leave"):
            code, _, err = call(verb, "--wait", seconds)
            assert (code, err) == (2, f"uneven: --wait {seconds}: allowed are seconds above 0\n")
    assert call("stop", "abc", "--all")[0] == 2
    joined = Listing("train.py", run_id="led123", leader="pc1 (192.0.2.10)")
    code, _, err = call("stop")
    assert code == 1
    assert "run led123 is led on pc1 (192.0.2.10), and this machine only takes part" in err
    joined.close(FINISHED)


def test_stop_does_not_claim_that_nothing_was_saved_where_it_cannot_know(
    listing: Listing, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda _, number: shutil.rmtree(listing.folder) if number else None)
    code, out, err = call("stop", "abc", "--json")
    assert code == 0
    (one,) = json.loads(out)["stopped"]
    assert (one["result"], one["saved"]) == (None, None)
    assert "nothing was saved" not in err
    assert "whether it has saved is not known: this shell's history of runs (UNEVEN_HOME) has no line" in err
    assert f"look in {tmp_path / 'out'}" in err
