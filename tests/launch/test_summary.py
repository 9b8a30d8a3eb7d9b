"""The last lines of a run: nothing is derived from a speed that other programs disturbed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from uneven import TensorData, fit
from uneven.hardware.interference import Counters, Interference
from uneven.launch.ended import save_interrupted, summary_lines
from uneven.results.progress import Reporter
from uneven.results.state import TrainedState
from uneven.timeline.clock import ClockReading, Machine
from uneven.timeline.record import Event
from uneven.timeline.timeline import LOST, Ended

IDLE = Counters(
    time_s=0.0,
    num_cores=2,
    busy_s=0.0,
    stolen_s=0.0,
    pressure_s=0.0,
    own_cpu_s=0.0,
    num_throttled=0,
)
CALM = replace(IDLE, time_s=10.0, busy_s=18.0, own_cpu_s=18.0)


def trained() -> TrainedState:
    x = torch.randn(32, 4)
    return fit(
        model=lambda: nn.Linear(4, 2),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        step=lambda model, batch: model(batch[0]).square().mean(),
        dataset=TensorData(x),
        batch_size=8,
        epochs=1,
        devices="cpu",
        progress="off",
    )


def lines_of(end: Counters) -> str:
    state = trained()
    assert state.timeline is not None
    measured = Event(0, 0, "shares", {"slot": 0, "shares": [8], "alone": [100.0]})
    timeline = replace(state.timeline, events=[measured, *state.timeline.events])
    return "\n".join(summary_lines(state, timeline, Interference.between(IDLE, end)))


def test_several_machines_are_named_with_their_ranks() -> None:
    state = trained()
    assert state.timeline is not None
    first, second = Machine(0, "pc-anna"), Machine(1, "pc-bert", (ClockReading(0, 5, 5),))
    round_ = {"round": 1, "met_ms_ago": 4.0, "back_ms_ago": 2.0, "left_ms_ago": 5.0, "bytes": 3_000_000}
    timeline = replace(state.timeline, machines=(first, second), events=[Event(10**9, 0, "round", round_)])
    _, rank, network, *_ = summary_lines(state, timeline, Interference.between(IDLE, CALM))
    assert rank.startswith("  cpu on pc-anna: compute ")
    assert network == "  network: 3 MB a round, 1,500 MB/s (slowest: pc-anna)"
    alone, *_ = summary_lines(state, state.timeline, Interference.between(IDLE, CALM))[1:]
    assert alone.startswith("  cpu: ")


def test_an_undisturbed_run_is_put_beside_what_its_devices_do_alone() -> None:
    assert "(of the sum of the devices alone)" in lines_of(CALM)


def test_a_disturbed_run_says_so_and_concludes_nothing() -> None:
    lines = lines_of(replace(CALM, stolen_s=5.0))
    assert "Disturbed: the hypervisor took 22% of the CPU time. Do not compare this speed with another." in lines
    assert "trained 32 samples" in lines
    assert "(of the sum of the devices alone)" not in lines


def test_a_generation_of_ranks_is_no_resumed_run() -> None:
    state = trained()
    assert state.timeline is not None
    generation = {"slot": 2, "samples": 16, "devices": ["cpu"], "generation": 1, "why": "rank 1 was lost"}
    lost = replace(state, segments=[*state.segments, generation])
    calm = Interference.between(IDLE, CALM)
    assert summary_lines(lost, state.timeline, calm)[0] == summary_lines(state, state.timeline, calm)[0]


def test_a_rank_that_is_gone_has_its_line_and_counts_in_the_speed() -> None:
    state = trained()
    assert state.timeline is not None
    (lane,), (account,) = state.timeline.lanes, state.timeline.accounts
    gone = replace(lane, rank=1, device="cpu@0.4", samples=32, ended=Ended(LOST, "rank 1 was killed"))
    timeline = replace(state.timeline, lanes=[lane, gone], accounts=[account, replace(account, rank=1)])
    both = replace(state, samples=64, timeline=timeline)
    first, own, other, *_ = summary_lines(both, timeline, Interference.between(IDLE, CALM))
    assert f"({64 / timeline.training_s:,.0f} samples/s)" in first
    assert own.startswith("  cpu: 50 % of the samples; ")
    assert other.startswith(f"  cpu@0.4 (lost after {gone.end_ns / 1e9:.1f} s): 50 % of the samples; ")


def test_a_stopped_run_that_cannot_write_below_runs_is_saved_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, reporter = trained(), Reporter("lines")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").write_text("a file, so that no folder can be made in it")
    folder = save_interrupted(state, reporter)
    assert folder.parent == tmp_path / "elsewhere"
    assert torch.equal(TrainedState.load(folder).params["weight"], state.params["weight"])
    cannot, saved = capsys.readouterr().err.splitlines()[-2:]
    assert cannot.startswith("cannot write to runs/interrupted-")
    assert saved == f"stopped after 4 steps; the state is in {folder}"


def test_a_run_that_is_stopped_after_one_step_says_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    reporter = Reporter("lines")
    monkeypatch.setattr(reporter, "say", lines.extend)
    folder = save_interrupted(replace(trained(), slot=1), reporter)
    assert lines == [f"stopped after 1 step; the state is in {folder}"]
