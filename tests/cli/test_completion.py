"""`uneven completion`, and what the tab key offers: verbs, options and values, from bash as a user's shell asks."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from uneven.cli import complete
from uneven.cli.app import app
from uneven.cli.verbs import all_verbs
from uneven.config.names import POLICIES, STRATEGIES
from uneven.errors import InputError

ENTRY = "import sys; sys.argv[0] = 'uneven'; from uneven.cli.main import main; main()"


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder with the command `uneven`, as an installed package has it; tests/ may run without an install."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "uneven"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(ENTRY)} "$@"\n')
    command.chmod(0o755)
    return folder


def bash_answers(folder: Path, lines: list[str]) -> list[list[str]]:
    """What bash offers at the end of each line; '|' in one is where bash breaks a word: cpu|@|0.4."""
    script = ['eval "$(uneven completion bash)"', 'function=$(complete -p uneven | sed "s/.*-F \\([^ ]*\\).*/\\1/")']
    for line in lines:
        words = " ".join(shlex.quote(word) for part in line.split(" ") for word in part.split("|"))
        script += [f"COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMPREPLY=()"]
        script += ['$function uneven "" ""; echo "${COMPREPLY[*]}"']
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(script)], capture_output=True, text=True, check=True, env=environ
    )
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_completes_verbs_options_and_values(bin_folder: Path) -> None:
    (verbs, policies, slowed) = bash_answers(
        bin_folder, ["uneven ", "uneven run train.py --policy ", "uneven run train.py --devices cpu|@|0.4,c"]
    )
    assert verbs == list(all_verbs())
    assert policies[:4] == list(POLICIES[:4])
    assert slowed == ["0.4,cpu", "0.4,cpu@0.4"]  # bash replaces what follows the last @


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "_gpus", lambda: [0, 1])
    assert complete.devices("") == ["auto", "cuda:0", "cuda:1", "cpu", "cpu@0.4"]
    assert complete.devices("cuda:0,cu") == ["cuda:0,cuda:1"]
    assert complete.some_of(("data", "clock"))("data,") == ["data,clock"]
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
        ("uneven completion ", ["bash", "zsh", "fish"]),
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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell: str) -> None:
    done = CliRunner().invoke(app, ["completion", shell])
    assert done.exit_code == 0
    marks = {"bash": "complete -o default -F", "zsh": "compdef _uneven_completion uneven", "fish": "complete --command"}
    assert marks[shell] in done.stdout
    assert f"_UNEVEN_COMPLETE=complete_{shell}" in done.stdout
    assert json.loads(CliRunner().invoke(app, ["completion", shell, "--json"]).stdout)["script"] + "\n" == done.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_itself_reads_its_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed; test_scripts and the answers above hold its script's shape")
    script = CliRunner().invoke(app, ["completion", shell]).stdout
    subprocess.run([shell, "-n"], input=script, text=True, check=True, capture_output=True)


def test_another_shell_is_bad_input() -> None:
    done = CliRunner().invoke(app, ["completion", "tcsh"])
    assert isinstance(done.exception, InputError)
    assert str(done.exception) == "shell 'tcsh': allowed are bash, zsh, fish"


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
    from uneven.bench.models import NAMES
    from uneven.cli.data import SETS
    from uneven.data import datasets

    assert complete.MODELS == NAMES
    assert datasets.names() == SETS
