"""Scaling over machines: from the folders of finished runs, with what their timelines say beside the fitted law."""

import json
from pathlib import Path

import pytest

from tests.bench.folders import make_timeline
from uneven.bench.scaling import (
    Measured,
    fitted,
    overhead_of,
    parse_runs,
    predict,
    read_measured,
    scaling_of_nodes,
    write_scaling_page,
)
from uneven.errors import InputError
from uneven.files import json_text
from uneven.timeline.clock import Machine
from uneven.timeline.record import STATES, Account


def account(rank: int, **seconds: float) -> Account:
    return Account(rank, dict.fromkeys(STATES, 0.0) | seconds)


def make_run(folder: Path, samples_per_s: float, nodes: int, *, is_finished: bool = True) -> Path:
    folder.mkdir()
    seconds = 2000 / samples_per_s
    history = [{"epoch": n, "samples": 1000 * n, "train_seconds": seconds * n / 2} for n in (1, 2)]
    (folder / "state.json").write_text(json.dumps({"finished": is_finished, "history": history}))
    (folder / "timeline.json").write_text(json.dumps(make_timeline(["cpu"] * nodes, seconds).to_json()))
    return folder


def test_communication_over_computation_is_that_of_all_ranks() -> None:
    ranks = [account(0, compute=8.0, communication=1.0, setup=9.0), account(1, compute=2.0, wait=1.0, data=3.0)]
    assert overhead_of(ranks) == pytest.approx(0.2)
    assert overhead_of([account(0, setup=3.0)]) is None


def test_where_ranks_only_communicate_besides_the_timeline_tells_the_fitted_law() -> None:
    """45 tokens/s alone and alpha 0.15: N ranks spend alpha (N - 1) beside computing."""
    alpha = 0.15
    runs = {n: [Measured(45.0 * predict(n, alpha), alpha * (n - 1))] for n in (1, 2, 3)}
    found, points = fitted(runs, tokens=1)
    assert found == pytest.approx(alpha)
    assert [point.alpha for point in points[1:]] == pytest.approx([alpha, alpha])
    assert [point.by_timeline for point in points[1:]] == pytest.approx([point.speedup for point in points[1:]])
    assert [point.predicted for point in points] == pytest.approx([1.0, predict(2, alpha), predict(3, alpha)])
    assert points[0].overhead is None, "one rank has nobody to talk to"


def test_without_a_timeline_the_law_is_fitted_all_the_same() -> None:
    _, points = fitted({1: [Measured(10.0, None)], 2: [Measured(16.0, None), Measured(18.0, 0.2)]}, tokens=1)
    assert points[1].speedup == pytest.approx(1.7)
    assert points[1].overhead == pytest.approx(0.2), "of the runs that have one"


def test_finished_runs_of_machines_become_one_table(tmp_path: Path) -> None:
    for nodes, speed in ((1, 1000.0), (2, 1600.0), (3, 2000.0)):
        make_run(tmp_path / f"{nodes}", speed, nodes)
    found = scaling_of_nodes(",".join(f"{nodes}={tmp_path / str(nodes)}" for nodes in (3, 1, 2)), tokens=128)
    assert (found.counted, found.unit) == ("nodes", "tokens")
    assert [point.ranks for point in found.points] == [1, 2, 3]
    assert [point.per_s for point in found.points] == pytest.approx([128_000, 204_800, 256_000])
    assert found.points[1].overhead == pytest.approx(1 / 3), "make_timeline: a quarter of the time is waiting"
    assert found.points[2].alpha == pytest.approx(1 / 6)
    assert found.points[2].by_timeline == pytest.approx(3 / (1 + 1 / 3))
    assert json.loads(json_text(found))["counted"] == "nodes"
    write_scaling_page(found, "machines", tmp_path / "page.html")
    assert "nodes" in (tmp_path / "page.html").read_text()


def test_a_run_counts_once_and_for_the_machines_that_it_was_on(tmp_path: Path) -> None:
    """One run as that of one machine and of two would be a speed-up of 1.00."""
    one, other = make_run(tmp_path / "one", 1000.0, 1), make_run(tmp_path / "other", 1600.0, 2)
    with pytest.raises(InputError, match="is there twice"):
        scaling_of_nodes(f"1={one},2={one.parent / 'other' / '..' / 'one'}")
    recorded = json.loads((other / "timeline.json").read_text())
    machines = [Machine(0, "localhost").to_json()]
    (other / "timeline.json").write_text(json.dumps({**recorded, "machines": machines}))
    with pytest.raises(InputError, match="other: that run was on 1 machine, as its timeline tells"):
        scaling_of_nodes(f"1={one},2={other}")


@pytest.mark.parametrize("history", [[{}], [None], [{"samples": 5, "train_seconds": 0.0}], [{"samples": "5"}]])
def test_a_run_that_tells_no_speed_is_refused(history: list[object], tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", 1000.0, 1)
    (folder / "state.json").write_text(json.dumps({"finished": True, "history": history}))
    with pytest.raises(InputError, match="does not tell how many samples"):
        scaling_of_nodes(f"1={folder}")


def test_a_timeline_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", 1000.0, 1)
    for text in ("[]", "{", '{"version": 1}', "null"):
        (folder / "timeline.json").write_text(text)
        assert scaling_of_nodes(f"1={folder}").points[0].per_s == pytest.approx(1000.0)


@pytest.mark.parametrize("text", ["", "one", "0=a", "x=a", "1=", "1=a,2"])
def test_runs_that_cannot_be_read_are_refused_by_word(text: str) -> None:
    with pytest.raises(InputError, match="must be a number of nodes and a folder"):
        parse_runs(text)


def test_speedups_need_a_run_of_one_node_and_runs_that_have_ended(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must have a run of 1 node"):
        parse_runs("2=a,3=b")
    assert parse_runs("2=b, 1=a,2=c") == {1: [Path("a")], 2: [Path("b"), Path("c")]}
    with pytest.raises(InputError, match="no finished run in"):
        read_measured(tmp_path / "missing", 1)
    with pytest.raises(InputError, match="no finished run in"):
        read_measured(make_run(tmp_path / "stopped", 10.0, 1, is_finished=False), 1)
