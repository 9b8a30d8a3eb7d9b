"""Every template is generated and run: its own test, and its script by `uneven run` with its run.toml."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_forked
from uneven.cli.init import TEMPLATE_HELP
from uneven.config.sources import find_run_file, from_outside, resolve_sources
from uneven.templates.machine import read_machine
from uneven.templates.project import TEMPLATES, make_files, write_project

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(params=TEMPLATES)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_project(tmp_path / "demo", make_files("demo", request.param, read_machine()))
    return tmp_path / "demo"


def template_of(project: Path) -> str:
    return next(name for name in TEMPLATES if f"--template {name}" in (project / "README.md").read_text())


def test_its_own_test_passes_and_its_script_trains_by_its_run_file(project: Path) -> None:
    done = run_forked([sys.executable, "-m", "unittest", "discover", "tests"], cwd=project)
    assert done.returncode == 0, done.stderr
    assert "Ran 2 tests" in done.stderr
    assert not (project / "runs").exists()
    if template_of(project) == "text":
        return  # its test calls all that its script does, and it is the slowest
    # The loop of one's own on two processes: it is the one whose script is written for that.
    devices = ["--devices", "cpu,cpu@0.4"] if template_of(project) == "own-loop" else []
    done = run_forked([sys.executable, "-m", "uneven", "run", "train.py", "--max-steps", "3", *devices], cwd=project)
    assert done.returncode == 0, done.stderr
    assert "out=runs/demo (run.toml)" in done.stderr
    assert len(done.stdout.splitlines()[-1]) > 10  # one process alone has printed the result
    state = json.loads((project / "runs" / "demo" / "state.json").read_text())
    assert (state["slot"], state["config"]["policy"], state["config"]["max_steps"]) == (3, "balanced", 3)
    assert {"accuracy", "loss"} & set(state["history"][-1])  # it was evaluated


def test_the_files_that_the_readme_names_are_there_and_read_well(project: Path) -> None:
    names = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    expected = {"train.py", "run.toml", "README.md", "tests/test_train.py", "Makefile", "Dockerfile", ".gitignore"}
    assert expected <= names
    readme = (project / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in expected - {".gitignore", "README.md"})
    for name in names:
        text = (project / name).read_text()
        assert "{{" not in text, name
        assert text.isascii(), name
        assert all(len(line) <= 160 for line in text.splitlines()), name
    assert (project / "train.py").read_text().count("\n") <= 80


def test_the_run_file_is_one_that_uneven_run_reads(project: Path) -> None:
    found = from_outside(resolve_sources(file=find_run_file(project / "train.py")))
    assert found == {"devices": "auto", "policy": "balanced", "out": "runs/demo"}
    # What is commented out can be used, too.
    text = (project / "run.toml").read_text()
    lines = [
        line[2:] if line[:2] == "# " and " = " in line and line[2].islower() else line for line in text.splitlines()
    ]
    (project / "run.toml").write_text("\n".join(lines))
    assert len(resolve_all(project)) == 8


def resolve_all(project: Path) -> dict[str, object]:
    return from_outside(resolve_sources(file=project / "run.toml"))


def test_the_help_names_every_template() -> None:
    assert all(name in TEMPLATE_HELP for name in TEMPLATES)


def test_make_works_with_a_python_in_a_folder_with_a_space(tmp_path: Path) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    write_project(tmp_path / "demo", make_files("demo", "vision", read_machine()))
    python = tmp_path / "my env" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho called: "$@"\n')
    python.chmod(0o755)
    command = [make, f"PYTHON={python}", "train", "test"]
    done = subprocess.run(command, cwd=tmp_path / "demo", capture_output=True, text=True, check=True)
    assert "called: -m uneven run train.py" in done.stdout
    assert "called: -m unittest discover tests" in done.stdout


@pytest.mark.soak
def test_in_a_fresh_environment_make_test_and_run_succeed(project: Path) -> None:
    """As a newcomer types it, with a Python that has uneven by way of its own environment; `make` finds it."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    environment = project / ".venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"{ROOT}[torch]"], check=True)
    path = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(project)}
    subprocess.run([make, "test"], cwd=project, env=path, check=True)
    subprocess.run([python.parent / "uneven", "run", "train.py"], cwd=project, env=path, check=True)
    assert (project / "runs" / "demo" / "state.json").is_file()
