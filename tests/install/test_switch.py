"""The command line goes on in the active build's environment: when, how, and when not."""

import os
import re
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tests.forked import RealPopen
from tests.install.fake_builds import add_build
from uneven.cli import main as command_line
from uneven.errors import InputError, MachineError
from uneven.install import builds
from uneven.install.switch import VERBS, command_in_build

RUN = ["run", "train.py", "--", "--help"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path))


def switched(arguments: list[str], loaded: tuple[str, ...] = (), **environ: str) -> list[str] | None:
    found = command_in_build(arguments, environ, loaded)
    return None if found is None else found[0]


def test_only_where_the_user_asked_for_it() -> None:
    folder = add_build("cu126")
    assert switched(RUN) is None
    there = [str(folder / "bin" / "python"), str(folder / "bin" / "uneven"), *RUN]
    assert switched(RUN, UNEVEN_TORCH="cu126") == there
    builds.activate("cu126")
    assert switched(RUN) == there
    assert command_in_build(RUN, {}, ())[1] == "uneven: runs with torch build cu126 (uneven torch activate)"  # type: ignore[index]
    said = command_in_build(RUN, {"UNEVEN_TORCH": "cu126"}, ())[1]  # type: ignore[index]
    assert said == "uneven: runs with torch build cu126 (UNEVEN_TORCH)"


def test_when_not(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_build("cu126")
    builds.activate("cu126")
    assert switched(RUN, UNEVEN_TORCH="none") is None
    assert switched(RUN, loaded=("torch",)) is None
    for others in (["torch", "list"], ["setup"], ["--help"], ["run", "--help"], [], ["--version"], ["data", "list"]):
        assert switched(others) is None
    monkeypatch.setattr(sys, "prefix", str(folder))
    assert switched(RUN) is None  # it runs there already: no endless chain


def test_a_build_that_is_not_there_is_told() -> None:
    folder = add_build("cu126")
    builds.activate("cu126")
    with pytest.raises(InputError, match="no torch build 'cu128': there is cu126"):
        switched(RUN, UNEVEN_TORCH="cu128")
    (folder / "bin" / "uneven").unlink()
    with pytest.raises(MachineError, match="is broken"):
        switched(RUN)
    (folder / builds.RECORD).unlink()
    with pytest.raises(MachineError, match=r"'cu126' is active, but it is not there any more.*activate --none"):
        switched(RUN)


def test_the_verbs_that_switch_are_verbs() -> None:
    there: dict[str, object] = get_command(command_line.app).commands  # type: ignore[attr-defined]
    assert set(VERBS) - {"plan"} <= there.keys()


def test_the_command_itself_goes_on_in_the_build(tmp_path: Path) -> None:
    """A process started for real: in one that was forked torch is loaded, which is a reason to stay."""
    folder = add_build("cu126", python='echo "$@"; exit 7')
    environ = {**os.environ, "UNEVEN_TORCH": "cu126", "UNEVEN_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "uneven", "devices", "--json"]
    with RealPopen(command, env=environ, stdout=-1, stderr=-1, text=True) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, f"{folder}/bin/uneven devices --json\n")
    assert err == "uneven: runs with torch build cu126 (UNEVEN_TORCH)\n"


def test_the_docs_name_every_verb_that_switches() -> None:
    text = (Path(__file__).parents[2] / "docs" / "torch-builds.md").read_text()
    (sentence,) = [part for part in text.split("\n\n") if "start themselves again" in part]
    named = re.findall(r"`(?:uneven )?(\w+)`", sentence)
    assert sorted(named) == sorted(VERBS)
