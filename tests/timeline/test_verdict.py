"""The verdict: its parts add up to what the devices own, its sentence says so, and odd runs have one, too."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.timeline.synthetic import MS, lanes_of, make_run
from uneven.hardware.interference import Interference
from uneven.timeline.document import verdict_html
from uneven.timeline.record import STATES, Account, Event
from uneven.timeline.timeline import LOST, Ended, RunFacts, Timeline
from uneven.timeline.verdict import ABSENT, ESTIMATED, MEASURED, UNKNOWN, Verdict, lost_by_state, run_verdict, verdict


def account(rank: int, **seconds: float) -> Account:
    return Account(rank, dict.fromkeys(STATES, 0.0) | seconds)


def trained(timeline: Timeline, *samples: int) -> Timeline:
    """With the samples of each rank."""
    return replace(timeline, lanes=[replace(one, samples=n) for one, n in zip(timeline.lanes, samples, strict=True)])


def sum_of_parts(found: Verdict) -> float:
    assert found.gave is not None
    return found.gave.samples_per_s + sum(loss.samples_per_s for loss in found.losses)


def test_the_sentence_says_what_one_owns_what_ddp_could_give_and_what_the_run_gave() -> None:
    found = verdict([893.0, 357.0], 1214.0, {"wait": 26.0, "communication": 10.0}, MEASURED)
    assert found.sentence == (
        "This run gave 1,214 of the 1,250 samples/s that you own (97 %); equal-batch DDP could give at most 714 (57 %)."
    )
    assert found.rest == "The rest went to communication 0.8 %, wait 2 % (estimated)."
    assert [found.owned, found.ddp] == [
        replace(found.owned, samples_per_s=1250.0, source=MEASURED),  # type: ignore[type-var]
        replace(found.ddp, samples_per_s=714.0, source=MEASURED),  # type: ignore[type-var]
    ]
    assert sum_of_parts(found) == pytest.approx(1250.0)


@pytest.mark.parametrize("gave", [900.0, 1214.0, 1249.9, 1250.0, 1300.0, 2000.0])
@pytest.mark.parametrize("lost", [{}, {"wait": 30.0}, {"wait": 900.0, "data": 100.0, "other": 5.0}, {"data": 0.01}])
def test_what_the_run_gave_and_lost_is_what_one_owns(gave: float, lost: dict[str, float]) -> None:
    """Measured speeds alone and a run's own times are from different runs: the losses are made to fit."""
    found = verdict([893.0, 357.0], gave, lost, MEASURED)
    assert sum_of_parts(found) == pytest.approx(max(1250.0, gave))
    assert all(loss.samples_per_s > 0 and loss.source == ESTIMATED for loss in found.losses)
    assert ("cannot be" in found.sentence) == (gave > 1.05 * 1250)
    assert found.gave is not None
    assert found.gave.source == MEASURED
    widths = [float(part) for part in re.findall(r"--part: ([\d.]+)%", verdict_html(found))]
    assert sum(widths) == pytest.approx(100.0, abs=0.1)


def test_where_the_rest_went_is_not_guessed() -> None:
    found = verdict([893.0, 357.0], 900.0, {}, MEASURED)
    assert found.rest == "Where the rest went was not recorded."
    assert [(loss.name, loss.samples_per_s) for loss in found.losses] == [(UNKNOWN, 350.0)]
    assert "--own: var(--other)" in verdict_html(found)


def test_a_run_s_own_timeline_explains_all_of_its_loss() -> None:
    """300 samples in 1 s of compute, 100 in 2 s: alone 300 and 50 samples/s; the first waits for half of its time."""
    states = lanes_of(
        [("setup", 5000 * MS), ("compute", 1000 * MS), ("wait", 800 * MS), ("data", 200 * MS)],
        [("setup", 4000 * MS), ("compute", 2000 * MS)],
    )
    found = run_verdict(trained(states, 300, 100))
    assert found.gave is not None
    assert found.owned is not None
    assert (found.gave.samples_per_s, found.owned.samples_per_s, found.owned.source) == (200.0, 350.0, ESTIMATED)
    assert {loss.name: loss.samples_per_s for loss in found.losses} == pytest.approx({"wait": 120.0, "data": 30.0})
    assert found.ddp is not None
    assert found.ddp.samples_per_s == 100.0


def with_lost_lane(**changes: Any) -> Timeline:
    """A rank that trains to the end, and one that is lost in the middle, with 50 samples that count and 10 more."""
    states = lanes_of([("compute", 3000 * MS)], [("compute", 1000 * MS), ("wait", 200 * MS)])
    first, gone = states.lanes
    ended = Ended(LOST, "rank 1 (cpu@1) was ended by SIGKILL: 1 rank goes on")
    lanes = [replace(first, samples=300), replace(gone, samples=50, redone=10, ended=ended)]
    return replace(states, lanes=lanes, **changes)


def test_a_run_that_lost_a_device_was_no_run_of_one_device() -> None:
    """It said "with one device there is nobody to wait for", and counted the samples of one over the time of both."""
    run = with_lost_lane()
    found = run_verdict(run)
    assert found.gave is not None
    assert found.owned is not None
    assert found.gave.samples_per_s == run.samples_per_s == 350 / 3.0
    assert found.owned.samples_per_s == pytest.approx(100 + 60), "with what was trained again: it computed that, too"
    assert found.ddp is not None
    assert found.ddp.samples_per_s == pytest.approx(120)
    assert "one device" not in found.sentence
    assert found.notes == ("cpu@1 was lost after 1.2 s (rank 1 (cpu@1) was ended by SIGKILL: 1 rank goes on).",)
    lost = {loss.name: loss.samples_per_s for loss in found.losses}
    assert set(lost) == {"wait", ABSENT, "other"}
    assert sum_of_parts(found) == pytest.approx(found.owned.samples_per_s)


