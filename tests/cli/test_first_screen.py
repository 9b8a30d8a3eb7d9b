"""`uneven --help`: the table of verbs, which must say what the verbs say themselves, and what it costs to print it."""

import inspect
import io
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from uneven.cli import main
from uneven.cli.app import app
from uneven.cli.verbs import VERBS, Verb, all_verbs, first_screen

ROOT = Path(__file__).parents[2]
NAMES = list(all_verbs())


def test_it_is_one_screen_of_80_columns() -> None:
    lines = first_screen().splitlines()
    assert 24 <= len(lines) <= 48
    assert max(map(len, lines)) <= 80
    assert first_screen().isascii()


def test_verbs_come_in_the_order_in_which_one_needs_them() -> None:
    screen = first_screen()
    places = [screen.index(f"\n{heading}\n") for heading in ("Get ready", "Begin", "Train", "Results")]
    assert places == sorted(places)
    assert len(NAMES) == sum(len(group) for group in VERBS.values())  # none twice
    assert [screen.index(f"\n  {name} ") for name in NAMES] == sorted(screen.index(f"\n  {name} ") for name in NAMES)


@pytest.mark.parametrize("verb", all_verbs().values(), ids=NAMES)
def test_a_line_of_it_is_how_the_verbs_own_help_begins(verb: Verb) -> None:
    module, _, name = verb.place.partition(":")
    found = getattr(import_module(module), name)
    text = found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
    assert text.startswith(verb.help), f"cli/verbs.py says {verb.help!r}, the verb {text!r}"
    assert text[len(verb.help) :][:1] in (".", ",", ":", ";", ""), "it ends within a phrase"


def test_all_ways_to_ask_for_it_print_the_same() -> None:
    screen = first_screen() + "\n"
    for words, code in ((["--help"], 0), (["-h"], 0), ([], 2)):
        done = CliRunner().invoke(app, words)
        assert (done.stdout, done.exit_code) == (screen, code)
    line = [sys.executable, "-m", "uneven", "--help"]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == screen


def modules_after(*words: str) -> set[str]:
    """What is loaded when this line has been run as a user's."""
    code = (
        f"import sys; sys.argv = {['uneven', *words]!r}\n"
        "from uneven.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(*[name for name in sys.modules if name.startswith(('uneven', 'rich', 'typer', 'torch'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_it_loads_no_verb_no_typer_and_no_rich() -> None:
    cli = {"uneven.cli", "uneven.cli.main", "uneven.cli.verbs"}
    small = {"uneven.launch", "uneven.launch.standard_streams", "uneven.errors", "uneven.version"}
    assert modules_after("--help") == {"uneven", *cli, *small}


def test_a_verb_loads_no_other_verb() -> None:
    loaded = modules_after("leave", "--no-such-option")
    assert "uneven.cli.leave" in loaded
    assert not {"uneven.cli.run", "uneven.cli.bench", "uneven.cli.state", "torch"} & loaded


def test_a_pipe_that_closes_early_is_no_traceback() -> None:
    shell = f"'{sys.executable}' -m uneven --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "1")


def test_lines_of_a_paragraph_are_broken_by_the_terminal_alone() -> None:
    text = CliRunner().invoke(app, ["leave", "--help"], env={"COLUMNS": "80"}).stdout
    prose = [line.strip() for line in text.splitlines() if line.startswith(" ") and not line.startswith("  ")]
    middle = prose[prose.index(next(line for line in prose if line.startswith("They finish"))) :][:3]
    assert all(len(line) > 65 for line in middle), middle


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_a_help_is_shown_whatever_the_terminals_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "argv", ["uneven", "run", "--help"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert not ended.value.code
    shown.flush()
    assert b"--devices" in shown.buffer.getvalue()  # type: ignore[attr-defined]
