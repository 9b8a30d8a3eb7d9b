"""Every model and mode against what was published, against one device alone, and against its own figures."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.folders import make_run
from tools.publish import publish
from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.orders import SweepOrder
from uneven.bench.report.build import build_report
from uneven.bench.report.check import Judged, compare_with_references
from uneven.bench.sweep.run import _write_record
from uneven.errors import InputError


def lenet(root: Path, mode: str, quality: float, speed: float = 1000.0, **summary: Any) -> Path:
    return make_run(root, "lenet", mode, 0, quality, speed, **{"epochs": 5, **summary})


def judged(root: Path) -> dict[str, Judged]:
    rows, faults = compare_with_references(root)
    assert not faults
    return {row.mode: row for row in rows}


def faults_of(root: Path) -> list[str]:
    """All that `uneven bench check` would print."""
    rows, faults = compare_with_references(root)
    return [*faults, *(fault for row in rows for fault in row.faults)]


def test_every_model_has_a_reference_that_its_own_worst_agrees_with() -> None:
    for name in models.NAMES:
        recipe = models.get(name)
        assert recipe.published is not None, name
        better = recipe.published.value - recipe.published.worst
        assert better >= 0 if recipe.higher_is_better else better <= 0, name


def test_it_holds(tmp_path: Path) -> None:
    lenet(tmp_path, "solo-0", 0.988)
    lenet(tmp_path, "cpu-async", 0.987, 1300.0)
    lenet(tmp_path, "solo-1", 0.1, 400.0, devices=["cpu@0.4"])
    rows = judged(tmp_path)
    assert list(rows) == ["cpu-async", "solo-0"], "a simulated device alone has no quality of its own"
    assert (rows["cpu-async"].faults, rows["solo-0"].faults) == ([], [])
    assert rows["cpu-async"].published == 0.985
    assert (rows["cpu-async"].reference, rows["cpu-async"].reference_quality) == ("solo-0", 0.988)
    assert rows["cpu-async"].equal_time == 0.987, "it had ended"


def test_worse_than_published(tmp_path: Path) -> None:
    lenet(tmp_path, "solo-0", 0.984)
    (fault,) = judged(tmp_path)["solo-0"].faults
    assert fault.startswith("accuracy 0.984, and 0.985 is the worst that agrees with LeCun")


def test_a_published_figure_is_for_the_recipe_alone(tmp_path: Path) -> None:
    for at, change in enumerate(
        ({"epochs": 2}, {"data": "mnist-mini"}, {"eval_samples": 9}, {"asked": {"samples": 9}})
    ):
        lenet(tmp_path / str(at), "solo-0", 0.9, **change)
        row = judged(tmp_path / str(at))["solo-0"]
        assert (row.published, row.faults) == (None, []), change


def test_a_text_model_is_held_by_its_best_evaluation_and_a_classifier_by_its_last(tmp_path: Path) -> None:
    """A model that is trained too long is no worse than what was published, which is the best there, too."""
    for model, metric, best, end in (("gpt-nano", "loss", 1.6, 2.1), ("lenet", "accuracy", 0.99, 0.98)):
        recipe = models.get(model)
        folder = make_run(tmp_path, model, "solo-0", 0, end, epochs=recipe.epochs, data=recipe.data)
        first, last = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
        (folder / "metrics.jsonl").write_text(f"{json.dumps(first | {metric: best})}\n{json.dumps(last)}\n")
    rows, _ = compare_with_references(tmp_path)
    assert {row.model: len(row.faults) for row in rows} == {"gpt-nano": 0, "lenet": 1}


def test_a_best_on_the_way_is_not_held_against_a_loop_that_has_no_way(tmp_path: Path) -> None:
    """A loop of the user's own is evaluated at its end, where a text model may have been trained too long."""
    recipe = models.get("gpt-nano")
    for mode, expected in (("sync", (None, 0)), ("cpu-sync", (2.0, 1))):
        make_run(tmp_path / mode, "gpt-nano", mode, 0, 2.1, epochs=recipe.epochs, data=recipe.data)
        ((row,), _) = compare_with_references(tmp_path / mode)
        assert (row.published, len(row.faults)) == expected, mode


def test_worse_than_one_device_alone(tmp_path: Path) -> None:
    lenet(tmp_path, "solo-0", 0.995)
    lenet(tmp_path, "cpu-async", 0.990, 1300.0)
    (fault, timed) = judged(tmp_path)["cpu-async"].faults
    assert fault == "accuracy 0.99, solo-0 has 0.995 (allowed: 0.004 worse)"
    assert "when solo-0 has finished" in timed