def test_a_disturbed_run_says_so_in_its_data_and_beside_its_verdict() -> None:
    measured = Interference(10.0, 2, 0.3, 0.6, None, None, None, is_throttled=False)
    run = with_lost_lane(run=RunFacts(interference=measured))
    again = Timeline.from_json(json.loads(json.dumps(run.to_json())))
    assert again == run
    assert run.to_json()["run"]["disturbed"] is True
    assert run_verdict(again).notes[-1].startswith("Disturbed: the hypervisor took 30% of the CPU time. Do not")
    assert "Do not compare" in verdict_html(run_verdict(again))
    calm = replace(measured, stolen_share=0.0)
    assert len(run_verdict(with_lost_lane(run=RunFacts(interference=calm))).notes) == 1
    assert with_lost_lane().to_json()["run"]["disturbed"] is None


def test_a_resumed_run_is_judged_by_what_it_trained_since_then() -> None:
    """Its speed was that of all samples over the time since the resume."""
    run = with_lost_lane(run=RunFacts(resumed_at=1200, samples_before=20_000))
    found = run_verdict(run)
    assert found.gave is not None
    assert found.gave.samples_per_s == 350 / 3.0
    assert found.sentence.startswith("Since it was resumed after step 1,200, this run gave 117 of the 160 samples/s")
    told = run.to_json()["run"]
    assert (told["resumed_at"], told["samples_before"], told["samples"]) == (1200, 20_000, 350)


def test_the_time_of_a_run_whose_ranks_changed_is_that_in_which_any_trained() -> None:
    """The first rank is lost after 2 s, another joins after 1 s and trains for 4."""
    states = lanes_of([("compute", 2000 * MS)], [("setup", 1000 * MS), ("compute", 4000 * MS)])
    assert states.training_s == 4.0
    first, other = states.lanes
    lost = replace(first, samples=20, ended=Ended(LOST, "it died"))
    run = replace(states, lanes=[replace(other, samples=40), lost], accounts=states.accounts[::-1])
    assert run.training_s == 5.0
    assert run.samples_per_s == 12.0
    assert replace(run, lanes=[other, lost]).samples_per_s is None, "of one lane it is not known"


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_a_recorded_run_has_a_verdict(ranks: int) -> None:
    run = make_run(ranks)
    found = run_verdict(run)
    assert found.owned is not None
    assert sum_of_parts(found) == pytest.approx(found.owned.samples_per_s)
    assert (found.ddp is None) == (ranks == 1)
    assert ("with one device there is nobody to wait for" in found.sentence) == (ranks == 1)
    assert {loss.name for loss in found.losses} >= {"wait", "communication", "data"}


def test_a_rank_without_samples_counts_with_its_speed_in_the_warm_up() -> None:
    base = lanes_of([("compute", 1000 * MS)], [("wait", 1000 * MS)])
    found = run_verdict(trained(base, 500, 0))
    assert (found.owned, found.ddp) == (None, None)
    assert "how fast each device is alone is not known" in found.sentence
    measured = [Event(1, 0, "shares", {"slot": 0, "shares": [64, 0], "alone": [480.0, 20.0]})]
    found = run_verdict(trained(Timeline(base.lanes, base.accounts, measured, []), 500, 0))
    assert found.owned is not None
    assert found.owned.samples_per_s == 520.0
    assert [(loss.name, loss.samples_per_s) for loss in found.losses] == [("wait", 20.0)]


def test_a_run_that_ended_before_its_first_step_says_so() -> None:
    for run in (lanes_of([("setup", 5)]), lanes_of([("setup", 5)], [("setup", 9)]), Timeline([], [], [], [])):
        found = run_verdict(run)
        assert found.sentence == "This run trained no samples: there is nothing to compare."
        assert "bar" not in verdict_html(found)
    assert "not recorded how many samples" in run_verdict(lanes_of([("compute", 5)], [("compute", 5)])).sentence
    assert "trained no samples" in run_verdict(trained(lanes_of([("compute", 5)]), 0)).sentence


def test_the_time_before_a_rank_joined_is_lost_as_absent() -> None:
    lost = lost_by_state([account(0, compute=10.0), account(1, compute=3.0, wait=1.0)], [100.0, 50.0])
    assert lost["wait"] == pytest.approx(5.0)
    assert lost[ABSENT] == pytest.approx(30.0)
    assert lost["data"] == 0.0


def test_every_amount_is_marked_and_the_bar_names_the_bound() -> None:
    html = verdict_html(verdict([1000.0, 400.0], 1330.0, {"wait": 50.0, ABSENT: 20.0}, ESTIMATED))
    rows = [re.sub(r"<.*?>", " ", row).split() for row in re.findall(r"<li>(.*?)</li>", html)]
    assert [row[-1] for row in rows] == ["measured", *["estimated"] * 4]
    assert [" ".join(row[:2]) for row in rows] == ["this run", "wait 50", "absent 20", "equal-batch DDP,", "what you"]
    assert "DDP at most 57 %" in html
    assert 'class="bound left"' in html, "its text stays inside the page"
    nasty = verdict((), 5.0, {}, MEASURED, "<script>")
    assert "<script>" not in verdict_html(nasty)
