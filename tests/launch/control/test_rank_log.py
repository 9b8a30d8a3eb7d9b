"""What ranks print is kept: the tee, the files of bounded size, and their reader."""

import io
import sys
from pathlib import Path

import pytest

from uneven.files import make_out_folder
from uneven.launch.control import rank_log
from uneven.launch.control.rank_log import LogFile, Tee, begin_log, end_log, keep_logs_in, own_log, rank_file
from uneven.launch.control.read_logs import LogReader
from uneven.results.progress import Reporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def texts(reader: LogReader) -> list[str]:
    return [line.text for line in reader.read()]


def test_lines_are_kept_and_the_terminal_gets_all_as_it_was(tmp_path: Path) -> None:
    terminal, log = Terminal(), LogFile(tmp_path / "logs" / "rank-0.log")
    tee = Tee(terminal, log)
    assert not (tmp_path / "logs").exists(), "nothing was printed"
    print("a", "b", file=tee)
    tee.write("half a ")
    tee.write("line\n\x1b[31mred\x1b[0m\n 10 %\r 50 %\r100 %\n")
    tee.writelines(["no end"])
    reader = LogReader([tmp_path / "logs"])
    assert texts(reader) == ["a b", "half a line", "red", "100 %"]
    assert tee.isatty()
    assert terminal.getvalue().endswith(" 10 %\r 50 %\r100 %\nno end")
    tee.end_line()
    assert texts(reader) == ["no end"]
    reader.close()


def test_a_process_keeps_what_it_prints_and_takes_it_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert own_log() is None
    log = begin_log(None)
    print("before there is a folder")
    keep_logs_in(tmp_path / "missing", rank_file(0))
    assert log.path is None
    keep_logs_in(tmp_path, rank_file(0))
    print("to the error stream", file=sys.stderr)
    # Bars are drawn on the terminal alone, lines are kept.
    reporter = Reporter("bar")
    reporter.say(["a line beside the bars"])
    reporter.ranks([{}])
    print("printed while bars are drawn")
    reporter.close()
    print("printed after them")
    end_log("Traceback ...\nValueError: 3")
    reader = LogReader([tmp_path / "logs"])
    assert texts(reader) == [
        "before there is a folder", "to the error stream", "a line beside the bars",
        "printed while bars are drawn", "printed after them", "Traceback ...", "ValueError: 3",
    ]  # fmt: skip
    reader.close()


def test_a_full_file_is_put_aside_and_a_reader_misses_nothing(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a" / "logs" / "rank-1.log", most_bytes=100)
    (tmp_path / "a").mkdir()
    reader = LogReader([tmp_path / "a" / "logs"])
    seen = []
    for number in range(10):
        log.write([f"line {number}"])
        seen += texts(reader)
    assert seen == [f"line {number}" for number in range(10)]
    assert {path.name for path in (tmp_path / "a" / "logs").iterdir()} == {"rank-1.log", "rank-1.log.1"}
    reader.close()


def test_a_reader_follows_a_log_that_moves_and_reads_one_that_goes_to_its_end(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a" / "logs" / "rank-1.log")
    reader = LogReader([tmp_path / "a" / "logs", tmp_path / "b" / "logs"])
    (tmp_path / "a").mkdir()
    log.write(["the first one"])
    assert texts(reader) == ["the first one"]
    (tmp_path / "b").mkdir()
    log.write(["before the move"])
    log.move(tmp_path / "b" / "logs" / "rank-1.log")
    log.write(["after the move"])
    assert texts(reader) == ["before the move", "after the move"]
    assert list((tmp_path / "a" / "logs").iterdir()) == []
    log.write(["the last one"])
    (tmp_path / "b" / "logs" / "rank-1.log").unlink()
    assert texts(reader) == ["the last one"], "a file that is gone is read to its end"
    reader.close()


def test_a_runs_folder_and_its_logs_are_for_its_user_alone(tmp_path: Path) -> None:
    """Everybody on the machine could read what a script prints."""
    make_out_folder(tmp_path / "runs" / "one")
    log = LogFile(tmp_path / "log", most_bytes=20)
    log.write(["a", "b"])
    log.move(tmp_path / "runs" / "one" / "logs" / "rank-0.log")
    log.write(["c"])
    found = {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "runs").rglob("*")}
    assert found.pop(".uneven") == 0o644 & 0o077
    assert found == {"one": 0, "logs": 0, "rank-0.log": 0, "rank-0.log.1": 0}


def test_a_log_that_cannot_be_written_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    log = LogFile(tmp_path / "logs" / "rank-0.log")
    log.write(["lost"])
    log.move(tmp_path / "logs" / "rank-1.log")


def test_ranks_and_the_launcher_are_merged_by_time_and_chosen_by_number(tmp_path: Path) -> None:
    for name, lines in (
        ("rank-0.log", "2026-01-01T00:00:01.000 one\n2026-01-01T00:00:03.000 three\nand its rest\n"),
        ("rank-1.log", "2026-01-01T00:00:02.000 two\n"),
        (rank_log.LAUNCHER, "2026-01-01T00:00:00.000 zero\n"),
    ):
        (tmp_path / name).write_text(lines)
    (tmp_path / "other.log").write_text("mine\n")
    found = LogReader([tmp_path]).read()
    assert [(line.name, line.text) for line in found] == [
        ("launcher", "zero"), ("rank 0", "one"), ("rank 1", "two"), ("rank 0", "three"), ("rank 0", "and its rest"),
    ]  # fmt: skip
    assert texts(LogReader([tmp_path], [1])) == ["two"]


def test_logs_belong_to_the_run_of_their_folder(tmp_path: Path) -> None:
    """The next run moves them aside with the rest; those of a run that left nothing else go; others' stay."""
    out = tmp_path / "a"
    make_out_folder(out)
    (out / "logs").mkdir()
    (out / "logs" / "rank-0.log").touch()
    assert make_out_folder(out) is None
    assert not (out / "logs").exists()
    (out / "logs").mkdir()
    (out / "logs" / "rank-0.log").touch()
    (out / "timeline.json").touch()
    assert make_out_folder(out) == tmp_path / "a.1"
    assert (tmp_path / "a.1" / "logs" / "rank-0.log").exists()
    (out / "logs").mkdir()
    (out / "logs" / "events.tfevents").touch()
    assert make_out_folder(out) is None
    assert (out / "logs" / "events.tfevents").exists()


def test_the_log_of_an_earlier_run_stays_in_its_folder(tmp_path: Path) -> None:
    """A script may train several times in one process, under uneven run: each run's folder has its own log."""
    first, second = tmp_path / "first" / "rank-0.log", tmp_path / "second" / "rank-0.log"
    log = LogFile(tmp_path / "private" / "rank-0.log")
    (tmp_path / "private").mkdir()
    log.write(["before all"])
    log.begin_run()
    log.write(["settings of the first"])
    log.move(first)
    log.write(["the first"])
    log.move(first)  # looked at again
    log.begin_run()
    log.write(["settings of the second"])
    log.move(second)
    log.write(["the second"])
    kept = [[line.split(" ", 1)[1] for line in path.read_text().splitlines()] for path in (first, second)]
    assert kept[0] == ["before all", "settings of the first", "the first", "settings of the second"]
    assert kept[1] == ["settings of the second", "the second"]
    second.rename(tmp_path / "aside")  # the next run writes to the same folder, and has moved what was there
    log.begin_run()
    log.move(second)
    log.write(["the third"])
    assert second.read_text().endswith("the third\n")
    assert "the second" not in second.read_text()