def test_the_quality_after_one_epoch_of_fifty_is_held_against_nothing(tmp_path: Path) -> None:
    for epochs in (1, 5):
        for mode, loss, speed in (("solo-0", 2.8, 50.0), ("torch-ddp", 2.9, 40.0), ("cpu-async", 9.0, 60.0)):
            make_run(tmp_path / str(epochs), "gpt-nano", mode, 0, loss, speed, epochs=epochs)
    rows = judged(tmp_path / "1")
    assert all(row.is_short and row.reference is None and row.faults == [] for row in rows.values())
    rows = judged(tmp_path / "5")
    assert not any(row.is_short for row in rows.values())
    assert "solo-0 has 2.8" in rows["cpu-async"].faults[0]


def test_what_is_short_is_still_held_against_its_own_figures(tmp_path: Path) -> None:
    make_run(tmp_path, "gpt-nano", "cpu-async", 0, 2.8, epochs=1, train_seconds=1.0)
    assert any("a second" in fault for fault in faults_of(tmp_path))


def test_a_larger_batch_is_held_against_pytorchs_own(tmp_path: Path) -> None:
    lenet(tmp_path, "solo-0", 0.995)
    lenet(tmp_path, "cpu-sync", 0.990)
    assert judged(tmp_path)["cpu-sync"].reference is None
    lenet(tmp_path, "torch-ddp", 0.9905)
    assert (judged(tmp_path)["cpu-sync"].reference, judged(tmp_path)["cpu-sync"].faults) == ("torch-ddp", [])
    lenet(tmp_path, "cpu-balanced", 0.986)
    assert "torch-ddp has 0.9905" in judged(tmp_path)["cpu-balanced"].faults[0]


def test_equal_samples_and_too_slow(tmp_path: Path) -> None:
    """As good at the end, and worse at the time at which the single device has finished."""
    lenet(tmp_path, "solo-0", 0.99, 1000.0)
    lenet(tmp_path, "cpu-cadence", 0.99, 600.0)
    lenet(tmp_path, "torch-ddp", 0.99, 600.0)
    rows = judged(tmp_path)
    (fault,) = rows["cpu-cadence"].faults
    assert fault.startswith("accuracy 0.891 when solo-0 has finished with 0.99")
    assert rows["torch-ddp"].faults == [], "nobody says that it is as fast"


def test_no_verdict_on_time_of_disturbed_runs(tmp_path: Path) -> None:
    lenet(tmp_path, "solo-0", 0.99, 1000.0, is_disturbed=True)
    lenet(tmp_path, "cpu-cadence", 0.99, 600.0)
    assert judged(tmp_path)["cpu-cadence"].faults == []


def test_seeds_beside_others_count_at_equal_time_if_the_mode_had_ended(tmp_path: Path) -> None:
    """When it had ended is known by the runs that had the devices to themselves."""
    lenet(tmp_path, "solo-0", 0.99)
    first = lenet(tmp_path, "cpu-async", 0.984, 1300.0)
    for seed, quality in ((1, 0.992), (2, 0.991)):
        make_run(tmp_path, "lenet", "cpu-async", seed, quality, 500.0, epochs=5, is_disturbed=True)
    row = judged(tmp_path)["cpu-async"]
    assert (row.equal_time, row.faults) == (pytest.approx(0.989), [])
    shutil.rmtree(first)
    lenet(tmp_path, "cpu-async", 0.984, 700.0)
    (fault,) = judged(tmp_path)["cpu-async"].faults
    assert fault.startswith("accuracy 0.8856 when solo-0 has finished"), "its last evaluation before"


def test_runs_that_were_made_for_equal_time_are_held_against_the_single_device(tmp_path: Path) -> None:
    lenet(tmp_path, "solo-0", 0.99)
    lenet(tmp_path, "cpu-balanced", 0.99, 1400.0)
    longer = lenet(tmp_path / "equal-time", "cpu-balanced", 0.992, 1010.0, epochs=6)
    row = judged(tmp_path)["cpu-balanced"]
    assert (row.seeds, row.quality, row.equal_time, row.faults) == (1, 0.99, 0.992, [])
    shutil.rmtree(longer)
    lenet(tmp_path / "equal-time", "cpu-balanced", 0.98, 1010.0, epochs=6)
    (fault,) = judged(tmp_path)["cpu-balanced"].faults
    assert fault == "accuracy 0.98 when solo-0 has finished with 0.99 (allowed: 0.004 worse)"


