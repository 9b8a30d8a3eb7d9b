"""Two runs on one time axis: each from its first step, both with the same scale."""

import pytest

from tests.timeline.synthetic import MS, lanes_of, make_run

pytest.importorskip("bokeh", reason="pages need bokeh: pip install -e '.[pages]'")

from uneven.timeline.side_by_side import compare_lanes, training_part


def test_the_part_of_a_run_that_is_compared_begins_with_its_first_step_and_ends_with_its_last() -> None:
    run = lanes_of(
        [("setup", 100 * MS), ("compute", 40 * MS), ("wait", 60 * MS), ("evaluation", 30 * MS), ("compute", 1000)],
        [("setup", 120 * MS), ("compute", 70 * MS), ("evaluation", 40 * MS)],
    )
    cut = training_part(run)
    assert cut.lanes[0].spans == [("compute", 0, 40 * MS), ("wait", 40 * MS, 90 * MS)]
    assert cut.lanes[1].spans == [("setup", 0, 20 * MS), ("compute", 20 * MS, 90 * MS)]
    assert [account.training_s for account in cut.accounts] == [0.09, 0.07]
    nothing = lanes_of([("setup", 5)])
    assert training_part(nothing) is nothing


def test_the_charts_share_axis_and_keys() -> None:
    short, long = make_run(2, steps=20, epochs=1), make_run(3, steps=90, epochs=1, seed=1)
    charts = compare_lanes({"torch-ddp": long, "cpu-async": short})
    first, second = charts.values()
    assert first.figure.x_range is second.figure.x_range
    assert {first.figure.name, second.figure.name} == {"lanes-0", "lanes-1"}
    labels = [key.label for key in first.keys]
    assert {"compute", "wait", "communication", "round"} <= set(labels)
    assert len(labels) == len(set(labels))
    assert second.keys == []
    names = {drawn.name for drawn in second.figure.renderers if str(drawn.name).startswith("state-")}
    assert names <= {name for key in first.keys for name in key.renderers}, "a key works on both"
