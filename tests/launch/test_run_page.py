"""Every run with `out` leaves timeline.html, or one line that says why not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.small_runs import SAMPLES, make, make_optimizer, step
from tests.timeline.synthetic import MS, lanes_of
from uneven import TrainedState, fit
from uneven.config import resolve
from uneven.errors import MachineError
from uneven.hardware.interference import Interference
from uneven.launch import ended
from uneven.timeline.timeline import LEFT, Ended, RunFacts


def test_a_page_is_written_or_a_line_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ended, "write_page", lambda path, *given: written.append((path, *given)))
    monkeypatch.setattr(ended, "find_spec", lambda _: object())
    out = tmp_path / "a"
    state = fit(
        model=make, optimizer=make_optimizer, step=step, dataset=SAMPLES, batch_size=32, epochs=1, devices="cpu",
        progress="lines", out=out,
    )  # fmt: skip
    path, timeline, history, title, facts = written[0]
    assert path == out / "timeline.html"
    assert (len(timeline.lanes), len(history), title, timeline.trained) == (1, 1, "Run a", 64)
    assert (facts["devices"], facts["samples"]) == ("cpu", "64")
    assert timeline.run.is_disturbed is not None
    assert "timeline.html" not in capsys.readouterr().err

    def leave() -> list[str]:
        return ended.leave_page(state, timeline, resolve({"batch_size": 32, "epochs": 1}), out)

    assert leave() == []
    for error, why in ((MachineError("no space left"), "no space left"), (KeyError("x"), "KeyError: 'x'")):

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(ended, "write_page", fail)
        assert leave() == [f"no timeline.html: {why}"]
    monkeypatch.setattr(ended, "find_spec", lambda _: None)
    assert leave() == ["no timeline.html: bokeh is not installed; pip install 'uneven[pages]'"]
    monkeypatch.setenv("UNEVEN_PAGES", "0")
    assert leave() == []


def test_the_cards_name_everyone_who_took_part_and_what_is_of_this_part_of_the_run() -> None:
    states = lanes_of([("compute", 3000 * MS)], [("compute", 1000 * MS)])
    first, gone = states.lanes
    lanes = [replace(first, samples=300), replace(gone, samples=50, ended=Ended(LEFT, "it was needed"))]
    busy = Interference(10.0, 2, 0.3, 0.6, None, None, None, is_throttled=False)
    timeline = replace(states, lanes=lanes, run=RunFacts(7, 1000, busy))
    state = TrainedState({}, {}, samples=1350, timeline=timeline)
    config = resolve({"batch_size": 32, "epochs": 1, "policy": "async"})
    assert ended.facts_of(state, timeline, config) == {
        "devices": "cpu@0, cpu@1 (left)",
        "policy": "async",
        "samples": "1,350, 350 since it was resumed",
        "training": "3.0 s since then",
        "speed": "disturbed by other programs",
    }
