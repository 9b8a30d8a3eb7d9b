"""Environments, and the command that installs into one: pip, or uv where uv made it."""

import os
import signal
import sys
import venv
from pathlib import Path

import psutil
import pytest

from uneven.errors import MachineError, Terminated
from uneven.install.environment import Environment, current, folder_size, install, pip_command


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A virtual environment without pip, as uv makes them."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False, symlinks=True)
    return Environment(folder / "bin" / "python")


def put_uv_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    command = folder / "uv"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return str(command)


def test_a_virtual_environment(empty: Environment) -> None:
    assert empty.is_virtual
    assert not empty.is_managed
    assert not empty.is_of_uv
    assert not empty.has_pip
    assert empty.prefix == empty.python.parent.parent
    assert empty.version == sys.version.split()[0]
    assert empty.size == folder_size(empty.prefix) > 0


def test_a_virtual_one_on_a_managed_python_is_not_managed(empty: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    managed = {"prefix": "/usr", "base_prefix": "/usr", "managed": True}
    system = Environment(Path("/usr/bin/python3"))
    monkeypatch.setitem(system.__dict__, "_facts", managed)
    assert (system.is_virtual, system.is_managed) == (False, True)
    monkeypatch.setitem(system.__dict__, "_facts", {**managed, "prefix": str(empty.prefix)})
    assert (system.is_virtual, system.is_managed) == (True, False)


def test_the_environment_of_this_process() -> None:
    assert current().python == Path(sys.executable)
    assert current().prefix == Path(sys.prefix)


def test_no_python_at_all(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="does not run as a Python"):
        _ = Environment(tmp_path / "python").is_virtual


def test_pip_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "has_pip", True)
    python = Path(sys.executable)
    command = pip_command(python, ["torch>=2.9"], "https://index")
    assert command[:4] == [str(python), "-m", "pip", "install"]
    assert command[-3:] == ["torch>=2.9", "--index-url", "https://index"]
    assert "--force-reinstall" in pip_command(python, ["torch"], reinstall=True)


def test_uv_where_it_made_the_environment_or_pip_is_not_there(
    empty: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = put_uv_on_path(tmp_path, monkeypatch)
    command = pip_command(empty.python, ["torch"], "https://index", reinstall=True)
    place = ["--python", str(empty.python)]
    assert command == [
        uv,
        "pip",
        "install",
        *place,
        "--reinstall-package",
        "torch",
        "torch",
        "--index-url",
        "https://index",
    ]
    monkeypatch.setattr(Environment, "has_pip", True)
    assert pip_command(empty.python, ["torch"])[1:3] == ["-m", "pip"]
    monkeypatch.setattr(Environment, "is_of_uv", True)
    assert pip_command(empty.python, ["torch"])[0] == uv


def test_neither_pip_nor_uv(empty: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError, match=r"has no pip and uv is not on the PATH; run: .* -m ensurepip"):
        pip_command(empty.python, ["torch"])


def test_uv_signs_its_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.9.5\n")
    environment = Environment(tmp_path / "bin" / "python")
    monkeypatch.setitem(environment.__dict__, "_facts", {"prefix": str(tmp_path)})
    assert environment.is_of_uv


def test_output_comes_line_by_line_and_a_failure_shows_its_end() -> None:
    lines: list[str] = []
    install([sys.executable, "-c", "print('one'); print('two')"], lines.append)
    assert lines == ["one", "two"]
    with pytest.raises(MachineError, match=r"(?s)exit code 7.*no such wheel"):
        install([sys.executable, "-c", "import sys; sys.exit(print('no such wheel') or 7)"], lines.append)
    with pytest.raises(MachineError, match="cannot start /nowhere/pip"):
        install(["/nowhere/pip"], lines.append)


def test_sigterm_ends_the_installation_too() -> None:
    """The child says its number, so that it is there when the signal comes."""
    children: list[psutil.Process] = []

    def say(line: str) -> None:
        children.append(psutil.Process(int(line)))
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # without the mend it must not end the tests
    try:
        with pytest.raises(Terminated):
            install(["sh", "-c", "echo $$; test $$ -gt 0 && exec sleep 5"], say)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not children[0].is_running()


def test_hard_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    assert folder_size(tmp_path) == 1000
