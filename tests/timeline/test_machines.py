"""Several machines in every form of a timeline: JSON, CSV, trace, page, and what the network carried."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.timeline.synthetic import history, make_machines, make_run
from uneven.timeline.cold_start import cold_starts
from uneven.timeline.export import save_timeline, to_trace
from uneven.timeline.idle import mean_sampled
from uneven.timeline.links import machine_links
from uneven.timeline.record import Event

HOSTS = ["pc-anna", "pc-bert", "laptop"]


def test_json_and_csv_name_the_machine_its_host_its_offset_and_its_error(tmp_path: Path) -> None:
    save_timeline(make_machines(9), tmp_path)
    record = json.loads((tmp_path / "timeline.json").read_text())
    assert record["version"] == 1
    assert [(m["machine"], m["host"], m["error_ns"]) for m in record["machines"]] == [
        (0, "pc-anna", 0),
        (1, "pc-bert", 210_000),
        (2, "laptop", 2_000_000),
    ]
    assert [m["offset_ns"] for m in record["machines"]] == [0, 60 * 10**9, -3600 * 10**9]
    assert [link["round_bytes"] for link in record["links"]] == [178_500] * 3
    rows = list(csv.DictReader(io.StringIO((tmp_path / "timeline.csv").read_text())))
    clocks = [(row["machine"], row["host"], json.loads(row["fields"])) for row in rows if row["kind"] == "clock"]
    assert [(machine, host) for machine, host, _ in clocks] == [("0", "pc-anna"), ("1", "pc-bert"), ("2", "laptop")]
    assert clocks[2][2]["offset_ms"] == -3_600_000.0
    assert clocks[2][2]["error_ms"] == 2.0
    assert {(row["rank"], row["host"]) for row in rows if row["kind"] == "compute"} == {
        *(("0", "pc-anna"), ("1", "pc-bert"), ("2", "pc-bert"), ("3", "laptop"))
    }
    assert {row["host"] for row in rows if row["kind"] == "sample"} == set(HOSTS)


def test_a_trace_names_the_hosts_and_has_counters_for_each_machine() -> None:
    trace = to_trace(make_machines(9))
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert list(names.values())[:4] == [
        *("rank 0: cpu@0 on pc-anna", "rank 1: cpu@1 on pc-bert", "rank 2: cpu@2 on pc-bert", "rank 3: cpu@3 on laptop")
    ]
    counters = {names[e["pid"]] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert counters == {f"machine {host}" for host in HOSTS}
    assert [machine["host"] for machine in trace["otherData"]["machines"]] == HOSTS
    assert trace["otherData"]["machines"][1]["error_ms"] == 0.21
    one = to_trace(make_run(steps=9))["traceEvents"]
    assert "rank 0: cpu@0" in {e["args"]["name"] for e in one if e["name"] == "process_name"}


def test_the_speed_of_a_link_is_that_of_the_first_ranks_rounds() -> None:
    anna, bert, laptop = machine_links(make_machines(9))
    assert (bert.ranks, bert.rounds, bert.round_bytes, bert.total_bytes) == ((1, 2), 8, 178_500, 8 * 178_500)
    assert anna.round_ms == pytest.approx(4.0)
    assert anna.mb_per_s == pytest.approx(178.5 / 4.0, rel=1e-3)
    assert laptop.round_ms == pytest.approx(8.0 + 4.5)
    assert laptop.mb_per_s is not None
    assert laptop.mb_per_s < 20
    assert machine_links(make_run(steps=9)) == []


def test_steps_of_the_exact_policies_have_bytes_and_time_but_no_speed() -> None:
    run = make_machines(9)
    sent = {"steps": 9, "collectives": 30, "payload_bytes": 9_000, "wait_s": 0.1}
    events = [event for event in run.events if event.kind != "round"]
    exact = replace(run, events=[*events, *(Event(5, rank, "traffic", sent) for rank in range(4))])
    first = machine_links(exact)[0]
    assert (first.steps, first.step_bytes, first.mb_per_s, first.total_bytes) == (9, 1_000, None, 9_000)
    assert first.step_ms == pytest.approx(1e3 * run.accounts[0].seconds["communication"] / 9)
    assert machine_links(replace(run, events=events))[0].total_bytes == 0


def test_samples_are_averaged_per_machine() -> None:
    run = make_machines(9)
    doubled = [replace(s, cpu=90.0) if s.machine == 2 else replace(s, cpu=10.0) for s in run.samples]
    means = [mean_sampled(replace(run, samples=doubled), machine=number)["cpu"] for number in range(3)]
    assert means == pytest.approx([10.0, 10.0, 90.0])


def test_a_cold_start_names_the_host() -> None:
    assert [start.device for start in cold_starts(make_machines(9))][3] == "cpu@3 on laptop"


def test_a_table_and_a_chart_show_clocks_and_links() -> None:
    pytest.importorskip("bokeh", reason="pages need bokeh: pip install -e '.[pages]'")
    from uneven.timeline.charts import TimeAxis
    from uneven.timeline.page_machines import link_chart, machine_table

    table = machine_table(make_machines(9)).partition("<tbody>")[2]
    assert re.findall(r"<tr><th>(.*?)</th>", table) == HOSTS
    bert = re.findall(r"<td>(.*?)</td>", table)[8:16]
    assert bert[:2] == ["1, 2", "+60.000 s<small>+-0.21 ms</small>"]
    assert bert[3:] == ["8", "178.5 kB", "4 ms", "44.6 MB/s", "1.4 MB"]
    chart = link_chart(make_machines(9), {}, TimeAxis.until(1.0, ["0: cpu"]))
    assert chart is not None
    assert [key.label for key in chart.keys] == HOSTS
    assert machine_table(make_run(steps=9)) == ""
    assert link_chart(make_run(steps=9), {}, TimeAxis.until(1.0, ["0: cpu"])) is None


@pytest.mark.soak
def test_a_page_groups_the_lanes_by_machine(tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="pages need bokeh: pip install -e '.[pages]'")
    from uneven.timeline.page import write_page

    run = make_machines(9)
    nasty = "<script>alert(1)</script>"
    machines = (*run.machines[:2], replace(run.machines[2], host=nasty))
    write_page(tmp_path / "page.html", replace(run, machines=machines), history(), "three")
    text = (tmp_path / "page.html").read_text()
    assert "<script>alert(1)" not in text
    assert re.findall(r'<figure id="([\w-]+)"', text)[:3] == ["lanes", "links", "busy"]
    table = text.partition('<table id="machines">')[2].partition("</table>")[0].partition("<tbody>")[2]
    assert re.findall(r"<tr><th>(.*?)</th>", table) == ["pc-anna", "pc-bert", "&lt;script&gt;alert(1)&lt;/script&gt;"]
    assert "+-0.21 ms" in text
    assert "1: cpu@1 on pc-bert" in text


def test_lanes_stand_below_the_heading_of_their_machine() -> None:
    pytest.importorskip("bokeh", reason="pages need bokeh: pip install -e '.[pages]'")
    from uneven.timeline.charts import TimeAxis
    from uneven.timeline.lanes import lane_chart

    run = make_machines(9)
    # Ranks of a machine need not follow each other.
    places = (0, 1, 2, 1)
    run = replace(run, lanes=[replace(lane, machine=places[lane.rank]) for lane in run.lanes])
    chart = lane_chart(run, [], [], {}, TimeAxis.until(1.0, ["0: cpu"]))
    labels = {label.y: label.text for label in chart.figure.center if hasattr(label, "text")}
    ticks = dict(chart.figure.yaxis[0].major_label_overrides)
    order = [text for _, text in sorted({**labels, **ticks}.items(), reverse=True)]
    assert order == [
        *("pc-anna: 1 rank", "0: cpu@0", "pc-bert: 2 ranks, times +-0.21 ms", "1: cpu@1", "3: cpu@3"),
        *("laptop: 1 rank, times +-2 ms", "2: cpu@2"),
    ]
    alone = lane_chart(make_run(steps=9), [], [], {}, TimeAxis.until(1.0, ["0: cpu"]))
    assert not [thing for thing in alone.figure.center if hasattr(thing, "text")]
