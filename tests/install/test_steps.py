"""The commands that install, and how one is run: its output, its failure, and that it never goes on without us."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from uneven.errors import MachineError, Terminated
from uneven.install.steps import INDEX, Step, environment_step, install_step, run_step

PYTHON = Path("/env/bin/python")


def shell(script: str, **environment: str) -> Step:
    return Step(("sh", "-c", script), environment)


def test_pip_where_there_is_no_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    command = install_step(PYTHON, ["torch>=2.9"], "cu130").command
    assert command[:4] == (str(PYTHON), "-m", "pip", "install")
    assert command[-3:] == ("torch>=2.9", "--index-url", f"{INDEX}cu130")
    assert install_step(PYTHON, ["torch"], "cu130", "https://mirror").command[-1] == "https://mirror"
    assert "--force-reinstall" in install_step(PYTHON, ["torch"], reinstall=True).command
    assert "--index-url" not in install_step(PYTHON, ["uneven"]).command
    assert environment_step(Path("/env")).command == (sys.executable, "-m", "venv", "/env")


def test_uv_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    start = (str(uv), "pip", "install", "--python", str(PYTHON))
    again = ("--reinstall-package", "torch")
    step = install_step(PYTHON, ["torch"], "cu126", reinstall=True)
    assert step.command == (*start, *again, "--torch-backend", "cu126", "torch")
    mirror = install_step(PYTHON, ["torch"], "cu126", "https://mirror")
    assert mirror.command == (*start, "torch", "--index-url", "https://mirror")
    assert "--allow-existing" in environment_step(tmp_path).command


def test_output_comes_line_by_line_and_a_failure_shows_its_end(tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "log"
    run_step(shell("echo one; echo $WHAT", WHAT="two"), lines.append, log)
    assert lines == ["one", "two"]
    with pytest.raises(MachineError, match=r"(?s)exit code 7.*no such wheel"):
        run_step(shell("echo no such wheel; exit 7"), lines.append, log, every_s=3600.0)
    assert log.read_text() == "one\ntwo\nno such wheel\n"
    assert lines == ["one", "two"]
    with pytest.raises(MachineError, match="cannot start /nowhere/pip"):
        run_step(Step(("/nowhere/pip",)), lines.append)
    with pytest.raises(MachineError, match="out of memory"):
        run_step(shell("kill -KILL $$"), lines.append)


def test_environment_and_path_reach_the_command_and_are_shown_as_typed(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho "archs $ARCHS"\n')
    tool.chmod(0o755)
    step = Step(("sh", "-c", "tool 'a b'"), {"ARCHS": "6.1;12.0"}, (str(tmp_path),))
    lines: list[str] = []
    run_step(step, lines.append)
    assert lines == ["archs 6.1;12.0"]
    assert step.line.startswith(f"PATH={tmp_path}:$PATH ARCHS='6.1;12.0' sh -c ")


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_stopped_it_ends_its_children(number: int, raised: type[BaseException]) -> None:
    """The child says its number, so that it is there when the signal comes."""
    children: list[int] = []

    def say(line: str) -> None:
        children.append(int(line))
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(raised):
        run_step(shell("(trap '' TERM; exec sleep 600) & echo $!; wait"), say)
    assert signal.getsignal(signal.SIGTERM) is before
    with suppress(psutil.NoSuchProcess):
        psutil.Process(children[0]).wait(60)  # it ignores SIGTERM, and is ended none the less
