import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bench.folders import make_run
from tools.publish import publish
from uneven.bench.orders import SweepOrder
from uneven.bench.report.build import build_report
from uneven.bench.single.folders import FAILURE, read_equal_time
from uneven.bench.single.process import Ended
from uneven.bench.sweep import run as module
from uneven.bench.sweep.plan import plan_sweep
from uneven.bench.sweep.run import sweep
from uneven.errors import InputError, MachineError


class Machine:
    """Stands for the processes of the runs: notes what was asked for, leaves what they would leave."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.asked: list[list[str]] = []
        self.at_once: list[int] = []  # of each run
        self.repeats: list[bool] = []  # whether it is made again if it was disturbed
        self.fails: set[str] = set()  # modes
        self.speeds: dict[str, float] = {}  # samples/s of a mode, where it is not 1000
        self.interrupts_at: int | None = None

    def run_many(
        self, commands: Iterable[list[str]], at_once: int = 1, variables: Mapping[str, str] | None = None
    ) -> Iterator[tuple[int, Ended]]:
        for position, arguments in enumerate(commands):
            self.at_once.append(at_once)
            self.repeats.append("--no-repeat" not in arguments)
            yield position, self._run(arguments)

    def _run(self, arguments: list[str]) -> Ended:
        words = [word for word in arguments[1:-1] if word != "--no-repeat"]  # without "bench" and "--json"
        given = dict(zip(words[1::2], words[2::2], strict=True))
        if self.interrupts_at == len(self.asked):
            raise KeyboardInterrupt
        self.asked.append(words)
        mode = given.get("--mode", "")
        if mode in self.fails:
            return Ended(1, "", "Traceback ...\nuneven: rank 1 was killed")
        if words[0] == "efficiency":
            flags = ("--devices", "--precision", "--compile")
            told = {name[2:]: given[name] for name in flags} | {"batch_size": int(given.get("--batch-size", 64))}
            return Ended(0, json.dumps({"efficiency": 0.9, **told}), "")
        epochs, data = int(given["--epochs"]), given.get("--data", "mnist")
        asked = {flag[2:].replace("-", "_"): int(value) if value.isdigit() else value for flag, value in given.items()}
        place = (Path(given["--out"]), given["--model"], mode, int(given["--seed"]))
        shutil.rmtree(place[0] / place[1] / mode / f"seed-{place[3]}", ignore_errors=True)
        make_run(*place, 0.9, self.speeds.get(mode, 1000.0), epochs=epochs, data=data, asked=asked)
        return Ended(0, "{}", "")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path / "runs")
    monkeypatch.setattr(module, "run_many", machine.run_many)
    return machine


def order(machine: Machine, **changes: Any) -> SweepOrder:
    given: dict[str, Any] = {"models": ("lenet",), "modes": ("solo-0", "cpu-async"), "seeds": 2, "out": machine.out}
    return SweepOrder(**{**given, **changes})


def quiet(*_: Any) -> None:
    pass


def test_every_mode_that_the_devices_allow_and_the_others_with_the_reason() -> None:
    cells, skipped = plan_sweep(SweepOrder(models=("lenet",), seeds=2))
    assert [(cell.mode, cell.seed) for cell in cells] == [
        *(("solo-0", 0), ("solo-0", 1), ("solo-1", 0), ("sync", 0), ("sync", 1)),
        *((f"cpu-{policy}", seed) for policy in ("sync", "balanced", "cadence", "async") for seed in (0, 1)),
        *(("torch-ddp", 0), ("torch-ddp", 1)),
    ]
    assert {one.mode: one.reason for one in skipped}["nccl-async"] == "NCCL joins CUDA devices only"
    mixed = {one.mode: one.reason for one in plan_sweep(SweepOrder(models=("lenet",), devices="cuda:0,cpu"))[1]}
    assert "GPU and a CPU" in mixed["torch-ddp"]


def test_a_simulated_slow_device_alone_runs_for_its_speed_only() -> None:
    cells, _ = plan_sweep(SweepOrder(models=("lenet",), modes=("solo-1",), seeds=5, epochs=7))
    (slow,) = cells
    assert "--epochs 1" in " ".join(slow.arguments)
    sliced, _ = plan_sweep(
        SweepOrder(models=("lenet",), modes=("solo-1",), seeds=5, epochs=7, devices="cuda:0%60,cuda:0%24")
    )
    assert [(cell.seed, cell.settings["epochs"], cell.is_for_speed) for cell in sliced] == [(0, 5, True)]
    real, _ = plan_sweep(SweepOrder(models=("lenet",), modes=("solo-1",), seeds=5, epochs=7, devices="cpu,cpu"))
    assert len(real) == 5
    assert "--epochs 7" in " ".join(real[0].arguments)


def test_steps_are_captured_where_they_can_be() -> None:
    wanted = ("solo-0", "sync", "cpu-balanced", "torch-ddp")
    given: dict[str, Any] = {"models": ("lenet",), "modes": wanted, "seeds": 1, "devices": "cuda:0,cuda:1"}
    graph, _ = plan_sweep(SweepOrder(compile="graph", **given))
    assert [cell.settings["compile"] for cell in graph] == ["graph", "off", "graph", "off"]
    default, _ = plan_sweep(SweepOrder(compile="default", **given))
    assert [cell.settings["compile"] for cell in default] == ["default", "default", "default", "off"]


def test_a_global_batch_is_for_the_exact_modes_and_ddp() -> None:
    wanted = ("solo-0", "sync", "cpu-balanced", "cpu-async", "torch-ddp")
    cells, _ = plan_sweep(SweepOrder(models=("lenet",), modes=wanted, seeds=1, global_batch_size=64))
    arguments = {cell.mode: " ".join(cell.arguments) for cell in cells}
    assert "--global-batch-size 64" in arguments["sync"]
    assert "--global-batch-size 64" in arguments["cpu-balanced"]
    assert "--batch-size 32" in arguments["torch-ddp"]
    assert "batch-size" not in arguments["cpu-async"]
    assert "batch-size" not in arguments["solo-0"]


def test_learning_rates_are_scaled_where_batches_are_larger() -> None:
    wanted = ("solo-0", "sync", "cpu-balanced", "cpu-async", "torch-ddp")
    cells, _ = plan_sweep(SweepOrder(models=("lenet",), modes=wanted, seeds=1, lr_scale=2.0))
    scaled = [cell.mode for cell in cells if "--lr-scale 2.0" in " ".join(cell.arguments)]
    assert scaled == ["sync", "cpu-balanced", "torch-ddp"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("lenett",)}, "unknown model 'lenett'"),
        ({"modes": ("cpu-fast",)}, "unknown mode 'cpu-fast'"),
        ({"modes": ("solo-2",)}, "there are 2 devices"),
        ({"modes": ("solo-\u00b2",)}, "solo-N means the N-th device"),
        ({"modes": ("nccl-async",)}, "NCCL joins CUDA devices only"),
        ({"jobs": 2}, "runs at once would share cores"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_sweep(SweepOrder(**{"models": ("lenet",), **changes}))


def test_further_seeds_run_several_at_once_and_give_no_speed(machine: Machine) -> None:
    """The first seed of a mode runs alone: all speeds are its own."""
    given = {"seeds": 3, "jobs": 2, "devices": "cuda:0,cuda:1"}
    outcome = sweep(order(machine, **given), quiet)
    assert machine.at_once == [1, 1, 2, 2, 2, 2]
    assert machine.repeats == [True, True, False, False, False, False]
    assert outcome.disturbed == []  # by other programs
    (model,) = build_report(machine.out).models
    for row in model.rows:
        assert (row.seeds, row.is_disturbed) == (3, False)
        assert [(run["is_disturbed"], run["runs_at_once"]) for run in row.runs] == [(False, 1), (True, 2), (True, 2)]
    assert not sweep(order(machine, **given), quiet).done


def test_ranks_that_take_turns_on_a_gpu_have_no_speed_so_all_their_seeds_run_several_at_once(machine: Machine) -> None:
    given = {"modes": ("solo-0", "nccl-async"), "jobs": 2, "devices": "cuda:0,cuda:0"}
    sweep(order(machine, **given), quiet)
    modes = [dict(zip(words[1::2], words[2::2], strict=True))["--mode"] for words in machine.asked]
    assert list(zip(modes, machine.at_once, strict=True)) == [
        *(("solo-0", 1), ("solo-0", 2)),
        *(("nccl-async", 2), ("nccl-async", 2)),
    ]


def test_an_interrupted_sweep_goes_on_where_it_stopped(machine: Machine) -> None:
    machine.interrupts_at = 2
    with pytest.raises(KeyboardInterrupt):
        sweep(order(machine), quiet)
    machine.interrupts_at = None
    again = sweep(order(machine), quiet)
    assert again.kept == ["lenet solo-0 seed 0", "lenet solo-0 seed 1"]
    assert again.done == ["lenet cpu-async seed 0", "lenet cpu-async seed 1"]
    assert len(machine.asked) == 4, "each run once"
    assert sweep(order(machine), quiet).done == []


def test_a_failing_run_is_recorded_and_the_sweep_goes_on(machine: Machine) -> None:
    machine.fails = {"solo-0"}
    outcome = sweep(order(machine, seeds=1), quiet)
    assert outcome.failed == {"lenet solo-0 seed 0": "rank 1 was killed"}
    assert outcome.done == ["lenet cpu-async seed 0"]
    record = json.loads((machine.out / "lenet" / "solo-0" / "seed-0" / FAILURE).read_text())
    assert record["exit_code"] == 1
    assert "Traceback" in record["stderr"]


@pytest.mark.parametrize("is_published", [False, True])
def test_a_repeated_run_that_fails_is_not_hidden_by_the_older_one(machine: Machine, is_published: bool) -> None:
    sweep(order(machine, seeds=1), quiet)
    if is_published:
        machine.out = publish(machine.out, machine.out.parent / "published")
    machine.fails = {"solo-0"}
    sweep(order(machine, seeds=1, is_forced=True), quiet)
    assert [run["reason"] for run in build_report(machine.out).failed] == ["rank 1 was killed"]
    machine.fails = set()
    assert sweep(order(machine, seeds=1), quiet).done == ["lenet solo-0 seed 0"]
    assert build_report(machine.out).failed == []


def test_kept_runs_of_other_settings_are_refused(machine: Machine) -> None:
    sweep(order(machine, seeds=1, epochs=3), quiet)
    for changes, message in [
        ({"epochs": 4}, "holds a run with epochs 3, this sweep has 4"),
        ({"samples": 100}, "samples None, this sweep has 100"),
        ({"batch_size": 32}, "batch_size 64, this sweep has 32"),
        ({"devices": "cpu,cpu"}, "devices 'cpu,cpu@0.4', this sweep has 'cpu,cpu'"),
    ]:
        with pytest.raises(InputError, match=message):
            sweep(order(machine, **{"seeds": 1, "epochs": 3, **changes}), quiet)
    assert sweep(order(machine, seeds=1, epochs=3), quiet).done == []
    assert sweep(order(machine, seeds=1, epochs=3, batch_size=64), quiet).done == [], "64 is the model's own"


def test_efficiency_is_measured_once_per_model_and_mode(machine: Machine) -> None:
    sweep(order(machine, has_efficiency=True), quiet)
    measured = [words for words in machine.asked if words[0] == "efficiency"]
    (words,) = measured
    assert words[words.index("--policy") + 1] == "async"
    assert json.loads((machine.out / "lenet" / "cpu-async" / "efficiency.json").read_text())["efficiency"] == 0.9
    assert words[words.index("--backend") + 1] == "cpu", "the mode's own, also where the GPUs have NCCL"
    sweep(order(machine, has_efficiency=True), quiet)
    assert sum(words[0] == "efficiency" for words in machine.asked) == 1
    path = machine.out / "lenet" / "cpu-async" / "efficiency.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "precision": "bf16"}))
    with pytest.raises(InputError, match="precision"):
        sweep(order(machine, has_efficiency=True), quiet)


def test_other_modes_in_the_folder_have_the_same_epochs(machine: Machine) -> None:
    sweep(order(machine, seeds=2, modes=("solo-0",), epochs=5), quiet)
    for changes in ({"modes": ("cpu-async",)}, {"modes": ("solo-0",), "is_forced": True}):
        with pytest.raises(InputError, match="epochs 5"):
            sweep(order(machine, seeds=1, epochs=10, **changes), quiet)
    assert len(machine.asked) == 2
    for other in ({"devices": "cpu,cpu"}, {"precision": "bf16"}):
        with pytest.raises(InputError, match=next(iter(other))):
            sweep(order(machine, seeds=1, epochs=5, modes=("cpu-async",), **other), quiet)


def test_a_quick_sweep_has_one_seed_unless_it_is_told_otherwise() -> None:
    def seeds(**given: Any) -> int:
        cells, _ = plan_sweep(SweepOrder(models=("lenet",), modes=("solo-0",), **given))
        return len(cells)

    assert (seeds(), seeds(is_quick=True), seeds(is_quick=True, seeds=3)) == (5, 1, 3)


def test_a_folder_that_cannot_be_made(machine: Machine) -> None:
    machine.out.write_text("")
    with pytest.raises(MachineError):
        sweep(order(machine), quiet)


def test_at_equal_time_a_faster_mode_trains_as_many_epochs_as_fit(machine: Machine) -> None:
    machine.speeds = {"cpu-async": 1500.0, "cpu-sync": 600.0}
    given = order(machine, modes=("solo-0", "cpu-sync", "cpu-async"), seeds=1, has_equal_time=True)
    outcome = sweep(given, quiet)
    assert outcome.done[-1] == "lenet cpu-async seed 0 at equal time"
    assert len(outcome.done) == 4, "nothing fits into less time than sync takes"
    (run,) = read_equal_time(machine.out)
    assert run.summary.epochs == 7  # of 5 that take two thirds of the time: 7.35 fit
    (row,) = [row for row in build_report(machine.out).models[0].rows if row.mode == "cpu-async"]
    assert (row.seeds, row.equal_time_epochs) == (1, 7)
    assert [one["epochs"] for one in row.runs] == [5, 7]
    machine.speeds = {}  # the epochs that would fit now are others
    assert sweep(given, quiet).done == []


def test_all_seeds_have_the_epochs_that_fit_on_average(machine: Machine) -> None:
    for seed, speed in enumerate((1100.0, 1500.0, 1400.0)):
        machine.speeds = {"cpu-async": speed}
        sweep(order(machine, seeds=seed + 1), quiet)
    sweep(order(machine, seeds=3, has_equal_time=True), quiet)
    assert [run.summary.epochs for run in read_equal_time(machine.out)] == [6, 6, 6]


def test_runs_at_equal_time_need_those_that_they_are_held_against(machine: Machine) -> None:
    machine.fails, machine.speeds = {"solo-0"}, {"cpu-async": 1500.0}
    assert sweep(order(machine, seeds=1, has_equal_time=True), quiet).done == ["lenet cpu-async seed 0"]
    machine.fails = set()
    sweep(order(machine, seeds=1, modes=("solo-0",)), quiet)
    alone = sweep(order(machine, seeds=1, modes=("cpu-async",), has_equal_time=True), quiet)
    assert alone.done == ["lenet cpu-async seed 0 at equal time"], "the single device of an earlier sweep"


def test_a_sweep_goes_on_from_published_files(machine: Machine) -> None:
    """Where machines come and go, the runs are gone with them and the published files are what is left."""
    sweep(order(machine, seeds=1, has_efficiency=True), quiet)
    results = publish(machine.out, machine.out.with_name("results"))
    again = sweep(order(machine, out=results, has_efficiency=True), quiet)
    assert again.kept == ["lenet solo-0 seed 0", "lenet cpu-async seed 0", "lenet cpu-async efficiency"]
    assert again.done == ["lenet solo-0 seed 1", "lenet cpu-async seed 1"]
    assert [row.seeds for row in build_report(results).models[0].rows] == [2, 2]
    sweep(order(machine, out=results, is_forced=True), quiet)
    assert [row.seeds for row in build_report(results).models[0].rows] == [2, 2], "a run and its file are one"
