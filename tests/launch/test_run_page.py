"""Every run with `out` leaves timeline.html, or one line that says why not."""

from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_restarts import SAMPLES, make, make_optimizer, step
from uneven import fit
from uneven.config import resolve
from uneven.errors import MachineError
from uneven.launch import run_page


def test_a_page_is_written_or_a_line_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[tuple[Any, ...]] = []
    monkeypatch.setattr(run_page, "write_page", lambda path, *given: written.append((path, *given)))
    monkeypatch.setattr(run_page, "find_spec", lambda _: object())
    out = tmp_path / "a"
    state = fit(
        model=make, optimizer=make_optimizer, step=step, dataset=SAMPLES, batch_size=32, epochs=1, devices="cpu",
        progress="lines", out=out,
    )  # fmt: skip
    path, timeline, history, title, facts, samples = written[0]
    assert path == out / "timeline.html"
    assert (len(timeline.lanes), len(history), title, sum(samples)) == (1, 1, "Run a", 64)
    assert (facts["devices"], facts["samples"]) == ("cpu", "64")
    assert "timeline.html" not in capsys.readouterr().err

    def leave() -> list[str]:
        return run_page.leave_page(state, timeline, resolve({"batch_size": 32, "epochs": 1}), out)

    assert leave() == []
    for error, why in ((MachineError("no space left"), "no space left"), (KeyError("x"), "KeyError: 'x'")):

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(run_page, "write_page", fail)
        assert leave() == [f"no timeline.html: {why}"]
    monkeypatch.setattr(run_page, "find_spec", lambda _: None)
    assert leave() == ["no timeline.html: bokeh is not installed; pip install 'uneven[pages]'"]
    monkeypatch.setenv("UNEVEN_PAGES", "0")
    assert leave() == []
