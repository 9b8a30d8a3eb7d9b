import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.bench.folders import make_run
from uneven.bench.report.check import check_baseline, write_baseline
from uneven.bench.report.compare import compare
from uneven.bench.report.pack import pack
from uneven.errors import InputError
from uneven.files import json_text


def sweep(root: Path, shift: float, speed: float, model: str = "lenet") -> Path:
    for seed, quality in enumerate((0.970, 0.972, 0.974)):
        make_run(root, model, "cpu-async", seed, quality + shift, speed)
    return root


@pytest.mark.parametrize(
    ("shift", "speed", "verdict"),
    [
        (0.01, 1200.0, "quality better, speed better"),
        (-0.01, 800.0, "quality worse, speed worse"),
        (0.0, 1000.0, "quality: no difference shown, speed: no difference shown"),
    ],
)
def test_sweeps_are_paired_by_seed(tmp_path: Path, shift: float, speed: float, verdict: str) -> None:
    (found,) = compare(sweep(tmp_path / "a", 0.0, 1000.0), sweep(tmp_path / "b", shift, speed))
    assert (found.model, found.mode, found.pairs) == ("lenet", "cpu-async", 3)
    assert found.quality == pytest.approx(shift, abs=1e-12)
    assert found.quality_half == pytest.approx(0.0, abs=1e-12), "the seeds differ, the pairs do not"
    assert found.speed == pytest.approx(speed / 1000.0)
    assert found.verdict == verdict


def test_a_lower_loss_is_better(tmp_path: Path) -> None:
    (found,) = compare(sweep(tmp_path / "a", 0.0, 1.0, "gpt-nano"), sweep(tmp_path / "b", -0.1, 1.0, "gpt-nano"))
    assert found.quality == pytest.approx(0.1)


def test_two_runs_of_one_model_in_different_modes(tmp_path: Path) -> None:
    first, second = make_run(tmp_path, "lenet", "solo-0", 0, 0.9), make_run(tmp_path, "lenet", "cpu-async", 1, 0.8)
    (found,) = compare(first, second)
    assert found.mode == "solo-0 -> cpu-async"
    assert "one pair does not show chance" in found.verdict
    assert json.loads(json_text(found))["quality_half"] is None
    with pytest.raises(InputError, match="compare runs of one model"):
        compare(first, make_run(tmp_path, "mlp", "solo-0", 0, 0.9))
    with pytest.raises(InputError, match="no model, mode and seed in common"):
        compare(sweep(tmp_path / "a", 0.0, 1.0), sweep(tmp_path / "b", 0.0, 1.0, "mlp"))


def test_speeds_of_disturbed_runs_are_not_compared(tmp_path: Path) -> None:
    first = make_run(tmp_path, "lenet", "solo-0", 0, 0.9)
    second = make_run(tmp_path, "lenet", "solo-0", 1, 0.9, 10.0, is_disturbed=True)
    (found,) = compare(first, second)
    assert found.is_disturbed
    assert found.verdict == "quality: one pair does not show chance, speed: 1 disturbed runs"


def efficiency(root: Path, value: float, **marks: bool) -> None:
    (root / "lenet" / "cpu-async" / "efficiency.json").write_text(
        json.dumps({"efficiency": value, "half_width": 0.01, "pairs": 30, **marks})
    )


def test_the_gate_does_not_trust_a_disturbed_efficiency(tmp_path: Path) -> None:
    base, file = sweep(tmp_path / "base", 0.0, 1000.0), tmp_path / "baseline.json"
    efficiency(base, 0.95)
    write_baseline(base, file)
    efficiency(base, 0.95, is_disturbed=True)
    (fault,) = check_baseline(base, file)
    assert "not measured, or disturbed" in fault


