"""What README and the pages show is what runs: the diff is that of two examples, commands and links exist."""

import difflib
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from tests.forked import run_forked
from uneven import Ddp
from uneven.cli.main import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


SHORT = ("plain_loop.py", "same_with_uneven.py", "fit.py")  # the others have tests of their own
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCS = "".join(path.read_text() for path in PAGES)
RUNNABLE = README + (ROOT / "docs" / "tutorial.md").read_text()  # python blocks elsewhere are fragments


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
    assert float(done.stdout.split()[-1]) > 0.85  # the plain loop is not seeded: 0.878 was seen


def test_a_reader_with_a_minute_sees_the_commands_one_picture_one_table_and_the_diff() -> None:
    head = README[: README.index("## A plain loop")]
    assert "make demo" in head
    assert "make test" in head
    assert len(re.findall(r"^!\[", README, flags=re.MULTILINE)) == 1
    assert len(re.findall(r"^\|---", README, flags=re.MULTILINE)) == 1


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.name)
def test_lines_are_short_enough_to_read(path: Path) -> None:
    """Tables, pictures and blocks of code excepted: they cannot be wrapped."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 160 and not line.startswith(("|", "!["))] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


@pytest.mark.parametrize("block", blocks("python", RUNNABLE), ids=lambda block: str(len(block)))
def test_python_blocks_run(block: str) -> None:
    done = run_forked([sys.executable, "-c", block])
    assert done.returncode == 0, done.stderr


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("sh", README + DOCS) for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith("uneven ")))


@pytest.mark.parametrize("command", commands())
def test_every_command_shown_is_understood(command: str) -> None:
    """Options are checked by asking the verb for help with them given; running all would take minutes."""
    words = shlex.split(command)[1:]
    end = words.index("--") if "--" in words else len(words)  # what follows -- belongs to the script
    done = CliRunner().invoke(app, [*words[:end], "--help"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("page", "place"), [("own-loop.md", 0), ("checkpoints.md", 1)])
def test_the_loops_that_other_pages_show_run(
    page: str, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes checkpoints
    block = blocks("python", (ROOT / "docs" / page).read_text())[place]
    assert "Ddp.setup" in block
    model = nn.Linear(4, 2)
    names: dict[str, object] = {"Ddp": Ddp, "F": F, "AveragedModel": AveragedModel, "model": model}
    names["train_set"] = TensorDataset(torch.randn(96, 4), torch.arange(96) % 2)
    exec(block, {**names, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
