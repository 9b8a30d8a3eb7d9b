"""--json of every verb: it exists, its type is known and documented, and real outputs are as the type says."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import pytest
from typer.testing import CliRunner

from tests.bench.folders import make_run
from tests.cli.documents import JSON_PAGE, check_document
from tests.cli.examples import COMMANDS, SCRIPT
from tests.results.checkpoints import write_checkpoint
from uneven.cli.app import app
from uneven.files import ABSENT, json_text

ROOT = Path(__file__).parents[2]
VERBS = [" ".join(name) for name, command in COMMANDS.items() if not hasattr(command, "commands")]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_the_option_and_a_type(verb: str) -> None:
    flags = [flag for param in COMMANDS[tuple(verb.split())].params for flag in param.opts]
    assert "--json" in flags
    assert verb in JSON_PAGE.DOCUMENTS, "add it in tools/json_page.py, then: python tools/json_page.py docs/json.md"


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    assert page == JSON_PAGE.make_page(), "make it again: python tools/json_page.py docs/json.md"


class Inner(TypedDict, total=False):
    d: bool


@dataclass
class Outer:
    a: int  # how many
    c: list[Inner]
    e: dict[str, float]
    from_: str | None
    b: str | None = field(default=None, metadata=ABSENT)


def test_what_is_not_as_its_type_says_is_found() -> None:
    def faults(kind: Any, value: Any) -> int:
        return len(list(JSON_PAGE.mismatches(kind, value)))

    right = Outer(1, [{}, {"d": False}], {"x": 1.5, "y": float("nan")}, None)
    assert json.loads(json_text(right)) == {"a": 1, "c": [{}, {"d": False}], "e": {"x": 1.5, "y": None}, "from": None}
    assert faults(Outer, json.loads(json_text(right))) == 0
    assert faults(Outer, {"a": True, "b": 1, "c": [{"d": 1}], "e": {"x": "1"}, "f": 0}) == 6  # and from is not there
    assert faults(Outer, []) == 1
    assert faults(Outer | Inner, {"d": True}) == 0
    assert faults(list[Inner], [{"d": True}]) == 0


def test_the_page_has_the_keys_types_and_comments_of_a_document() -> None:
    assert list(JSON_PAGE.rows(Outer)) == [
        ("a", "whole", "how many"),
        ("c[].d", "bool, may be absent", ""),
        ("e.*", "number", ""),
        ("from", "text or null", ""),
        ("b", "text, may be absent", ""),
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("UNEVEN_DATA", str(tmp_path / "data"))
    (tmp_path / "train.py").write_text(f"{SCRIPT}    print('printed by the script')\n")
    (tmp_path / "wrong.toml").write_text("epochs = 1\nepcohs = 1\n")
    return tmp_path


def document_of(line: str) -> Any:
    return json.loads(CliRunner().invoke(app, [*line.split(), "--json"]).stdout)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "line",
    [
        *("devices", "devices cpu,cpu@0.4", "diagnose", "preflight", "data list", "data get mnist-mini", "bench list"),
        *("config check wrong.toml", "bench sweep --models lenet --modes solo-0 --dry-run"),
    ],
)
def test_outputs(line: str) -> None:
    check_document(next(verb for verb in VERBS if f"{line} ".startswith(f"{verb} ")), document_of(line))


def test_outputs_about_states_and_runs(folder: Path) -> None:
    for name in ("a", "b"):
        write_checkpoint(folder / name / "step-4")
        make_run(folder / f"runs-{name}", "lenet", "solo-0", 0, 0.97)
    check_document("state show", document_of("state show a"))
    check_document("state diff", document_of("state diff a b"))
    check_document("state export", document_of("state export a --to model.pt"))
    check_document("bench report", document_of("bench report runs-a"))
    check_document("bench check", document_of("bench check runs-a"))


def test_run_prints_its_results_and_nothing_of_the_script(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(
        app, ["run", "train.py", "--devices", "cpu", "--epochs", "1", "--progress", "off", "--json"]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    check_document("run", document)
    (result,) = document["runs"]
    assert (result["samples"], result["epochs"], result["finished"], result["devices"]) == (64, 1, True, "cpu")
    assert "train_loss" in result["metrics"]
    assert "printed by the script" in done.stderr + capfd.readouterr().err


@pytest.mark.soak
def test_run_prints_the_results_of_its_ranks(folder: Path) -> None:
    line = [sys.executable, "-m", "uneven", "run", "train.py", "--devices", "cpu,cpu@0.4", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    check_document("run", json.loads(done.stdout))
    assert sum(json.loads(done.stdout)["runs"][0]["rank_samples"]) == 128
    assert done.stderr.count("printed by the script") == 2


def test_what_failed_has_no_document(folder: Path) -> None:
    for line in ("run absent.py", "run train.py --policy fast", "state show absent", "config show absent.py"):
        done = CliRunner().invoke(app, [*line.split(), "--json"])
        assert (done.stdout, done.exit_code) != ("", 0)
        assert done.stdout == ""


def test_config_show(folder: Path) -> None:
    (folder / "run.toml").write_text("epochs = 1\n")
    check_document("config show", document_of("config show train.py --devices cpu"))
