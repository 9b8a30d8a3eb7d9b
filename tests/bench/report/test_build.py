import json
import re
from pathlib import Path

import pytest

from tests.bench.folders import make_run
from uneven.bench.report.build import build_report
from uneven.bench.report.page import curve, render_page
from uneven.bench.report.sections import render_markdown
from uneven.errors import InputError
from uneven.files import json_text

PAIR_SPEEDS = {"solo_samples_per_s": [800.0, 300.0], "joint_samples_per_s": 1074.0}


def sweep(root: Path) -> Path:
    for seed, quality in enumerate((0.970, 0.972, 0.974)):
        make_run(root, "lenet", "solo-0", seed, quality, 1000.0)
        make_run(root, "lenet", "cpu-async", seed, quality + 0.001, 1330.0)
        make_run(root, "lenet", "cpu-cadence", seed, quality - 0.05, 1390.0)
        make_run(root, "lenet", "torch-ddp", seed, quality, 780.0)
    make_run(root, "lenet", "solo-1", 0, 0.5, 400.0, devices=["cpu@0.4"])
    (root / "lenet" / "cpu-async" / "efficiency.json").write_text(
        json.dumps({"efficiency": 0.976, "half_width": 0.01, "pairs": 30, "batch_size": 128, **PAIR_SPEEDS})
    )
    return root


def test_rows_are_means_over_seeds_against_the_fastest_solo(tmp_path: Path) -> None:
    (model,) = build_report(sweep(tmp_path)).models
    rows = {row.mode: row for row in model.rows}
    assert list(rows) == ["solo-0", "solo-1", "torch-ddp", "cpu-cadence", "cpu-async"]
    assert model.gap == pytest.approx(2.5)
    assert model.sync_bound == pytest.approx(2 * 400 / 1400)
    fast = rows["cpu-async"]
    assert (fast.seeds, fast.quality) == (3, pytest.approx(0.973))
    assert fast.quality_half == pytest.approx(4.303 * 0.002 / 3**0.5)
    assert fast.vs_published == pytest.approx(0.973 - 0.99)
    assert fast.speedup == pytest.approx(1.33)
    assert (fast.efficiency, fast.efficiency_half, fast.efficiency_pairs) == (0.976, 0.01, 30)
    assert rows["torch-ddp"].efficiency == pytest.approx(780 / 1400), "an estimate, without pairs"
    assert rows["torch-ddp"].efficiency_half is None
    assert model.target == pytest.approx(0.99 * 0.972)
    assert fast.target_seeds == 3
    assert fast.target_s == pytest.approx(2000 / 1330.0)
    assert not fast.target_is_bound, "the first of two evaluations was below"
    assert rows["cpu-cadence"].target_seeds == 0
    assert fast.loss_gap == pytest.approx(0.0)
    assert model.best == "cpu-async", "cadence is faster, and worse by more than the margin"


def test_speed_is_that_of_undisturbed_seeds(tmp_path: Path) -> None:
    make_run(tmp_path, "lenet", "solo-0", 0, 0.97, 1000.0)
    make_run(tmp_path, "lenet", "solo-0", 1, 0.97, 77.0, is_disturbed=True)
    (model,) = build_report(tmp_path).models
    (solo,) = model.rows
    assert (solo.samples_per_s, solo.seeds, solo.is_disturbed) == (1000.0, 2, False)
    assert [seconds for seconds, _ in curve(solo, "train_seconds", "accuracy")] == [1.0, 2.0]


def test_disturbed_speeds_are_marked_and_nothing_is_derived_from_them(tmp_path: Path) -> None:
    make_run(tmp_path, "lenet", "solo-0", 0, 0.97, 1000.0)
    make_run(tmp_path, "lenet", "solo-1", 0, 0.97, 400.0, devices=["cpu@0.4"])
    make_run(tmp_path, "lenet", "torch-ddp", 0, 0.97, 77.0, is_disturbed=True)
    report = build_report(tmp_path)
    (model,) = report.models
    assert model.best is None, "the disturbed mode may be the fastest"
    text = render_markdown(report)
    assert "| 77\\* | 0.08x\\* | ~0.06\\* |" in text
    assert "\\* disturbed: other programs" in text
    assert "Best:" not in text
    assert "77*" in render_page(report, tmp_path)
    summary = tmp_path / "lenet" / "solo-1" / "seed-0" / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "is_disturbed": True}))
    (model,) = build_report(tmp_path).models
    assert (model.gap, model.sync_bound, model.is_solo_disturbed) == (None, None, True)


