"""`uneven config show` and `uneven config check`: sources of every value, and all problems of a file at once."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
from typer.testing import CliRunner

from uneven.cli.app import app
from uneven.config import RunConfig, resolve, settings_of
from uneven.config.sources import conflicts_of, find_problems
from uneven.errors import InputError

SCRIPT = """
import sys
from uneven import fit
print("from the script", sys.argv[1:])
try:
    fit(model=None, optimizer=None, step=None, dataset=[0, 1], batch_size=16, epochs=2, seed=0, save_every="1 epoch")
except Exception:
    print("the script goes on")
raise RuntimeError("it must end in fit")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("UNEVEN_SEED", "7")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run.toml").write_text('epochs = 5\npolicy = "async"\nanchor = 3\nout = "runs/x"\n')
    return tmp_path


def call(line: str) -> Any:
    return CliRunner().invoke(app, line.split())


def test_show_names_the_source_of_every_value() -> None:
    done = call("config show train.py --devices cpu,cpu@0.4 --json -- --own 5")
    assert done.exit_code == 0, done.output
    assert "from the script ['--own', '5']" in done.stderr
    assert "goes on" not in done.stderr
    document = json.loads(done.stdout)
    assert (document["script"], document["file"]) == ("train.py", "run.toml")
    rows = document["settings"]
    assert list(rows) == [name for name in settings_of(RunConfig) if name in rows]
    found = {name: (row["value"], row["source"], row["where"]) for name, row in rows.items()}
    assert found["devices"] == ("cpu,cpu@0.4", "flag", "--devices")
    assert found["seed"] == (7, "environment", "UNEVEN_SEED")
    assert found["epochs"] == (5, "file", "run.toml")
    assert found["batch_size"] == (16, "script", None)
    assert found["precision"] == ("fp32", "default", None)
    assert (rows["epochs"]["script"], rows["seed"]["default"]) == (2, 0)


def test_show_prints_toml_that_means_the_same_run(folder: Path) -> None:
    done = call("config show train.py --all")
    assert done.exit_code == 0, done.output
    read = tomllib.loads(done.stdout)
    assert all(f"{name} =" in done.stdout for name in settings_of(RunConfig))
    given = {"batch_size": 16, "epochs": 5, "seed": 7, "policy": "async", "anchor": 3, "out": "runs/x"}
    assert resolve({**read, "deadline": "auto"}) == resolve({**given, "save_every": "1 epoch"})
    lines = done.stdout.splitlines()
    comments = [line.split("#")[1].split()[0] for line in lines[1:] if "  #" in line and not line.startswith("#")]
    order = ["environment", "file", "script", "default"]
    assert [order.index(word) for word in comments] == sorted(order.index(word) for word in comments)
    assert any(line.startswith("epochs = 5 ") and "(the script has 2)" in line for line in lines)


def test_without_all_only_what_differs_and_the_essentials() -> None:
    done = call("config show train.py")
    read = tomllib.loads(done.stdout)
    assert set(read) == {
        *("seed", "epochs", "policy", "anchor", "out", "batch_size", "save_every"),
        "devices",
        "precision",
    }


def test_show_says_where_settings_come_from_that_do_not_go_together() -> None:
    done = call("config show train.py --policy sync")
    assert isinstance(done.exception, InputError)
    assert done.stdout == ""
    assert str(done.exception).endswith("(policy: flag --policy, anchor: file run.toml)")


def test_a_loop_by_hand_has_no_settings_and_is_not_trained(folder: Path) -> None:
    """It was, to its end."""
    (folder / "hand.py").write_text(
        "import torch\nfrom uneven import Ddp\nDdp.wrap(torch.nn.Linear(2, 2))\nprint('on')\n"
    )
    done = call("config show hand.py")
    assert isinstance(done.exception, InputError)
    assert str(done.exception) == "hand.py calls Ddp.wrap: a loop by hand passes no settings"
    assert "on" not in done.stderr.splitlines()


def test_a_script_that_never_calls_uneven_has_no_settings(folder: Path) -> None:
    (folder / "plain.py").write_text("print('plain')\n")
    done = call("config show plain.py")
    assert isinstance(done.exception, InputError)
    assert "ended without calling fit or Ddp.setup" in str(done.exception)


BAD = """# what is wrong here
epohcs = 5
policy = "asink"
batch_size = 0
lr = 0.1
devices = "cup,cpu"
anchor = 300
max_anchor = 20
overwrite = true
memory_cap = [
  1, 2,
]
[hosts]
a = 1
"""


def test_check_finds_every_problem_with_its_line(folder: Path) -> None:
    (folder / "bad.toml").write_text(BAD)
    done = call("config check bad.toml")
    assert (str(done.exception), done.stdout) == ("bad.toml has 7 problems", "")
    assert isinstance(done.exception, InputError)
    lines = done.stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"bad.toml:{number}" for number in (2, 3, 4, 5, 6, 7, 13, 9)]
    said = "\n".join(lines)
    for phrase in (
        "unknown setting 'epohcs'; did you mean 'epochs'?",
        "policy='asink' must be one of sync, balanced, cadence, async",
        "batch_size=0 must be a whole number of at least 1",
        "unknown setting 'lr': it belongs to the optimizer",
        "device 'cup'",
        "anchor=300 is above max_anchor=20",
        "[hosts] is a table",
        "bad.toml:9: note: unless the script settles it: overwrite=True without out",
    ):
        assert phrase in said


def test_check_as_json_has_the_problems_too(folder: Path) -> None:
    (folder / "bad.toml").write_text("epochs = 3\nepocs = 3\n")
    done = call("config check bad.toml --json")
    assert isinstance(done.exception, InputError)
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem == {"line": 2, "key": "epocs", "message": "unknown setting 'epocs'; did you mean 'epochs'?"}


def test_a_file_that_is_right(folder: Path) -> None:
    done = call("config check")
    assert (done.exit_code, done.stdout) == (0, "run.toml: 4 settings, all is well\n")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("epochs = 1\nseed = \n", 2, "Invalid value"),
        ("epochs = 1\nepochs = 2\n", 2, "Cannot overwrite"),
        ("epochs = 1\nnum_epochs = 2\n", 2, "one setting under two names"),
        ('policy = "sync"\n\nanchor = 4\n', 3, "with policy='sync'"),
        ('strategy = "fsdp"\nprecision = "fp16"\n', 2, "with strategy='fsdp'"),
    ],
)
def test_single_problems(folder: Path, text: str, line: int, words: str) -> None:
    (folder / "one.toml").write_text(text)
    (problem,) = find_problems(folder / "one.toml").problems
    assert problem.line == line
    assert words in problem.message


def test_what_the_script_may_settle_is_a_note(folder: Path) -> None:
    (folder / "one.toml").write_text("anchor = 4\nkeep_last = 2\n")
    found = find_problems(folder / "one.toml")
    assert found.problems == []
    assert [note.key for note in found.notes] == ["keep_last"]  # some policy takes an anchor


def test_conflicts_are_all_found() -> None:
    settings = {"policy": "balanced", "anchor": 4, "max_global_batch_size": 64, "resume": "a", "replay": "b"}
    assert [name for name, _ in conflicts_of(settings)] == ["anchor", "max_global_batch_size", "resume"]


def test_a_file_that_is_not_there() -> None:
    done = call("config check absent.toml")
    assert isinstance(done.exception, InputError)
    assert "absent.toml: No such file" in str(done.exception)
