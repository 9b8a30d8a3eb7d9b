import json
import shutil
from pathlib import Path

import pytest

from tests.bench.folders import make_run
from tools.publish import publish
from uneven.bench.single.folders import (
    FAILURE,
    BrokenRun,
    RunRecord,
    nothing_found,
    read_equal_time,
    read_run,
    read_runs,
    read_timeline,
    sweeps_in,
)
from uneven.errors import InputError


def change(folder: Path, **changes: object) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | changes))


def entry(folder: Path, **changes: object) -> None:
    """Change the last epoch of the history."""
    *lines, last = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(json.loads(last) | changes)]))


def test_sweeps_in_folders_of_their_own_are_other_runs(tmp_path: Path) -> None:
    make_run(tmp_path, "lenet", "solo-0", 0, 0.98)
    make_run(tmp_path / "demo", "lenet", "solo-0", 0, 0.9)
    make_run(tmp_path / "equal-time", "lenet", "solo-0", 0, 0.97)
    assert [run.quality for run in read_runs(tmp_path)[0]] == [0.98]
    assert [run.quality for run in read_equal_time(tmp_path)] == [0.97]
    make_run(tmp_path / "all" / "one", "lenet", "solo-0", 0, 0.9)
    assert sweeps_in(tmp_path / "all") == [tmp_path / "all" / "one"]
    assert sweeps_in(tmp_path) == [tmp_path]
    make_run(tmp_path / "longer" / "equal-time", "lenet", "solo-0", 0, 0.97)
    assert sweeps_in(tmp_path / "longer") == [tmp_path / "longer"]
    assert str(nothing_found(tmp_path / "all")).endswith(f"there are some in {tmp_path / 'all' / 'one'}")
    assert str(nothing_found(tmp_path / "lenet")).endswith(f"there are some in {tmp_path}")


def test_a_sweep_whose_record_or_runs_are_gone_is_still_one_of_its_folder(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        make_run(tmp_path / "runs" / name, "lenet", "solo-0", 0, 0.98)
        publish(tmp_path / "runs" / name, tmp_path / "all" / name)
    (tmp_path / "all" / "begun").mkdir()
    (tmp_path / "all" / "begun" / "sweep.json").write_text('{"commands": []}')
    (tmp_path / "all" / "two" / "sweep.json").unlink()
    shutil.rmtree(tmp_path / "all" / "three" / "lenet")
    assert [path.name for path in sweeps_in(tmp_path / "all")] == ["one", "three", "two"]


def test_a_measurement_of_efficiency_that_failed_is_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "lenet", "cpu-async", 0, 0.98).parent
    (folder / FAILURE).write_text('{"reason": "out of memory"}')
    assert read_runs(tmp_path)[1] == [BrokenRun(folder, "efficiency: out of memory")]


def test_finished_runs_are_found_and_older_ones_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "lenet", "cpu-async", 3, 0.98)
    make_run(tmp_path, "lenet", "solo-0", 0, 0.97)
    folder.with_name("seed-3.1").mkdir()
    records, broken = read_runs(tmp_path)
    assert [(*one.key, one.quality) for one in records] == [
        ("lenet", "cpu-async", 3, 0.98),
        ("lenet", "solo-0", 0, 0.97),
    ]
    assert broken == []
    with pytest.raises(InputError, match="there is no folder"):
        read_runs(tmp_path / "none")


@pytest.mark.parametrize("place", ["lenet/solo-0/seed-1", "lenet/again/seed-0", "equal-time/lenet/solo-0/seed-1"])
def test_a_run_that_was_copied_counts_once(place: str, tmp_path: Path) -> None:
    """Twice the same seed is no second one: the interval would be too narrow."""
    make_run(tmp_path, "lenet", "solo-0", 0, 0.98)
    make_run(tmp_path / "equal-time", "lenet", "solo-0", 0, 0.98)
    source = tmp_path / "equal-time" if place.startswith("equal-time") else tmp_path
    shutil.copytree(source / "lenet" / "solo-0" / "seed-0", tmp_path / place)
    records, (copy,) = read_runs(tmp_path)
    assert (len(records), len(read_equal_time(tmp_path))) == (1, 1)
    assert "holds lenet solo-0 seed 0, as " in copy.reason
    assert "it was copied or moved" in copy.reason


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "summary.json").unlink(), "not finished: there is no summary.json"),
        (lambda folder: (folder / "summary.json").write_text('{"version": 1, '), "summary.json cannot be read"),
        (lambda folder: (folder / "summary.json").write_text("[]"), "summary.json cannot be read"),
        (lambda folder: (folder / "summary.json").write_text('{"version": 7}'), "version 7"),
        (lambda folder: (folder / "summary.json").write_text('{"version": 1}'), "lacks model, mode"),
        (lambda folder: (folder / "metrics.jsonl").write_text("{"), "metrics.jsonl cannot be read"),
        (lambda folder: (folder / "metrics.jsonl").write_text("null\n"), "metrics.jsonl cannot be read"),
        (lambda folder: entry(folder, accuracy="0.98"), "is no number"),
        (lambda folder: entry(folder, accuracy=[]), "is no number"),
        (lambda folder: entry(folder, train_loss=True), "is no number"),
        (lambda folder: (folder / "metrics.jsonl").write_text("[" * 100_000), "metrics.jsonl cannot be read"),
        (lambda folder: change(folder, quality=0.9), "has no usable quality"),
        (lambda folder: change(folder, quality={"accuracy": float("nan")}), "has no usable quality"),
        (lambda folder: change(folder, train_seconds=None), "lacks train_seconds"),
        (lambda folder: change(folder, devices=None, epochs="5"), "lacks devices"),
        (lambda folder: change(folder, devices=["bogus"], metric="accuracy"), "bogus"),
        (lambda folder: change(folder, metric=[]), "has no usable metric"),
        (lambda folder: change(folder, asked=[], sample_shares=["x"]), "has no usable asked"),
        (lambda folder: change(folder, interference={"stolen_share": "x"}), "has no usable interference"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "metrics.jsonl cannot be read"),
    ],
)
def test_a_broken_folder_is_named_with_the_reason(tmp_path: Path, spoil: object, reason: str) -> None:
    folder = make_run(tmp_path, "lenet", "cpu-async", 0, 0.98)
    spoil(folder)  # type: ignore[operator]
    found = read_run(folder)
    assert isinstance(found, BrokenRun)
    assert reason in found.reason


def test_an_epoch_that_was_not_evaluated_or_has_diverged_is_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "lenet", "cpu-async", 0, 0.98)
    entry(folder, accuracy=None, train_loss=float("nan"), is_inside_epoch=True, epochs=[1, 2])
    found = read_run(folder)
    assert isinstance(found, RunRecord)
    assert "accuracy" not in found.metrics[-1]


def test_a_failure_tells_its_reason_and_a_bad_timeline_is_no_obstacle(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "lenet", "cpu-async", 0, 0.98)
    (folder / "timeline.json").write_text("{")
    found = read_run(folder)
    assert isinstance(found, RunRecord)
    assert read_timeline(found.folder) is None
    (folder / "summary.json").unlink()
    (folder / FAILURE).write_text(json.dumps({"reason": "rank 1 was killed"}))
    assert read_run(folder) == BrokenRun(folder, "rank 1 was killed")