def test_a_simulated_device_alone_counts_for_its_speed_only(tmp_path: Path) -> None:
    (model,) = build_report(sweep(tmp_path)).models
    slow = next(row for row in model.rows if row.mode == "solo-1")
    assert slow.is_for_speed
    assert slow.quality is None
    assert slow.samples_per_s == 400.0


def test_ranks_that_take_turns_on_one_gpu_have_no_speed(tmp_path: Path) -> None:
    make_run(tmp_path, "lenet", "solo-0", 0, 0.97, devices=["cuda:0"])
    make_run(tmp_path, "lenet", "nccl-async", 0, 0.97, devices=["cuda:0", "cuda:0"])
    (model,) = build_report(tmp_path).models
    row = model.rows[-1]
    assert row.quality == 0.97
    assert (row.samples_per_s, row.efficiency, row.train_s, row.target_s) == (None, None, None, None)
    assert "(takes turns)" in render_markdown(build_report(tmp_path))


def test_batches_are_told_as_they_were(tmp_path: Path) -> None:
    make_run(tmp_path, "lenet", "solo-0", 0, 0.97)
    make_run(tmp_path, "lenet", "cpu-sync", 0, 0.97, global_batch_size=64)
    make_run(tmp_path, "lenet", "torch-ddp", 0, 0.97, batch_size=32)
    make_run(tmp_path, "lenet", "cpu-balanced", 0, 0.97, lr_scale=2.0)
    (model,) = build_report(tmp_path).models
    assert {row.mode: row.batch for row in model.rows} == {
        "solo-0": "64",
        "torch-ddp": "2 x 32",
        "cpu-sync": "64 in all",
        "cpu-balanced": "2 x 64, lr x 2",
    }


@pytest.mark.parametrize(("model", "best", "end"), [("lenet", 0.98, 0.97), ("gpt-nano", 1.5, 1.7)])
def test_a_run_that_trained_past_its_best_is_told(tmp_path: Path, model: str, best: float, end: float) -> None:
    for seed in range(2):
        path = make_run(tmp_path, model, "solo-0", seed, end) / "metrics.jsonl"
        metric = "accuracy" if model == "lenet" else "loss"
        first, last = map(json.loads, path.read_text().splitlines())
        first[metric] = best
        path.write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    report = build_report(tmp_path)
    assert report.models[0].rows[0].passed == pytest.approx(best)
    assert "Trained too long" in render_markdown(report)


def test_the_timelines_give_busy_rounds_and_idle_time(tmp_path: Path) -> None:
    (model,) = build_report(sweep(tmp_path)).models
    row = next(row for row in model.rows if row.mode == "cpu-async")
    assert row.utilisation == {"0: cpu": pytest.approx(0.75), "1: cpu@0.4": pytest.approx(0.75)}
    assert (row.rounds, row.transfer_ms, row.wait_ms) == (2, 2.0, 4.0)
    assert sum(row.idle_s.values()) == pytest.approx(2 * 0.25 * 2000 / 1330.0)


def test_broken_folders_are_named_and_the_rest_is_reported(tmp_path: Path) -> None:
    root = sweep(tmp_path)
    (root / "lenet" / "cpu-async" / "seed-1" / "summary.json").write_text("{")
    (root / "lenet" / "torch-ddp" / "seed-0" / "timeline.json").write_text("{")
    report = build_report(root)
    assert [one["reason"] for one in report.failed] == ["summary.json cannot be read"]
    text = render_markdown(report)
    assert "## What failed" in text
    assert "seed-1 | summary.json cannot be read |" in text
    assert json.loads(json_text(report))["version"] == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no finished run"):
        build_report(tmp_path / "empty")


