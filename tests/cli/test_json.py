"""--json of every verb: it exists, its schema is documented, and real outputs are as the schema says."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.bench.folders import make_run
from tests.cli.documents import check_document
from tests.cli.test_examples import COMMANDS, SCRIPT
from tests.results.checkpoints import write_checkpoint
from uneven.cli.app import app
from uneven.cli.schemas import SCHEMAS, example, mismatches

ROOT = Path(__file__).parents[2]
VERBS = [" ".join(name) for name, command in COMMANDS.items() if not hasattr(command, "commands")]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_the_option_and_a_schema(verb: str) -> None:
    flags = [flag for param in COMMANDS[tuple(verb.split())].params for flag in param.opts]
    assert "--json" in flags
    assert verb in SCHEMAS, (
        "describe its document in uneven/cli/schemas.py, then: python tools/json_page.py docs/json.md"
    )


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "json_page.py"))["make_page"]()
    assert (ROOT / "docs" / "json.md").read_text() == made, "make it again: python tools/json_page.py docs/json.md"


@pytest.mark.parametrize("verb", SCHEMAS)
def test_the_example_on_the_page_is_as_the_schema_says(verb: str) -> None:
    check_document(verb, example(SCHEMAS[verb]))


def test_what_is_not_as_the_schema_says_is_found() -> None:
    schema = {"a": "whole|1", "b?": "text?|", "c": [{"d": "bool|true"}], "e": {"*": "number|1"}}
    assert list(mismatches(schema, {"a": 1, "c": [], "e": {}})) == []
    assert list(mismatches(schema, {"a": 1, "b": None, "c": [{"d": False}], "e": {"x": 1.5}})) == []
    wrong = {"a": True, "b": 1, "c": [{"d": 1}, {}], "e": {"x": "1"}, "f": 0}
    assert len(list(mismatches(schema, wrong))) == 6
    assert list(mismatches(schema, [])) == ["the document is no object"]
    assert list(mismatches(({"a": "text|"}, {"b": "text|"}), {"b": "x"})) == []


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
        *("config check wrong.toml", "completion zsh", "bench sweep --models lenet --modes solo-0 --dry-run"),
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
    check_document("bench compare", document_of("bench compare runs-a runs-b"))
    check_document("bench pack", document_of("bench pack runs-a --out results"))
    check_document("bench check", document_of("bench check results"))
    check_document("bench check", document_of("bench check runs-a --save baseline.json"))
    check_document("bench check", document_of("bench check runs-a --baseline baseline.json"))


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
