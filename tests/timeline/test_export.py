import csv
import io
import json
from pathlib import Path

from uneven.timeline.export import save_timeline
from uneven.timeline.record import Recorder
from uneven.timeline.sample import Sample
from uneven.timeline.timeline import Timeline


def make_timeline() -> Timeline:
    times = iter(range(5_000_000, 100_000_000, 1_000_000))
    recorder = Recorder(clock=lambda: next(times))
    recorder.enter("data")
    recorder.enter("compute")
    recorder.event("epoch", epoch=1, accuracy=0.5)
    recorder.enter("compute")
    recorder.close()
    return Timeline.merge([Timeline.of(recorder, "cpu", [Sample(6_500_000, 50.0, 100.0, 10, 5, ((0, 80.0, 123),))])])


def test_json_is_complete_and_counts_from_the_start(tmp_path: Path) -> None:
    save_timeline(make_timeline(), tmp_path)
    record = json.loads((tmp_path / "timeline.json").read_text())
    assert record["version"] == 1
    lane = record["ranks"][0]
    assert [record["states"][code] for code in lane["states"]] == ["setup", "data", "compute", "setup"]
    assert lane["starts"] == [0, 1_000_000, 2_000_000, 5_000_000]
    assert lane["end"] == 5_000_000
    assert record["events"] == [{"t": 3_000_000, "rank": 0, "kind": "epoch", "epoch": 1, "accuracy": 0.5}]
    assert record["samples"][0]["t"] == 1_500_000
    assert record["samples"][0]["gpus"] == [[0, 80.0, 123]]
    assert sum(record["accounts"][0]["shares"].values()) == 1


def test_csv_has_a_row_per_span_event_and_sample_in_order(tmp_path: Path) -> None:
    save_timeline(make_timeline(), tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "timeline.csv").read_text())))
    assert [row["kind"] for row in rows] == ["setup", "data", "sample", "compute", "epoch", "setup"]
    assert rows[3]["ms"] == "3.0000"
    assert json.loads(rows[4]["fields"])["accuracy"] == 0.5


def test_json_reads_back_to_the_same_timeline() -> None:
    timeline = make_timeline()
    again = Timeline.from_json(json.loads(json.dumps(timeline.to_json())))
    assert again.to_json() == timeline.to_json()


def test_ranks_of_one_machine_count_from_the_first_start() -> None:
    early, late = (
        Recorder(rank, clock=iter(range(start, start + 50)).__next__) for rank, start in ((0, 100), (1, 130))
    )
    for recorder in (early, late):
        recorder.enter("compute")
        recorder.event("epoch")
        recorder.close()
    together = Timeline.merge([Timeline.of(early, "cpu", []), Timeline.of(late, "cpu@0.4", [])])
    assert [lane.spans[0][1] for lane in together.lanes] == [0, 30]
    assert [event.t_ns for event in together.events] == [2, 32]
    assert [account.rank for account in together.accounts] == [0, 1]


def test_a_rank_whose_number_changed_has_one_lane_with_all_of_its_events(tmp_path: Path) -> None:
    recorder = Recorder(2, clock=iter(range(100, 150)).__next__)
    recorder.event("shares")
    recorder.rank = 0  # the ranks before it were lost
    recorder.event("generation", number=1)
    recorder.close()
    save_timeline(Timeline.merge([Timeline.of(recorder, "cpu", [])]), tmp_path)
    record = json.loads((tmp_path / "timeline.json").read_text())
    assert [(event["rank"], event["kind"]) for event in record["events"]] == [(0, "shares"), (0, "generation")]
    assert [lane["rank"] for lane in record["ranks"]] == [0]
