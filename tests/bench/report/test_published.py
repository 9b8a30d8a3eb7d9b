"""Published files of runs: the report that is made of them is the one that is made of the runs."""

import json
import re
from pathlib import Path

import pytest

from tests.bench.folders import make_run, publish
from uneven.bench.report.build import build_report
from uneven.bench.report.sections import render_markdown
from uneven.bench.single.folders import read_runs


def sweep(root: Path) -> Path:
    for seed in range(2):
        make_run(root, "lenet", "solo-0", seed, 0.987 + 0.001 * seed, 1000.0, epochs=5)
        make_run(root, "lenet", "cpu-async", seed, 0.988, 1330.0, epochs=5)
    make_run(root, "lenet", "solo-1", 0, 0.5, 400.0, devices=["cpu@0.4"])
    paired = {"efficiency": 0.976, "half_width": 0.01, "pairs": 30, "batch_size": 128}
    (root / "lenet" / "cpu-async" / "efficiency.json").write_text(json.dumps(paired))
    make_run(root / "equal-time", "lenet", "cpu-async", 0, 0.991, 1010.0, epochs=6)
    (root / "sweep.json").write_text(json.dumps({"commands": ["uneven bench sweep"], "skipped": {"nccl-sync": "no"}}))
    return root


def test_the_report_of_published_files_is_that_of_the_runs(tmp_path: Path) -> None:
    runs = sweep(tmp_path / "runs")
    results = publish(runs, tmp_path / "results")
    texts = [render_markdown(build_report(root)) for root in (runs, results)]
    first, second = (
        re.sub(re.escape(str(root)), "ROOT", text) for root, text in zip((runs, results), texts, strict=True)
    )
    assert first == second
    assert "0.976 +- 0.010 (30 pairs)" in second
    assert "Not run: nccl-sync (no)." in second
    assert "75%, 75%" in second, "how busy the devices were"
    assert "99.10 % (6 epochs)" in second, "at equal time"


def test_a_broken_file_is_told_and_not_counted(tmp_path: Path) -> None:
    results = publish(sweep(tmp_path / "runs"), tmp_path / "results")
    folder = results / "lenet" / "cpu-async"
    (folder / "seed-0.json").write_text("{")
    (folder / "seed-1.json").write_text('{"version": 1, "summary": {"version": 1}}')
    (folder / "seed-2.json").write_text('{"version": 9}')
    (folder / "seed-3.json").write_text('{"version": 1, "failure": "out of memory"}')
    records, broken = read_runs(folder)
    assert not records
    words = ("version 1", "lacks model, mode", "version 1", "out of memory")
    assert all(word in run.reason for word, run in zip(words, broken, strict=True))


@pytest.mark.parametrize("part", ["lenet", "lenet/cpu-async"])
def test_a_part_of_a_sweep_tells_the_same(part: str, tmp_path: Path) -> None:
    """Efficiencies, runs at equal time and commands belong to the sweep's folder, above it."""
    root = sweep(tmp_path / "runs")
    (whole,), (own,) = build_report(root).models, build_report(root / part).models
    rows = {row.mode: row for row in whole.rows}
    for row in own.rows:
        if "/" not in part:  # without the devices alone there is no time to be equal to
            assert row.equal_time == rows[row.mode].equal_time
        assert (row.efficiency, row.equal_time_epochs) == (rows[row.mode].efficiency, rows[row.mode].equal_time_epochs)
