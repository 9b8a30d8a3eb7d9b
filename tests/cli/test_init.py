"""The command line of `uneven init`: what it prints, and that it writes only what it says."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from uneven.cli.init import next_steps
from uneven.cli.main import app
from uneven.errors import InputError, MachineError


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_writes_what_it_lists_and_ends_with_three_lines(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", "demo"])
    assert done.exit_code == 0
    listed, _, following = done.stdout.partition("\n\nNext:\n")
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert set(listed.splitlines()) == written
    first, second, third = following.splitlines()
    assert "cd demo && make test" in first
    assert "uneven run train.py" in second
    assert "--devices cpu,cpu@0.4" in third


def test_a_dry_run_lists_the_same_and_writes_nothing(tmp_path: Path) -> None:
    dry = CliRunner().invoke(app, ["init", "demo", "--template", "text", "--dry-run", "--json"])
    assert list(tmp_path.iterdir()) == []
    wet = CliRunner().invoke(app, ["init", "demo", "--template", "text", "--json"])
    planned, made = json.loads(dry.stdout), json.loads(wet.stdout)
    assert (planned.pop("written"), made.pop("written")) == (False, True)
    assert planned == made
    assert {"text.txt", "train.py", "tests/test_train.py"} <= set(made["files"])
    assert made["template"] == "text"
    assert made["folder"] == str(tmp_path / "demo")
    assert all((tmp_path / "demo" / name).is_file() for name in made["files"])


def test_a_second_time_is_refused_and_forced_it_restores_its_own_files(tmp_path: Path) -> None:
    CliRunner().invoke(app, ["init", "demo"])
    (tmp_path / "demo" / "train.py").write_text("mine")
    again = CliRunner().invoke(app, ["init", "demo"])
    assert isinstance(again.exception, InputError)
    assert "train.py" in str(again.exception)
    assert again.stdout == ""
    assert (tmp_path / "demo" / "train.py").read_text() == "mine"
    assert CliRunner().invoke(app, ["init", "demo", "--force"]).exit_code == 0
    assert "LeNet" in (tmp_path / "demo" / "train.py").read_text()


def test_what_cannot_be_written_is_told_before_the_first_file(tmp_path: Path) -> None:
    long = CliRunner().invoke(app, ["init", "a" * 300])
    assert isinstance(long.exception, MachineError)
    assert "the name is too long" in str(long.exception)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "tests").touch()
    assert isinstance(CliRunner().invoke(app, ["init", "demo", "--force"]).exception, InputError)
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["tests"]


def test_the_current_folder_may_be_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = CliRunner().invoke(app, ["init", ".", "--template", "plain"])
    assert done.exit_code == 0
    assert "cd " not in done.stdout
    assert 'name = "here"' in Path("pyproject.toml").read_text()


def test_without_torch_the_first_step_is_to_install_it() -> None:
    steps = next_steps(Path("my demo"), False, ("RTX 5090", "CPU with 2 cores"))
    assert [command for command, _ in steps] == ["cd 'my demo' && uneven setup", "make test", "uneven run train.py"]
    assert steps[-1][1] == "trains on RTX 5090"


def test_in_a_folder_that_was_removed_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = CliRunner().invoke(app, ["init", "demo"])
    assert isinstance(done.exception, MachineError)
    assert "cannot write to demo: the current folder is no longer there" in str(done.exception)
