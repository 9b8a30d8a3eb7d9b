"""A fake of the driver's `nvidia-cuda-mps-control`, first on PATH, for machines without a GPU.

It takes `-d` and `quit` as the true one does, is a daemon with a server below it, and keeps a record of what it was
asked. FAKE_MPS makes it fail, never listen, or refuse to end.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from uneven.hardware.mps_supervisor import CONTROL, PARENT_FOLDERS, processes_of

PROGRAM = """
import json, os, signal, sys
from pathlib import Path

how = os.environ.get("FAKE_MPS", "")
pipe, log = (Path(os.environ[f"CUDA_MPS_{name}_DIRECTORY"]) for name in ("PIPE", "LOG"))
pids = pipe / "nvidia-cuda-mps-control.pid"

def record(**facts):
    with (Path(__file__).parent / "record").open("a") as file:
        file.write(json.dumps(facts) + "\\n")

def serve():
    server = os.fork()
    if server == 0:
        if how == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()

    def end(*_):
        os.kill(server, signal.SIGKILL)
        os.wait()
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "stubborn" else end)
    pids.write_text(f"{os.getpid()} {server}")
    (log / "control.log").write_text("[Control] Starting\\n")
    (pipe / "control").touch()
    while True:
        signal.pause()

if sys.argv[1:] == ["-d"]:
    record(asked="-d", environ=dict(os.environ))
    if how == "failing":
        (log / "control.log").write_text("[Control] Starting\\n[Control] no GPU will have us\\n\\n")
        sys.exit(3)
    if how != "deaf" and os.fork() == 0:
        serve()
else:
    word = sys.stdin.readline().strip()
    record(asked=word)
    if how == "stubborn":
        signal.pause()
    if word == "quit" and pids.exists():
        os.kill(int(pids.read_text().split()[0]), signal.SIGTERM)
"""


class FakeMps:
    """Installs the fake program; reports the requests it got and what is left of its daemons."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._record = folder / "record"
        program = folder / CONTROL
        program.write_text(f"#!{sys.executable} -IS\n{PROGRAM}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def starts(self) -> list[dict[str, str]]:
        """The environment of every daemon that was started."""
        return [call["environ"] for call in self._read() if call["asked"] == "-d"]

    def homes(self) -> list[Path]:
        return [Path(environ["CUDA_MPS_PIPE_DIRECTORY"]).parent for environ in self.starts()]

    def quits(self) -> int:
        return sum(call["asked"] == "quit" for call in self._read())

    def _read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._record.read_text().splitlines()] if self._record.exists() else []

    def left(self) -> list[Any]:
        """Processes and folders of all daemons that were started."""
        homes = self.homes()
        return [*(pid for home in homes for pid in processes_of(home)), *(home for home in homes if home.exists())]

    def all_gone(self, *, within_s: float = 100.0) -> None:
        """Wait until all daemons have ended."""
        end_s = time.monotonic() + within_s
        while left := self.left():
            assert time.monotonic() < end_s, f"left behind: {left}"
            time.sleep(0.02)

    def end(self) -> None:
        """Kill the daemons that a failed test has left."""
        for pid in (pid for home in self.homes() for pid in processes_of(home)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def fake_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    folder = tmp_path / "driver"
    folder.mkdir()
    fake = FakeMps(folder, monkeypatch)
    yield fake
    fake.end()


def folders_of(launcher: int) -> list[Path]:
    return [folder for place in PARENT_FOLDERS for folder in place.glob(f"uneven-mps-{launcher}-*")]
