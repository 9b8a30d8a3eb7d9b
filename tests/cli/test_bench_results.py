"""The verbs about finished runs, as a user types them; what they compute is tested in tests/bench/report."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.bench.folders import make_run
from uneven.cli.main import app
from uneven.errors import InputError, RankError


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def runs(root: Path, shift: float = 0.0) -> Path:
    for seed, quality in enumerate((0.970, 0.972)):
        make_run(root, "lenet", "solo-0", seed, quality)
        make_run(root, "lenet", "cpu-async", seed, quality + shift, 1300.0)
    return root


def test_a_report_goes_to_the_screen_or_into_a_file(tmp_path: Path) -> None:
    root = runs(tmp_path / "runs")
    assert "| cpu-async | 2 |" in call("report", root).output
    assert call("report", root, "--out", tmp_path / "new" / "report.md").exit_code == 0
    assert (tmp_path / "new" / "report.md").read_text().startswith("# Benchmark report")
    assert call("report", root, "--out", tmp_path / "report.html").exit_code == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads(call("report", root, "--json").output)["models"][0]["model"] == "lenet"


def sweeps(root: Path) -> Path:
    """Two in one folder, and one folder that is none."""
    for name, shift in (("cpu-pair", 0.0), ("gpu-pair", -0.1)):
        runs(root / name, shift)
        (root / name / "sweep.json").write_text('{"version": 1, "commands": []}')
    (root / "images").mkdir()
    return root


def test_a_folder_of_several_sweeps_has_a_report_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = sweeps(tmp_path / "results")
    shown = call("report", root).output
    assert [line for line in shown.splitlines() if line.startswith("# ")][::2] == [
        f"# {root / 'cpu-pair'}",
        f"# {root / 'gpu-pair'}",
    ]
    assert [one["root"] for one in json.loads(call("report", root, "--json").output)] == [
        str(root / "cpu-pair"),
        str(root / "gpu-pair"),
    ]
    assert call("report", root, "--out", root).exit_code == 0
    for name in ("cpu-pair", "gpu-pair"):
        assert (root / f"{name}.md").read_text() == call("report", root / name).output
    monkeypatch.chdir(root / "cpu-pair")
    assert call("report", ".", "--out", tmp_path).exit_code == 0
    assert (tmp_path / "cpu-pair.md").is_file()
    refused = call("report", root, "--out", tmp_path / "report.md")
    assert isinstance(refused.exception, InputError)
    assert "there are several sweeps" in str(refused.exception)
    assert not (tmp_path / "report.md").exists()


def test_all_sweeps_of_a_folder_are_checked_and_named(tmp_path: Path) -> None:
    root = sweeps(tmp_path / "results")
    failed = call("check", root)
    assert isinstance(failed.exception, RankError)
    assert "\n  gpu-pair: lenet cpu-async: accuracy 0.871, solo-0 has 0.971" in str(failed.exception)
    assert "cpu-pair: " not in str(failed.exception)
    found = json.loads(call("check", root, "--json").output)
    assert {(row["sweep"], row["mode"]) for row in found["rows"]} == {
        (name, mode) for name in ("cpu-pair", "gpu-pair") for mode in ("solo-0", "cpu-async")
    }
