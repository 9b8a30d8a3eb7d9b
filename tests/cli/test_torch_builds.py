"""`uneven torch`: what users see of their builds, and what scripts read."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.cli.terminal import CTRL_C, CTRL_D, Terminal
from tests.install.fake_builds import CPU, add_build
from uneven.cli import main as command_line
from uneven.cli.main import app
from uneven.errors import InputError, MachineError
from uneven.hardware.gpus import Gpu, GpuReport
from uneven.install import builds, source_build
from uneven.install.steps import Step

GPUS = (Gpu(0, "GTX 1060", sm="sm_61"), Gpu(1, "RTX 5060 Ti", sm="sm_120"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path))
    for place in ("cli.torch_builds", "install.advice"):
        monkeypatch.setattr(f"uneven.{place}.read_gpus", lambda: GpuReport(GPUS))


def call(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["torch", *arguments], input=given)


def called(*arguments: str) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_list_of_none_says_what_to_do(tmp_path: Path) -> None:
    result = call("list")
    assert result.exit_code == 0
    assert "(this environment)" in result.stdout
    assert "install one: uneven torch install" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_list_shows_what_each_is_and_whether_it_covers_the_gpus() -> None:
    add_build("cu126")
    add_build("cpu", CPU)
    half = add_build("half")
    (half / builds.RECORD).rename(half / builds.MARK)
    builds.activate("cu126")
    lines = call("list").stdout.splitlines()
    (row,) = [line for line in lines if line.startswith("cu126 ")]
    for part in ("2.13.0+cu126", "CUDA 12.6", "50 60 70", "6.5 GB", "no: not sm_120", "active"):
        assert part in row
    assert any(line.startswith("half: interrupted") for line in lines)
    document = called("list")
    assert (document["active"], document["unfinished"]) == ("cu126", ["half"])
    assert document["current"]
    cpu, cuda = document["builds"]
    assert (cpu["name"], cpu["covers"], cpu["is_active"]) == ("cpu", False, False)
    assert (cuda["support"], cuda["is_active"]) == ({"sm_61": "OK", "sm_120": "MISSING"}, True)


def test_activate_and_back() -> None:
    add_build("cu126")
    result = call("activate", "cu126")
    assert "cu126 is active" in result.stdout
    assert "bin/activate" in result.stdout
    assert builds.active_name() == "cu126"
    assert called("activate", "--none") == {"active": None}
    assert builds.active_name() is None
    for wrong in ((), ("cu126", "--none"), ("cu999",)):
        assert isinstance(call("activate", *wrong).exception, InputError)


def test_remove_asks_first() -> None:
    folder = add_build("cu126")
    refused = call("remove", "cu126", given="n\n")
    assert (refused.exit_code, folder.exists()) == (1, True)
    nobody = call("remove", "cu126", given="")
    assert "add -y" in str(nobody.exception)
    assert folder.exists()
    builds.activate("cu126")
    assert "is the active build" in str(call("remove", "cu126", "-y").exception)
    assert call("remove", "cu126", "--force", given="y\n").exit_code == 0
    assert not folder.exists()
    assert (add_build("cpu"), called("remove", "cpu", "-y")) == (folder.with_name("cpu"), {"removed": "cpu"})


@pytest.mark.parametrize(("key", "code"), [(CTRL_C, 130), (CTRL_D, 2), ("n\n", 1)], ids=["Ctrl-C", "Ctrl-D", "no"])
@pytest.mark.parametrize("line", ["remove cu126", "install cpu"])
def test_what_is_answered_to_a_question_is_the_exit_code(
    line: str, key: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_build("cu126")
    monkeypatch.setattr(sys, "argv", ["uneven", "torch", *line.split()])
    monkeypatch.setattr(sys, "stdin", Terminal(key))
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert ("nobody answered: add -y" in err) == (key == CTRL_D)
    assert out == ""  # with --json that is for the document alone
    assert [build.name for build in builds.list_builds()] == ["cu126"]


def test_an_answer_that_is_neither_is_asked_for_again() -> None:
    folder = add_build("cu126")
    result = call("remove", "cu126", given="perhaps\ny\n")
    assert (result.exit_code, folder.exists()) == (0, False)
    assert result.stderr.count("[y/N]") == 2


def test_lines_to_be_copied_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path / "my builds"))
    folder = add_build("cu126")
    assert f"source '{folder}/bin/activate'" in call("activate", "cu126").stdout
    assert f"'{folder}/bin/python' -m pip install" in call("activate", "cu126").stdout


def test_a_home_that_is_no_folder_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNEVEN_HOME", "/dev/null")
    result = call("activate", "--none")
    assert isinstance(result.exception, MachineError)
    assert "cannot write to /dev/null/torch: a part of the path is a file" in str(result.exception)


def test_install_shows_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    document = called("install", "cu126", "--dry-run")
    assert (document["name"], document["source"]) == ("cu126", "torch>=2.8,<2.15 of cu126")
    assert len(document["commands"]) == 3
    text = call("install", "cu126", "--dry-run").stdout
    assert "nothing was done" in text
    assert call("install", "cpu", given="n\n").exit_code == 1
    assert "uneven torch build --archs '6.1;12.0'" in str(call("install").exception)
    assert list(tmp_path.iterdir()) == []


def test_install_makes_activates_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(plan: Any, say: Any) -> builds.Build:
        add_build(plan.name, CPU)
        say("Successfully installed torch")
        return builds.find_build(plan.name)

    monkeypatch.setattr("uneven.install.builds.make_build", make)
    result = call("install", "cpu", "-y")
    assert "use it: uneven torch activate cpu" in result.stdout
    assert "Successfully" in result.stderr
    assert builds.active_name() is None
    assert called("install", "cpu", "--name", "second", "--activate", "-y")["is_active"] is True
    assert "is there" in str(call("install", "cpu", "-y").exception)


def test_a_dry_run_of_a_source_build_shows_every_step(tmp_path: Path) -> None:
    text = call("build", "--archs", "6.1;12.0", "--jobs", "6", "--dry-run").stdout
    for part in (
        "torch 2.13.0 for 6.1;12.0 as build sm61-sm120",
        "hours with 6 jobs, about 35 GB of disk",
        "TORCH_CUDA_ARCH_LIST='6.1;12.0'",
        "MAX_JOBS=6",
        "refs/tags/v2.13.0",
        "log: ",
        "nothing was done",
    ):
        assert part in text
    document = called("build", "--torch", "2.9.1", "--dry-run")  # of the GPUs that are here
    assert (document["archs"], document["torch"]) == ("6.1;12.0", "2.9.1")
    assert len(document["commands"]) == 9
    assert list(tmp_path.iterdir()) == []


def test_a_source_build_that_fails_or_is_stopped_is_continued_by_the_same_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_build, "_missing", lambda *_: ())
    monkeypatch.setattr(source_build, "_steps", lambda *_: (Step(("false",)),))
    result = call("build", "--archs", "6.1;12.0", "--jobs", "2")
    assert isinstance(result.exception, MachineError)
    assert "exit code 1" in str(result.exception)
    assert result.stdout == ""

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(source_build, "run_step", stopped)
    result = call("build", "--archs", "6.1;12.0")
    assert result.exit_code == 130
    assert "the same command goes on" in result.stderr


def test_what_is_missing_for_a_source_build_is_told_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_build, "find_toolkits", dict)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = call("build", "--archs", "6.1;12.0")
    assert isinstance(result.exception, MachineError)
    for part in ("nvcc", "git", "gcc"):
        assert part in str(result.exception)
    assert list(tmp_path.iterdir()) == []
