"""What the tab key offers: verbs, options and values. The shells' scripts are typer's."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from uneven.cli import complete
from uneven.cli.app import app
from uneven.cli.verbs import all_verbs
from uneven.config.names import STRATEGIES


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "_gpus", lambda: [0, 1])
    assert complete.devices("") == ["auto", "cuda:0", "cuda:1", "cpu", "cpu@0.4"]
    assert complete.devices("cuda:0,cu") == ["cuda:0,cuda:1"]
    assert complete.one_of(STRATEGIES)("zero1") == ["zero1", "zero1-flat"]
    assert isinstance(complete.live_runs(""), list)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("uneven ru", ["run"]),
        ("uneven bench ef", ["efficiency"]),
        ("uneven run --pol", ["--policy"]),
        ("uneven run train.py --strategy zero1", ["zero1", "zero1-flat"]),
        ("uneven data get mnist", ["mnist-mini", "mnist"]),
        ("uneven bench run --model l", ["logistic", "lenet"]),
        ("uneven run ", []),  # a file: the shell's own
    ],
)
def test_what_is_offered(line: str, offered: list[str]) -> None:
    assert answers(line, "bash") == offered


def answers(line: str, shell: str) -> list[str]:
    words = line.split(" ")
    env = {"_UNEVEN_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    env |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return [line for line in CliRunner().invoke(app, [], env=env, prog_name="uneven").stdout.split("\n") if line]


def test_zsh_and_fish_are_answered_in_their_own_ways() -> None:
    (zsh,) = answers("uneven run train.py --policy bal", "zsh")
    assert zsh == """_arguments '*: :(("balanced"))'"""
    assert answers("uneven ru", "fish") == [f"run\t{all_verbs()['run'].help}"]


def test_completing_loads_no_torch() -> None:
    code = (
        "import os, sys; sys.argv = ['uneven']\n"
        "os.environ |= {'_UNEVEN_COMPLETE': 'complete_bash', 'COMP_WORDS': 'uneven bench run --model ', "
        "'COMP_CWORD': '4'}\n"
        "from uneven.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('LOADED', *[name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "lenet" in done.stdout
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_names_that_are_spelled_out_are_the_real_ones() -> None:
    from uneven.bench.models import LARGE, NAMES
    from uneven.cli.data import SETS
    from uneven.data import datasets

    assert complete.MODELS == NAMES + LARGE
    assert datasets.names() == SETS