def published(tmp_path: Path) -> Path:
    """A folder of files with runs of three modes, one for its speed alone, an efficiency and runs at equal time."""
    runs, results = tmp_path / "runs", tmp_path / "results"
    lenet(runs, "solo-0", 0.99)
    lenet(runs, "solo-1", 0.1, 400.0, devices=["cpu@0.4"])
    folder = lenet(runs, "cpu-async", 0.99, 1300.0).parent
    make_run(runs, "lenet", "cpu-async", 1, 0.989, 1310.0, epochs=5)
    lenet(runs / "equal-time", "cpu-async", 0.991, 1010.0, epochs=6)
    (folder / "efficiency.json").write_text('{"efficiency": 0.9, "half_width": 0.01, "pairs": 12}')
    publish(runs, results)
    assert faults_of(results) == []
    return results


def edit(path: Path, **changes: Any) -> None:
    """Change the summary of a packed run, or another file of JSON."""
    content = json.loads(path.read_text())
    content.get("summary", content).update(changes)
    path.write_text(json.dumps(content))


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "tamper",
    [
        lambda folder: edit(folder / "solo-0" / "seed-0.json", quality={"accuracy": 0.999}),
        lambda folder: edit(folder / "solo-0" / "seed-0.json", train_seconds=1.0),
        lambda folder: edit(folder / "solo-0" / "seed-0.json", seed=7),
        lambda folder: edit(folder / "solo-0" / "seed-0.json", model="other"),
        lambda folder: edit(folder / "solo-1" / "seed-0.json", samples_per_s=100.0),
        lambda folder: edit(folder / "cpu-async" / "efficiency.json", efficiency=0.99),
        lambda folder: (folder / "cpu-async" / "efficiency.json").write_text("{"),
        lambda folder: (folder / "cpu-async" / "efficiency.json").unlink(),
        lambda folder: (folder / "cpu-async" / "seed-1.json").unlink(),
        lambda folder: shutil.copy(folder / "cpu-async" / "seed-0.json", folder / "cpu-async" / "seed-1.json"),
        lambda folder: shutil.copy(folder / "cpu-async" / "seed-0.json", folder / "cpu-async" / "seed-2.json"),
        lambda folder: edit(folder.parent / "equal-time" / "lenet" / "cpu-async" / "seed-0.json", epochs=7),
        lambda folder: edit(folder.parent / "sweep.json", files=None),
        lambda folder: (folder.parent / "sweep.json").write_text("{"),
        lambda folder: (folder.parent / "sweep.json").unlink(),
        lambda folder: into_folder(folder / "solo-0" / "seed-0.json"),
        lambda folder: (folder / "solo-0" / "seed-0.json").write_text("[" * 100_000),
    ],
)
def test_results_that_were_tampered_with(tamper: Callable[[Path], object], tmp_path: Path) -> None:
    results = published(tmp_path)
    tamper(results / "lenet")
    assert faults_of(results)


