"""Published files of runs: the report that is made of them is the one that is made of the runs."""

import json
import re
from pathlib import Path

from tests.bench.folders import make_run
from tools.publish import publish
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
    _, broken = read_runs(results)
    words = ("version 1", "lacks model, mode", "version 1")
    assert all(word in run.reason for word, run in zip(words, broken, strict=True))
