"""What is shown of the status of ranks. Not on a terminal, rich draws it once, at the end."""

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.results.heartbeats import ENTRY, TOTAL, pair, status
from uneven.launch.run_status import RankReport
from uneven.policy.axis import Axis
from uneven.results.progress import Reporter, bars_only, describe_rounds


@pytest.fixture
def last_frame(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The rows that stand when a run has closed, after these heartbeats one after the other."""

    def draw(*heartbeats: list[dict[str, Any]], columns: int = 120) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        with bars_only():
            reporter = Reporter("bar", "lenet cpu-async")
        for statuses in heartbeats:
            reporter.ranks(statuses)
        reporter.close()
        return [line.rstrip() for line in capsys.readouterr().err.splitlines() if line.strip()]

    return draw


def test_a_run_that_is_over_stands_at_a_hundred_percent_though_its_last_steps_were_in_no_heartbeat(last_frame) -> None:  # type: ignore[no-untyped-def]
    whole, fast, slow = last_frame(pair(6900, 2700), pair(6900, 2700, history=[ENTRY]))
    assert "100 %" in whole
    assert "2,400 samples/s" in whole
    assert "ETA" not in whole
    assert "share 72 %" in fast
    assert "share 28 %" in slow
    # The pieces of the devices make up the bar of the run, without gap or overlap.
    line = "\u2501"
    assert (fast + slow).count(line) == whole.count(line) == 40
    assert slow.index(line) == fast.rindex(line) + 1


def test_a_run_in_progress_is_shown_by_device_with_share_and_speed(last_frame) -> None:  # type: ignore[no-untyped-def]
    whole, fast, slow = last_frame(pair(3600, 1400))
    assert "lenet cpu-async" in whole
    assert "50 %" in whole
    assert "1,250 samples/s  loss 0.2500" in whole
    assert fast.startswith("  cpu ")
    assert "share 72 %" in fast
    assert fast.endswith(" 900")
    assert slow.startswith("  cpu@0.4 ")
    assert slow.endswith(" 350")


def test_a_run_with_max_steps_counts_them(last_frame, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    limit = {"steps": 400, "has_max_steps": True}
    whole, *_ = last_frame(pair(3600, 1400, **limit))
    assert "samples/s  step 200/400  loss 0.2500" in whole
    inside = ENTRY | {"step": 200, "samples": 5000, "is_inside_epoch": True}
    whole, *_ = last_frame(pair(3600, 1400, history=[inside], **limit))
    assert "50 %" in whole
    whole, *_ = last_frame(pair(3600, 1400, history=[inside, ENTRY | {"step": 400}], **limit))
    assert "step 400/400" in whole
    whole, *_ = last_frame(pair(3600, 1400, steps=400))
    assert "step" not in whole
    monkeypatch.setenv("COLUMNS", "120")
    reporter = Reporter("bar", "solo")
    rank = RankReport("cpu", reporter)
    rank.started(Axis(TOTAL, 100, 9, max_slots=150), "cpu")
    rank.stepped(5000, 5000, 2.0, 0.125)
    reporter.close()
    *_, bar = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert "33 % 2,500 samples/s  step 50/150  loss 0.1250" in bar


def test_an_evaluation_inside_an_epoch_is_a_line_with_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter("lines")
    RankReport("cpu", reporter).started(Axis(TOTAL, 10, 3), "cpu")
    reporter.epoch_done(ENTRY | {"epoch": 2, "step": 1500, "is_inside_epoch": True, "accuracy": 0.5})
    line = "epoch 2/3, step 1,500  train_loss 0.5000  accuracy 0.5000  2,500 samples/s  4.0 s"
    assert capsys.readouterr().err.strip() == line


def test_a_local_policy_shows_where_each_device_is_among_the_rounds(last_frame) -> None:  # type: ignore[no-untyped-def]
    rounds = {"round": 12, "staleness": 3, "anchor": 13.6, "delay": 0.44}
    _, fast, slow = last_frame(
        [status(3600, "cpu", rounds=rounds), status(1400, "cpu@0.4", rounds={**rounds, "staleness": 0})]
    )
    assert "round 12 anchor 14 staleness 3 delay 0.4" in fast
    assert "staleness 0" in slow
    assert describe_rounds({}) == ""


@pytest.mark.parametrize("columns", [80, 200])
def test_everything_but_the_bar_keeps_its_room(last_frame, columns: int) -> None:  # type: ignore[no-untyped-def]
    rounds = {"round": 128, "staleness": 13, "anchor": 136.6, "delay": 10.44}
    lines = last_frame(pair(3600, 1400, rounds=rounds), columns=columns)
    assert all(len(line) <= columns for line in lines)
    assert "ETA 0:04" in lines[0]
    assert all(line.endswith("delay 10.4") for line in lines[1:])


def test_before_anybody_trains_the_bar_says_that_it_starts(last_frame) -> None:  # type: ignore[no-untyped-def]
    (line,) = last_frame([{}, {}], [{"phase": "setup", "slot": 0, "device": "cpu"}, {}])
    assert "starting" in line
    assert "%" not in line


def test_the_loss_is_that_of_all_ranks_that_have_one(last_frame) -> None:  # type: ignore[no-untyped-def]
    assert "loss -" in last_frame(pair(3700, 1500, loss=None))[0]
    mixed = [status(3000, "cpu", loss=0.1), status(1000, "cpu@0.4", loss=0.5)]
    assert "loss 0.2000" in last_frame(mixed)[0]


def test_a_loss_that_is_nan_is_shown_as_it_is(last_frame) -> None:  # type: ignore[no-untyped-def]
    assert "loss nan" in last_frame(pair(3600, 1400), pair(3700, 1500, loss=float("nan")))[0]


@pytest.mark.parametrize(
    ("losses", "shown"),
    [((None,), "loss -"), ((0.125, None), "loss 0.1250"), ((0.125, float("nan")), "loss nan")],
)
def test_a_device_alone_shows_no_loss_until_there_is_one(
    losses: tuple[float | None, ...],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    reporter = Reporter("bar", "solo")
    rank = RankReport("cpu", reporter)
    rank.started(Axis(TOTAL, 100, 1), "cpu")
    for number, loss in enumerate(losses, 1):
        rank.stepped(1000 * number, 1000 * number, 2.0 * number, loss)
    reporter.close()
    assert f"samples/s  {shown}  " in capsys.readouterr().err


def test_an_evaluation_is_named(last_frame) -> None:  # type: ignore[no-untyped-def]
    assert "evaluation" in last_frame(pair(7000, 2900, phase="evaluation"))[0]


def test_devices_of_one_name_are_told_apart_by_rank(last_frame) -> None:  # type: ignore[no-untyped-def]
    _, *devices = last_frame([status(1000, "cpu"), status(1000, "cpu"), status(500, "cpu@0.5")])
    assert [line.split("\u2501")[0].strip() for line in devices] == ["cpu #0", "cpu #1", "cpu@0.5"]


def test_devices_of_several_machines_stand_below_the_name_of_theirs(last_frame) -> None:  # type: ignore[no-untyped-def]
    anna, bert = {"machine": 0, "host": "pc-anna"}, {"machine": 1, "host": "pc-bert"}
    ranks = [status(2000, "cuda:0", **anna), status(800, "cpu", **bert), status(1000, "cpu@0.4", **anna)]
    ranks.append(status(200, "cpu", **bert))
    whole, *rows = last_frame(ranks)
    assert "40 %" in whole
    names = [re.split(r"\u2501|share", row)[0].rstrip() for row in rows]
    assert names == ["  pc-anna", "    cuda:0", "    cpu@0.4", "  pc-bert", "    cpu #1", "    cpu #3"]
    assert [row.split("share ")[1].split()[0] for row in rows] == ["75", "50", "25", "25", "20", "5"]
    assert [row.split()[-1] for row in rows] == ["750", "500", "250", "250", "200", "50"]
    # The section of a machine is that of its devices together.
    line = "\u2501"
    anna_row, *of_anna = rows[:3]
    assert anna_row.count(line) == sum(row.count(line) for row in of_anna)
    assert rows[3].index(line) == anna_row.rindex(line) + 1


def test_a_rank_that_trained_nothing_yet_is_shown_too(last_frame) -> None:  # type: ignore[no-untyped-def]
    _, fast, slow = last_frame([status(0, "cpu", seconds=0.0), status(0, "cpu@0.4", seconds=0.0)])
    assert "share 0 %" in fast
    assert "share 0 %" in slow


def test_lines_tell_each_epoch_and_note_once(capsys: pytest.CaptureFixture[str]) -> None:
    reporter, heard = Reporter("lines"), []
    reporter.listen(heard.append)
    for _ in range(3):
        reporter.ranks(pair(5000, 2000, history=[ENTRY], notes=["  a word"]))
    reporter.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["  a word", "epoch 1/1  train_loss 0.5000  2,500 samples/s  4.0 s"]
    assert heard == [ENTRY]


def spanning(epoch: int, first: int, last: int, **more: Any) -> dict[str, Any]:
    """An entry whose loss and speed are known only over the epochs from `first` to `last`."""
    figures = {"samples": epoch * TOTAL, "train_loss": 0.3293, "train_seconds": 7.5, "samples_per_s": 12345.0}
    return {"epoch": epoch, "epochs": [first, last], "lr": 0.1, **figures, **more}


@pytest.mark.parametrize("way", ["heartbeats", "calls"])
def test_epochs_that_share_their_figures_are_printed_once(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [ENTRY, spanning(2, 2, 3), spanning(3, 2, 3, accuracy=0.875)]
    reporter, heard = Reporter("lines"), []
    reporter.listen(heard.append)
    if way == "heartbeats":
        for count in (1, 2, 3):
            reporter.ranks(pair(5000, 2000, epochs=3, history=entries[:count]))
    else:
        RankReport("cpu", reporter).started(Axis(TOTAL, 64, 3), "cpu")
        for entry in entries:
            reporter.epoch_done(entry)
    reporter.close()
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1/3  train_loss 0.5000  2,500 samples/s  4.0 s",
        "epochs 2-3 of 3  train_loss 0.3293 (over both)  accuracy 0.8750  12,345 samples/s  7.5 s",
    ]
    assert heard == entries  # callbacks still get one entry per epoch


def test_a_span_of_more_than_two_epochs_names_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter("lines")
    RankReport("cpu", reporter).started(Axis(TOTAL, 64, 5), "cpu")
    for epoch in range(1, 5):
        reporter.epoch_done(spanning(epoch, 1, 4))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "epochs 1-4 of 5  train_loss 0.3293 (over all 4)  12,345 samples/s  7.5 s"


def test_bars_only_keeps_reporters_from_talking_but_not_from_listening(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[dict[str, Any]] = []
    with bars_only():
        reporter = Reporter("auto")
    reporter.listen(heard.append)
    reporter.say(["a word"])
    reporter.ranks(pair(5000, 2000, history=[ENTRY]))
    reporter.close()
    assert capsys.readouterr().err == ""
    assert heard == [ENTRY]
    Reporter("auto").say(["a word"])
    assert capsys.readouterr().err == "a word\n"


def test_auto_is_a_bar_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert Reporter("auto").style == "lines"
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert Reporter("auto").style == "bar"


def test_a_device_alone_ends_at_a_hundred_percent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    reporter = Reporter("bar", "mlp solo-0")
    rank = RankReport("cpu", reporter)
    rank.started(Axis(TOTAL, 64, 1), "cpu")
    rank.stepped(6400, 6400, 2.0, 0.125)
    reporter.epoch_done(ENTRY)
    reporter.close()
    *_, bar = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert "mlp solo-0" in bar
    assert "100 % 3,200 samples/s  loss 0.1250" in bar
