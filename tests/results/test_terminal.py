"""A run goes on where nobody reads its progress any more, and its result is written."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ForkedPopen
from uneven.launch.control.rank_log import LogFile, Tee
from uneven.results.progress import Reporter

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