def test_a_run_that_shared_the_machine_moves_neither_times_nor_the_gap(tmp_path: Path) -> None:
    for seed, speed in enumerate((1000.0, 1010.0, 250.0)):
        make_run(tmp_path, "lenet", "solo-0", seed, 0.97, speed)
        make_run(tmp_path, "lenet", "cpu-async", seed, 0.97, 1.3 * speed)
    make_run(tmp_path, "lenet", "solo-1", 0, 0.97, 400.0, devices=["cpu@0.4"])
    (model,) = build_report(tmp_path).models
    solo, _, together = model.rows
    assert (solo.samples_per_s, solo.train_s) == (1000.0, 2.0)
    assert together.speedup == pytest.approx(1.3)
    assert model.gap == pytest.approx(2.5)


def test_a_target_met_by_the_first_evaluation_is_an_upper_bound(tmp_path: Path) -> None:
    make_run(tmp_path, "lenet", "solo-0", 0, 0.97)
    folder = make_run(tmp_path, "lenet", "cpu-async", 0, 0.97)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    del lines[0]["accuracy"]  # evaluated at the end only
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = build_report(tmp_path)
    solo, together = report.models[0].rows
    assert (solo.target_is_bound, together.target_is_bound) == (False, True)
    assert "| <= 2.0 |" in render_markdown(report)


def test_the_text_says_it_all(tmp_path: Path) -> None:
    root = sweep(tmp_path)
    word = {"commands": ["uneven bench sweep"], "skipped": {"nccl-sync": "no CUDA"}}
    (root / "sweep.json").write_text(json.dumps(word))
    text = render_markdown(build_report(root))
    assert "| cpu-async | 3 | 2 x 64 | 97.30 % +- 0.50 % | -1.70 pp | 1.5 | 1,330 | 1.33x |" in text
    assert "| 0.976 +- 0.010 (30 pairs) |" in text
    assert "| solo-1 | 1 | 64 | (for its speed only) |" in text
    assert "~0.56" in text
    assert "measured with 128 samples per device and step" in text
    assert "too long" not in text
    assert "Best: cpu-async, the fastest mode" in text
    assert "equal batches could reach 57% at most" in text
    assert "No run failed." in text
    assert "Doubtful" not in text
    assert "| mode | busy | rounds | communication ms | wait ms |" in text
    assert "Idle, in seconds of all devices together" in text
    assert "Published: 99.00 %" in text
    assert "has 5 epochs" in text, "these runs have two"
    assert "`uneven bench sweep`" in text
    assert "Not run: nccl-sync (no CUDA)." in text
    assert text.isascii()


def test_the_report_begins_with_its_result_and_ends_with_definitions(tmp_path: Path) -> None:
    report = build_report(sweep(tmp_path))
    (model,) = report.models
    found = model.verdict
    assert found is not None
    assert found.sentence == (
        "LeNet-5 with BatchNorm by cpu-async gave 1,074 of the 1,100 samples/s that you own (98 %); "
        "equal-batch DDP could give at most 600 (55 %)."
    ), "as measured by pairs, and not by their ratio and the speeds of other runs"
    assert found.gave is not None
    assert found.owned is not None
    assert found.gave.samples_per_s + sum(loss.samples_per_s for loss in found.losses) == pytest.approx(1100.0)
    assert found.owned.source == "measured"
    text = render_markdown(report)
    assert text.startswith(f"# Benchmark report\n\n**{found.sentence}** The rest went to wait")
    assert text.index("## LeNet") < text.index("## What the figures mean") < text.index("Efficiency is joint samples/s")
    page = re.sub(r"<script\b.*?</script>", "", render_page(report, tmp_path), flags=re.DOTALL)
    assert page.index('class="bar"') < page.index("<table") < page.index("<details>")
    assert "transfer" not in page
    keys = re.findall(r'<button[^>]*class="key".*?</button>', page)
    assert len(keys) == len([row for row in model.rows if row.trajectories]), "one row of keys for all plots"
    assert "Efficiency is joint" in page.partition("<details>")[2]


