"""The judgement of a long disturbed run: what grows is seen, what its log takes is not held against it."""

from dataclasses import replace

import pytest

from tests.faults.endurance import LOG_BYTES, MB, Sample, find_trends, judge

FLAT = Sample(0.0, "rank 0", 300.0, 200.0, 6, 14, 1.0, 9, 0)
SEEN = {"code": 0, "stopped": "its time is over", "left": 0, "said": ""}


def samples(**per_minute: float) -> list[Sample]:
    """Two hours of both processes, with figures that grow by so much in a minute."""
    grown = []
    for minute in range(120):
        values = {name: getattr(FLAT, name) + minute * by for name, by in per_minute.items()}
        grown.append(replace(FLAT, minute=float(minute), **values))
    return [replace(one, process=process) for one in grown for process in ("launcher", "rank 0")]


@pytest.mark.parametrize("figure", ["rss", "uss", "threads", "fds", "shm_files", "shm"])
def test_a_figure_that_grows_is_told(figure: str) -> None:
    found = samples(**{figure: 0.5})
    faults = judge({**SEEN, "samples": found}, find_trends(found))
    assert [fault.split(" grows")[0] for fault in faults] == [f"{figure} of launcher", f"{figure} of rank 0"]


def test_a_run_that_keeps_its_log_and_no_more_does_not_grow() -> None:
    found = samples(slots=900, uss=900 * LOG_BYTES / MB)
    assert judge({**SEEN, "samples": found}, find_trends(found)) == []


def test_a_run_that_ended_early_or_left_something_is_told() -> None:
    found = samples()
    assert judge({**SEEN, "samples": found, "left": 1}, []) == ["1 folders are left in /dev/shm"]
    assert judge({**SEEN, "samples": found, "code": 1, "said": "a\nlost\n"}, []) == ["the run ended with 1: ['lost']"]
    assert judge({**SEEN, "samples": found[:4]}, []) == ["2 samples are too few for a verdict"]