def test_the_gate_lets_better_pass_and_names_what_is_worse(tmp_path: Path) -> None:
    base, file = sweep(tmp_path / "base", 0.0, 1000.0), tmp_path / "baseline.json"
    efficiency(base, 0.95)
    write_baseline(base, file)
    assert check_baseline(base, file) == []
    good = sweep(tmp_path / "good", 0.02, 500.0)
    efficiency(good, 0.94)
    assert check_baseline(good, file) == [], "better quality, and efficiency within its interval"
    bad = sweep(tmp_path / "bad", -0.05, 1000.0)
    efficiency(bad, 0.80)
    faults = check_baseline(bad, file)
    assert [fault.split(":")[0] for fault in faults] == ["lenet cpu-async"] * 2
    assert "accuracy 0.922, the baseline has 0.972" in faults[0]
    assert "efficiency 0.800" in faults[1]
    (missing,) = check_baseline(sweep(tmp_path / "none", 0.0, 1.0), file)
    assert "efficiency was not measured" in missing
    assert check_baseline(sweep(tmp_path / "other", 0.0, 1.0, "mlp"), file) == ["lenet cpu-async: has no finished run"]


def test_two_seeds_of_a_baseline_that_differ_by_chance_do_not_allow_any_quality(tmp_path: Path) -> None:
    """Their interval, 0.0635 wide on either side, would let 99 % become 93 %."""
    for seed, quality in enumerate((0.985, 0.995)):
        make_run(tmp_path / "base", "lenet", "solo-0", seed, quality)
        make_run(tmp_path / "now", "lenet", "solo-0", seed, quality - 0.05)
    write_baseline(tmp_path / "base", tmp_path / "b.json")
    (fault,) = check_baseline(tmp_path / "now", tmp_path / "b.json")
    assert fault == "lenet solo-0: accuracy 0.94, the baseline has 0.99 (allowed: 0.012 worse)"


def test_the_gate_does_not_pass_on_the_runs_that_are_left(tmp_path: Path) -> None:
    root, file = sweep(tmp_path / "runs", 0.0, 1000.0), tmp_path / "baseline.json"
    write_baseline(root, file)
    pack(root, tmp_path / "results")
    assert check_baseline(tmp_path / "results", file) == []
    packed = tmp_path / "results" / "lenet" / "cpu-async" / "seed-0.json"
    packed.write_text(packed.read_text().replace('"accuracy":0.97', '"accuracy":0.99'))
    assert any("was changed since it was packed" in fault for fault in check_baseline(tmp_path / "results", file))
    (root / "lenet" / "cpu-async" / "seed-1" / "failure.json").write_text('{"reason": "out of memory"}')
    (fault,) = check_baseline(root, file)
    assert fault.endswith("seed-1: out of memory")


def test_an_efficiency_that_is_no_number_was_not_measured(tmp_path: Path) -> None:
    root, file = sweep(tmp_path / "runs", 0.0, 1000.0), tmp_path / "baseline.json"
    efficiency(root, 0.95)
    write_baseline(root, file)
    efficiency(root, float("nan"))
    (fault,) = check_baseline(root, file)
    assert "efficiency was not measured" in fault


def test_a_file_that_is_no_baseline_is_told(tmp_path: Path) -> None:
    root = sweep(tmp_path / "runs", 0.0, 1.0)
    damaged = (
        {},
        {"quality": []},
        {"quality": [float("nan")]},
        {"quality": [1], "efficiency": [float("nan"), 0.01]},
        {"quality": ["x"]},
        {"quality": [1], "efficiency": [1]},
    )
    wrong: list[Any] = [None, [], {}, {"other solo-0": {"quality": [1]}}, *({"lenet solo-0": row} for row in damaged)]
    for rows in wrong:
        (tmp_path / "b.json").write_text(json.dumps({"version": 1, "rows": rows}))
        with pytest.raises(InputError, match="is no baseline of version 1"):
            check_baseline(root, tmp_path / "b.json")


def test_a_run_is_compared_with_an_older_one_that_was_moved_aside(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "lenet", "solo-0", 0, 0.98)
    shutil.copytree(folder, folder.with_name("seed-0.1"))
    (found,) = compare(folder.with_name("seed-0.1"), folder)
    assert (found.mode, found.quality, found.speed) == ("solo-0 -> solo-0", 0.0, 1.0)


def test_qualities_of_other_data_or_epochs_have_no_verdict(tmp_path: Path) -> None:
    for name, epochs in (("a", 2), ("b", 5)):
        for seed in range(3):
            make_run(tmp_path / name, "lenet", "solo-0", seed, 0.9 + 0.01 * epochs, epochs=epochs)
    (found,) = compare(tmp_path / "a", tmp_path / "b")
    assert found.verdict.startswith("quality: runs with other epochs, ")