@pytest.mark.parametrize("pairs", [{}, {"solo_samples_per_s": [800.0], "joint_samples_per_s": 700.0}])
def test_pairs_that_tell_no_speeds_leave_the_verdict_to_the_runs(pairs: dict[str, object], tmp_path: Path) -> None:
    paired = {"efficiency": 0.976, "half_width": 0.01, "pairs": 30, **pairs}
    (sweep(tmp_path) / "lenet" / "cpu-async" / "efficiency.json").write_text(json.dumps(paired))
    (model,) = build_report(tmp_path).models
    assert model.verdict is not None
    assert "gave 1,330 of the 1,400 samples/s that you own (95 %)" in model.verdict.sentence


def test_runs_without_times_do_not_tell_where_the_rest_went(tmp_path: Path) -> None:
    for mode, speed, devices in (("solo-0", 1000.0, ["cpu"]), ("solo-1", 400.0, ["cpu@0.4"])):
        make_run(tmp_path, "lenet", mode, 0, 0.97, speed, devices=devices)
    (make_run(tmp_path, "lenet", "cpu-async", 0, 0.97, 1330.0) / "timeline.json").unlink()
    (model,) = build_report(tmp_path).models
    assert model.verdict is not None
    assert model.verdict.rest == "Where the rest went was not recorded."
    assert "not recorded" in render_page(build_report(tmp_path), tmp_path)


def test_shares_follow_the_speeds_of_undisturbed_seeds(tmp_path: Path) -> None:
    make_run(tmp_path, "lenet", "cpu-balanced", 0, 0.97, 1000.0, sample_shares=[0.75, 0.25])
    make_run(tmp_path, "lenet", "cpu-balanced", 1, 0.97, 77.0, sample_shares=[0.95, 0.05], is_disturbed=True)
    (model,) = build_report(tmp_path).models
    assert model.rows[0].sample_shares == [0.75, 0.25]


def test_disturbed_runs_have_no_verdict_and_single_devices_need_none(tmp_path: Path) -> None:
    make_run(tmp_path, "lenet", "solo-0", 0, 0.97, 1000.0)
    assert build_report(tmp_path).models[0].verdict is None
    make_run(tmp_path, "lenet", "cpu-async", 0, 0.97, 1330.0)
    (model,) = build_report(tmp_path).models
    assert model.verdict is not None
    assert "how fast each device is alone is not known" in model.verdict.sentence
    make_run(tmp_path, "lenet", "solo-1", 0, 0.97, 400.0, devices=["cpu@0.4"], is_disturbed=True)
    (model,) = build_report(tmp_path).models
    assert model.verdict is not None
    assert "no verdict" in model.verdict.sentence
    assert 'class="bar"' not in render_page(build_report(tmp_path), tmp_path).partition("<body>")[2]


def test_the_page_stands_alone_and_links_the_timelines(tmp_path: Path) -> None:
    root = sweep(tmp_path / "runs")
    (root / "lenet" / "cpu-async" / "seed-2" / "timeline.html").write_text("a page")
    (root / "lenet" / "torch-ddp" / "seed-0" / "summary.json").write_text("<script>")
    page = render_page(build_report(root), tmp_path)
    assert 'href="runs/lenet/cpu-async/seed-2/timeline.html"' in page
    assert "seed-1/timeline.html" not in page, "only what is there"
    assert "97.30 % +- 0.50 %" in page
    assert "training loss over seconds of training" in page
    assert not re.search(r'(src|href)="https?://', re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))
    assert not re.search(r"<script[^>]*src=", page)
    assert len(page) < 3_000_000


def test_an_impossible_estimate_is_doubted_and_every_column_has_its_head(tmp_path: Path) -> None:
    make_run(tmp_path, "lenet", "solo-0", 0, 0.97, 1000.0)
    make_run(tmp_path, "lenet", "solo-1", 0, 0.5, 400.0, devices=["cpu@0.4"])
    make_run(tmp_path, "lenet", "cpu-async", 0, 0.97, 2000.0, sample_shares=[0.7, 0.3])
    text = render_markdown(build_report(tmp_path))
    assert "Doubtful: an efficiency of ~1.43 is impossible" in text
    assert "| mode | busy | samples | rounds |" in text
    assert "| cpu-async | 75%, 75% | 70:30 | 2 |" in text