def test_a_sweep_that_goes_on_beside_published_files_keeps_their_checksums(tmp_path: Path) -> None:
    results = published(tmp_path)
    _write_record(SweepOrder(out=results, command="uneven bench sweep --seeds 9"), [])
    assert faults_of(results) == []
    assert "uneven bench sweep --seeds 9" in (results / "sweep.json").read_text()
    (results / "lenet" / "cpu-async" / "seed-1.json").unlink()
    assert any("is missing" in fault for fault in faults_of(results))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_seconds": 0.5, "samples_per_s": 4000.0}, "its longest rank trained for 2.00"),
        ({"samples": 4000, "samples_per_s": 2000.0}, "its history ends after 2,000 samples"),
        ({"epochs": 9}, "its history ends with epoch 5"),
        ({"quality": {"accuracy": 0.994}}, "its last evaluation has 0.99"),
    ],
)
def test_a_summary_that_contradicts_its_history(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    edit(lenet(tmp_path, "solo-0", 0.99) / "summary.json", **changes)
    assert any(words in fault for fault in judged(tmp_path)["solo-0"].faults)


@pytest.mark.parametrize(
    ("changes", "is_right"),
    [
        ({}, True),
        ({"efficiency": 0.99}, False),
        ({"half_width": 0.001}, False),
        ({"pairs": 30}, False),
        ({"ratios": [0.9, None, 1.0]}, False),
    ],
)
def test_an_efficiency_is_that_of_its_pairs(changes: dict[str, Any], is_right: bool, tmp_path: Path) -> None:
    mean, half = interval([0.9, 0.95, 1.0])
    paired = {"efficiency": mean, "half_width": half, "pairs": 3, "ratios": [0.9, 0.95, 1.0], **changes}
    folder = lenet(tmp_path, "cpu-async", 0.99).parent
    (folder / "efficiency.json").write_text(json.dumps(paired))
    faults = judged(tmp_path)["cpu-async"].faults
    assert [fault.split(":")[0] for fault in faults] == ([] if is_right else ["efficiency"])


@pytest.mark.parametrize(
    ("train_s", "word"),
    [(220.0, None), (200.0, "its longest rank trained for 220.00"), (440.0, "its longest rank trained for 220.00")],
)
def test_one_rank_waits_while_another_captures(train_s: float, word: str | None, tmp_path: Path) -> None:
    """Its time is the longest and counts as the run's; the history has the other's, 200 s."""
    folder = lenet(tmp_path, "cpu-balanced", 0.99, 10.0)
    edit(folder / "summary.json", train_seconds=train_s, samples_per_s=2000 / train_s)
    timeline = json.loads((folder / "timeline.json").read_text())
    timeline["accounts"][1]["seconds"]["communication"] += 20.0
    (folder / "timeline.json").write_text(json.dumps(timeline))
    faults = judged(tmp_path)["cpu-balanced"].faults
    assert not faults if word is None else any(word in fault for fault in faults), faults


def test_two_seeds_that_differ_by_chance_do_not_allow_any_quality(tmp_path: Path) -> None:
    """Their interval is 13 standard errors wide."""
    for seed, quality in enumerate((0.985, 0.995)):
        make_run(tmp_path, "lenet", "solo-0", seed, quality, epochs=5)
        make_run(tmp_path, "lenet", "cpu-async", seed, quality - 0.013, 1300.0, epochs=5)
    assert any("allowed: 0.012 worse" in fault for fault in judged(tmp_path)["cpu-async"].faults)


def test_runs_of_other_settings_are_not_held_against_each_other(tmp_path: Path) -> None:
    lenet(tmp_path, "solo-0", 0.99)
    lenet(tmp_path, "cpu-async", 0.99, 1300.0, epochs=10)
    (fault,) = judged(tmp_path)["cpu-async"].faults
    assert fault == "epochs 10, solo-0 has 5: they cannot be compared"
    make_run(tmp_path, "lenet", "cpu-async", 1, 0.99, 1300.0, epochs=5)
    assert "its runs differ in epochs: 10, 5" in judged(tmp_path)["cpu-async"].faults


def test_the_best_single_device_need_not_be_the_first(tmp_path: Path) -> None:
    lenet(tmp_path, "solo-0", 0.99, 300.0, devices=["cpu"])
    lenet(tmp_path, "solo-1", 0.99, 3000.0, devices=["cuda:0"])
    lenet(tmp_path, "cpu-async", 0.99, 3200.0, devices=["cpu", "cuda:0"])
    row = judged(tmp_path)["cpu-async"]
    assert row.reference == "solo-1"
    (report,) = build_report(tmp_path).models
    assert report.best == "cpu-async"


def test_ddp_of_three_devices_trains_equal_batches(tmp_path: Path) -> None:
    three = {"devices": ["cpu", "cpu", "cpu"]}
    lenet(tmp_path, "solo-0", 0.99)
    lenet(tmp_path, "cpu-balanced", 0.98, global_batch_size=128, **three)
    lenet(tmp_path, "torch-ddp", 0.99, batch_size=42, **three)
    assert judged(tmp_path)["cpu-balanced"].reference == "torch-ddp"


def test_figures_that_contradict_each_other(tmp_path: Path) -> None:
    folder = lenet(tmp_path, "solo-0", 0.99)
    summary = json.loads((folder / "summary.json").read_text())
    changed = {"quality": {"accuracy": 0.998}, "samples_per_s": 2000.0}
    (folder / "summary.json").write_text(json.dumps(summary | changed))
    speed, quality = judged(tmp_path)["solo-0"].faults
    assert speed == "seed 0: 2000 samples in 2.000 s are not 2000.0 a second"
    assert quality == "seed 0: its last evaluation has 0.99, its summary 0.998"


def test_runs_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    lenet(tmp_path, "solo-0", 0.99)
    (tmp_path / "lenet" / "cpu-async" / "seed-0").mkdir(parents=True)
    _, broken = compare_with_references(tmp_path)
    assert len(broken) == 1
    assert "not finished" in broken[0]
    with pytest.raises(InputError, match="no finished run"):
        compare_with_references(tmp_path / "lenet")
