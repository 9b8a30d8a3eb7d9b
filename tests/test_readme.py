"""What README shows is what runs: its diff is the one between the two examples, its commands exist."""

import difflib
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.forked import run_forked
from uneven.cli.main import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


SHORT = ("plain_loop.py", "same_with_uneven.py", "fit.py")  # the other ways in have tests of their own
DOCS = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_diff_is_that_of_the_two_examples_and_adds_at_most_five_lines() -> None:
    names = ("plain_loop.py", "same_with_uneven.py")
    plain, ours = ((ROOT / "examples" / name).read_text() for name in names)
    lines = list(difflib.unified_diff(plain.splitlines(), ours.splitlines(), n=0, lineterm=""))
    changes = [line for line in lines[2:] if line[0] in "+-"]
    (shown,) = blocks("diff")
    assert [line for line in shown.splitlines() if line[0] in "+-"] == changes
    assert sum(line.startswith("+") for line in changes) <= 5


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.name in SHORT else [pytest.mark.soak]) for path in EXAMPLES],
    ids=lambda path: path.name,
)
def test_every_example_runs(path: Path, tmp_path: Path) -> None:
    done = run_forked([sys.executable, path], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.88


def test_python_blocks_run() -> None:
    for block in blocks("python"):
        done = run_forked([sys.executable, "-c", block])
        assert done.returncode == 0, done.stderr


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("sh", README + DOCS) for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith("uneven ")))


@pytest.mark.parametrize("command", commands())
def test_every_command_shown_is_understood(command: str) -> None:
    """Options are checked by asking the verb for help with them given; running all would take minutes."""
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], "--help"])
    assert done.exit_code == 0, done.output
