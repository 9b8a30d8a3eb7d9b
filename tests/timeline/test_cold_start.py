"""The cold start of a run: phases per rank, who waited for whom, and where it is shown."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from uneven import TensorData, fit
from uneven.timeline.cold_start import RankStart, cold_starts, describe_cold_starts
from uneven.timeline.export import save_timeline
from uneven.timeline.page import _cold_table
from uneven.timeline.record import Event, Recorder, Span, account_of
from uneven.timeline.timeline import Lane, Timeline

SECOND = 1_000_000_000


def prepared(rank: int, phase: str, ms: float, **fields: Any) -> Event:
    return Event(0, rank, "prepared", {"phase": phase, "ms": ms, **fields})


def timeline(*events: Event) -> Timeline:
    spans: list[Span] = [("setup", 0, 9 * SECOND)]
    lanes = [Lane(rank, device, spans) for rank, device in enumerate(("cuda:0", "cpu@0.4", "cpu"))]
    return Timeline(lanes, [account_of(lane.rank, spans) for lane in lanes], list(events), [])


SLOW_COMPILER = timeline(
    prepared(0, "compile", 1500.0),
    prepared(0, "capture", 250.0),
    prepared(0, "capture", 250.0),
    prepared(1, "compile", 6000.0),
    prepared(0, "step", 300.0, slot=7, samples=40),
    Event(2 * SECOND, 0, "ready", {}),
    Event(7 * SECOND, 1, "ready", {}),
    Event(6 * SECOND, 2, "ready", {}),
)


def test_every_rank_has_its_phases_and_waits_for_the_one_that_was_ready_last() -> None:
    assert cold_starts(SLOW_COMPILER) == [
        RankStart(0, "cuda:0", {"compile": 1.5, "capture": 0.5}, 5.0, 1, ((7, 0.3),)),
        RankStart(1, "cpu@0.4", {"compile": 6.0}),
        RankStart(2, "cpu", {}, 1.0, 1),
    ]


def test_the_summary_tells_it_only_where_something_was_built_or_waited_for() -> None:
    assert describe_cold_starts(cold_starts(SLOW_COMPILER)) == [
        "  cold start of cuda:0 (rank 0): compile 1.5 s, capture 0.5 s, waited 5.0 s for cpu@0.4 (rank 1), "
        "first steps of a size 0.3 s (slots 7)",
        "  cold start of cpu@0.4 (rank 1): compile 6.0 s",
        "  cold start of cpu (rank 2): waited 1.0 s for cpu@0.4 (rank 1)",
    ]
    quick = timeline(prepared(0, "measure", 900.0), Event(0, 0, "ready", {}), Event(SECOND // 2, 1, "ready", {}))
    assert describe_cold_starts(cold_starts(quick)) == []
    assert cold_starts(quick)[0].waited_s == 0.5, "it is in the files all the same"


def test_nobody_waits_for_a_rank_that_joins_later() -> None:
    """All ranks of the start were said to have waited for it, for as long as the run was on."""
    found = cold_starts(
        timeline(
            Event(2 * SECOND, 0, "ready", {"joins": False}),
            Event(3 * SECOND, 1, "ready", {"joins": False}),
            Event(900 * SECOND, 2, "ready", {"joins": True}),
            prepared(2, "compile", 2000.0),
        )
    )
    assert found == [
        RankStart(0, "cuda:0", {}, 1.0, 1),
        RankStart(1, "cpu@0.4", {}),
        RankStart(2, "cpu", {"compile": 2.0}),
    ]


def test_a_run_without_these_events_has_no_cold_start_to_show() -> None:
    assert [start.phases for start in cold_starts(timeline())] == [{}, {}, {}]
    assert _cold_table(timeline()) == ""


def test_page_and_json_show_it(tmp_path: Path) -> None:
    table = _cold_table(SLOW_COMPILER)
    assert "<th>compile</th><th>capture</th><th>waited</th>" in table
    assert "<td>1.50 s</td><td>0.50 s</td><td>5.00 s<small>for rank 1</small></td>" in table
    save_timeline(SLOW_COMPILER, tmp_path)
    record = json.loads((tmp_path / "timeline.json").read_text())
    assert record["cold_start"][0]["phases"] == {"compile": 1.5, "capture": 0.5}
    assert (record["cold_start"][2]["waited_s"], record["cold_start"][2]["waited_for"]) == (1.0, 1)
    assert Timeline.from_json(record).lanes == SLOW_COMPILER.lanes


def test_a_phase_is_an_event_with_its_length() -> None:
    times = iter((0, 5_000_000, 12_000_000, 13_000_000))
    recorder = Recorder(clock=lambda: next(times))
    with recorder.phase("capture"):
        pass
    assert recorder.events[0].fields == {"phase": "capture", "ms": 7.0}


class Compiled(nn.Linear):
    """Compiles in no time: a real compiler would take seconds."""

    def compile(self, *args: Any, **kwargs: Any) -> None: ...


def test_a_compiled_run_records_its_compilation() -> None:
    state = fit(
        model=lambda: Compiled(4, 2),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        step=lambda model, batch: model(batch).square().mean(),
        dataset=TensorData(torch.randn(16, 4)),
        batch_size=8,
        epochs=1,
        devices="cpu",
        compile="default",
        progress="off",
    )
    assert state.timeline is not None
    (start,) = cold_starts(state.timeline)
    assert list(start.phases) == ["compile"]
    assert start.waited_for is None
