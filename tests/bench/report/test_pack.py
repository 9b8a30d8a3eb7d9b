"""Runs as small files: the report that is made of them is the one that is made of the runs."""

import json
import re
from pathlib import Path

import pytest

from tests.bench.folders import make_run
from uneven.bench.report.build import build_report
from uneven.bench.report.compare import compare
from uneven.bench.report.pack import pack
from uneven.bench.report.sections import render_markdown
from uneven.bench.single.folders import RunRecord, read_packed, read_runs
from uneven.errors import InputError


def sweep(root: Path) -> Path:
    for seed in range(2):
        make_run(root, "lenet", "solo-0", seed, 0.987 + 0.001 * seed, 1000.0, epochs=5)
        make_run(root, "lenet", "cpu-async", seed, 0.988, 1330.0, epochs=5)
    make_run(root, "lenet", "solo-1", 0, 0.5, 400.0, devices=["cpu@0.4"])
    paired = {"efficiency": 0.976, "half_width": 0.01, "pairs": 30, "batch_size": 128}
    (root / "lenet" / "cpu-async" / "efficiency.json").write_text(json.dumps(paired))
    make_run(root / "equal-time", "lenet", "cpu-async", 0, 0.991, 1010.0, epochs=6)
    (root / "sweep.json").write_text(json.dumps({"commands": ["uneven bench sweep"], "skipped": {"nccl-sync": "no"}}))
    (root / "lenet" / "cpu-async" / "seed-0" / "config.json").write_text('{"epochs": 5, "out": "/home/me/runs"}')
    return root


def test_the_report_of_packed_runs_is_that_of_the_runs(tmp_path: Path) -> None:
    runs, results = sweep(tmp_path / "runs"), tmp_path / "results"
    files = pack(runs, results)
    assert len(files) == 8
    texts = [render_markdown(build_report(root)) for root in (runs, results)]
    told = [re.sub(re.escape(str(root)), "ROOT", text) for root, text in zip((runs, results), texts, strict=True)]
    assert told[0] == told[1]
    assert "0.976 +- 0.010 (30 pairs)" in told[1]
    assert "Not run: nccl-sync (no)." in told[1]
    assert "75%, 75%" in told[1], "how busy the devices were"
    assert "99.10 % (6 epochs)" in told[1], "at equal time"


def test_a_packed_run_has_its_settings_and_nothing_of_the_machine_that_it_ran_on(tmp_path: Path) -> None:
    pack(sweep(tmp_path / "runs"), tmp_path / "results")
    found = read_packed(tmp_path / "results" / "lenet" / "cpu-async" / "seed-0.json")
    assert isinstance(found, RunRecord)
    assert found.packed is not None
    assert found.packed["settings"] == {"epochs": 5}
    assert found.metrics[-1]["accuracy"] == 0.988
    assert not found.is_changed


def test_packing_packed_runs_changes_nothing(tmp_path: Path) -> None:
    pack(sweep(tmp_path / "runs"), tmp_path / "once")
    pack(tmp_path / "once", tmp_path / "twice")
    for first in (tmp_path / "once").rglob("*.json"):
        assert first.read_text() == (tmp_path / "twice" / first.relative_to(tmp_path / "once")).read_text()


def test_runs_of_several_sweeps_are_packed_into_one_folder(tmp_path: Path) -> None:
    pack(sweep(tmp_path / "runs"), tmp_path / "results")
    make_run(tmp_path / "more", "mlp", "solo-0", 0, 0.98)
    (tmp_path / "more" / "sweep.json").write_text('{"commands": ["uneven bench sweep --models mlp"], "skipped": {}}')
    pack(tmp_path / "more", tmp_path / "results")
    report = build_report(tmp_path / "results")
    assert [model.model for model in report.models] == ["mlp", "lenet"]
    assert report.commands[:2] == ["uneven bench sweep", "uneven bench sweep --models mlp"]


def test_packed_runs_are_compared_with_others(tmp_path: Path) -> None:
    pack(sweep(tmp_path / "runs"), tmp_path / "results")
    assert {found.quality for found in compare(tmp_path / "runs", tmp_path / "results")} == {0.0}


def test_a_broken_file_is_told_and_not_counted(tmp_path: Path) -> None:
    pack(sweep(tmp_path / "runs"), tmp_path / "results")
    folder = tmp_path / "results" / "lenet" / "cpu-async"
    (folder / "seed-0.json").write_text("{")
    (folder / "seed-1.json").write_text('{"version": 1, "summary": {"version": 1}}')
    (folder / "seed-2.json").write_text('{"version": 9}')
    records, broken = read_runs(folder)
    assert not records
    reasons = [run.reason for run in broken]
    assert reasons[0] == reasons[2] == "is no packed run of version 1"
    assert reasons[1].startswith("its summary lacks model, mode")


def test_a_run_that_failed_is_published_with_its_reason(tmp_path: Path) -> None:
    runs = sweep(tmp_path / "runs")
    for place in (runs, runs / "equal-time"):
        (place / "lenet" / "cpu-async" / "seed-2").mkdir()
        (place / "lenet" / "cpu-async" / "seed-2" / "failure.json").write_text('{"reason": "out of memory"}')
    pack(runs, tmp_path / "results")
    assert [run["reason"] for run in build_report(tmp_path / "results").failed] == ["out of memory"] * 2


@pytest.mark.parametrize("part", ["lenet", "lenet/cpu-async"])
def test_a_part_of_a_sweep_tells_the_same(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Efficiencies, runs at equal time and commands belong to the sweep's folder, above it."""
    root, results = sweep(tmp_path / "runs"), tmp_path / "results"
    (whole,), (own,) = build_report(root).models, build_report(root / part).models
    rows = {row.mode: row for row in whole.rows}
    for row in own.rows:
        if "/" not in part:  # without the devices alone there is no time to be equal to
            assert row.equal_time == rows[row.mode].equal_time
        assert (row.efficiency, row.equal_time_epochs) == (rows[row.mode].efficiency, rows[row.mode].equal_time_epochs)
    monkeypatch.chdir(root / part)
    pack(Path("."), results)
    found = {path.relative_to(results).as_posix() for path in results.rglob("*.json")}
    assert {"lenet/cpu-async/efficiency.json", "equal-time/lenet/cpu-async/seed-0.json", "sweep.json"} <= found
    assert build_report(results).skipped == {"nccl-sync": "no"}


def test_packing_again_keeps_what_is_finished_and_forgets_what_has_failed_before(tmp_path: Path) -> None:
    first, again, results = sweep(tmp_path / "first"), sweep(tmp_path / "again"), tmp_path / "results"
    (first / "lenet" / "cpu-async" / "efficiency.json").unlink()
    (first / "lenet" / "cpu-async" / "failure.json").write_text('{"reason": "efficiency failed"}')
    pack(first, results)
    assert len(build_report(results).failed) == 1
    (again / "lenet" / "cpu-async" / "seed-0" / "failure.json").write_text('{"reason": "out of memory"}')
    pack(again, results)
    (model,) = build_report(results).models
    assert build_report(results).failed == []
    assert {row.mode: row.seeds for row in model.rows}["cpu-async"] == 2


def test_packed_runs_do_not_lie_among_the_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="would count every run twice"):
        pack(sweep(tmp_path), tmp_path / "results")


def test_nothing_to_pack(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(InputError, match="no finished run"):
        pack(tmp_path / "runs", tmp_path / "results")
