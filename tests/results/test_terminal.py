"""A run goes on where nobody reads its progress any more. Where somebody does, lines stand above the bars."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ForkedPopen
from tests.results.screen import Screen
from uneven.launch.control.listing import Listing
from uneven.launch.control.rank_log import LogFile, Tee, begin_log
from uneven.results.progress import Reporter
from uneven.results.terminal import SharedTerminal, share

SCRIPT = """
import sys
import torch
from uneven import fit

x = torch.randn(64, 4)
fit(
    model=lambda: torch.nn.Linear(4, 1),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    step=lambda model, batch: model(batch[0]).square().mean(),
    dataset=torch.utils.data.TensorDataset(x),
    batch_size=8, epochs=2, devices=sys.argv[1], out=sys.argv[2],
)
print("the script went on")
"""


class Gone(io.StringIO):
    """A terminal that is not there any more."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise OSError(self.error, os.strerror(self.error))


def test_a_run_whose_stderr_is_a_closed_pipe_trains_to_its_end_and_saves(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(script), "cpu,cpu", str(tmp_path / "run")]
    try:
        with ForkedPopen(command, stdout=subprocess.PIPE, stderr=writing, text=True, cwd=tmp_path) as process:
            stdout, _ = process.communicate(timeout=200)
    finally:
        os.close(writing)
    assert process.returncode == 0
    assert stdout == "the script went on\n"
    assert (tmp_path / "run" / "state.safetensors").is_file()


@pytest.mark.parametrize("style", ["lines", "bar"])
@pytest.mark.parametrize("error", [errno.EPIPE, errno.EIO])
def test_lines_and_bars_that_cannot_be_written_are_left_out(
    monkeypatch: pytest.MonkeyPatch, style: str, error: int
) -> None:
    monkeypatch.setattr(sys, "stderr", Gone(error))
    kept: list[str] = []
    reporter = Reporter(style)
    reporter.keep_in(kept.extend)
    heartbeat: dict[str, Any] = {"own": 3, "device": "cpu", "phase": "compute", "slot": 1, "total": 10, "epochs": 1}
    reporter.ranks([{**heartbeat, "seconds": 1.0, "loss": 0.5, "rounds": {}}])
    reporter.say(["a line"])
    reporter.close()
    assert kept == ["a line"]


def test_a_line_that_the_terminal_does_not_take_is_in_the_log(tmp_path: Path) -> None:
    tee = Tee(Gone(errno.EPIPE), LogFile(tmp_path / "rank-0.log"))
    with pytest.raises(BrokenPipeError):
        tee.write("one line\n")
    assert "one line" in (tmp_path / "rank-0.log").read_text()


def use_screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal of 100 columns, in the place of both standard streams. Not a fixture: pytest has its own in a test."""
    for name, value in (("COLUMNS", "100"), ("LINES", "40"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    found = Screen()
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setattr(sys, "stderr", found)
    return found


def heartbeats(own: int) -> list[dict[str, Any]]:
    plain = {"phase": "compute", "slot": 1, "total": 10_000, "epochs": 1, "seconds": 4.0, "loss": 0.5, "rounds": {}}
    return [{**plain, "own": own, "device": "cpu"}, {**plain, "own": own, "device": "cpu@0.4"}]


def ended_process() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_lines_of_the_launcher_and_of_other_ranks_stand_above_the_bars_that_one_rank_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = use_screen(monkeypatch)
    launcher = Reporter("lines")
    listing = Listing(folder=tmp_path, keeps=False)
    listing.attach(launcher)
    begin_log(tmp_path / "rank-0.log", tmp_path)
    drawing = Reporter("bar", "train")
    drawing.say(["before the bars"])
    drawing.ranks(heartbeats(1000))
    drawing.ranks(heartbeats(2000))
    monkeypatch.setattr(sys, "stderr", screen)  # the launcher's own
    launcher.say(["rank 1 leaves"])
    assert ["cpu" in row for row in screen.rows()[-2:]] == [True, True], "they are drawn again at once"
    other = share(screen, tmp_path)
    other.write("half a ")
    drawing.ranks(heartbeats(3000))
    other.write("line of another rank\nand the rest")
    drawing.say(["after them"])
    drawing.close()
    other.end_line()
    *lines, whole, fast, slow, rest = screen.rows()
    assert lines == ["before the bars", "rank 1 leaves", "half a line of another rank", "after them"]
    assert "60 %" in whole
    assert fast.startswith("  cpu ")
    assert slow.startswith("  cpu@0.4 ")
    assert rest == "and the rest"


def test_bars_of_a_rank_that_was_killed_are_cleared_by_the_next_line(tmp_path: Path) -> None:
    screen = Screen()
    terminal = SharedTerminal(screen, tmp_path)
    terminal.draw("one bar\nand another", 2)
    (bars,) = tmp_path.glob("bars-*")
    bars.write_text(f'[{ended_process()}, "one bar\\nand another"]')
    terminal.write("rank 0 was ended by SIGKILL\n")
    terminal.write("the others go on\n")
    assert screen.rows() == ["rank 0 was ended by SIGKILL", "the others go on"]
    assert "\x1b[?25h" in screen.getvalue(), "the cursor was hidden"


def test_the_end_of_a_run_is_below_the_bars_of_a_rank_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = use_screen(monkeypatch)
    launcher = Reporter("lines")
    launcher.share_terminal(tmp_path)
    SharedTerminal(screen, tmp_path).draw("one bar", 1)
    (bars,) = tmp_path.glob("bars-*")
    bars.write_text(f'[{ended_process()}, "one bar"]')
    launcher.leave_bars()
    print("uneven: the run has failed", file=sys.stderr)
    assert screen.rows() == ["one bar", "uneven: the run has failed"]


def test_a_terminal_whose_run_is_over_and_a_file_get_plain_text(tmp_path: Path) -> None:
    screen = Screen()
    SharedTerminal(screen, tmp_path / "gone").write("half a ")
    SharedTerminal(screen, tmp_path / "gone").write("line\n")
    assert screen.getvalue() == "half a line\n"
    plain = io.StringIO()
    assert share(plain, tmp_path) is plain
