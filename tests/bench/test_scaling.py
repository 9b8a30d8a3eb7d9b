import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.folders import make_run
from uneven.bench import scaling as module
from uneven.bench.orders import ScalingOrder
from uneven.bench.scaling import Measured, fit_alpha, fitted, measure_scaling, overhead_of, predict
from uneven.bench.single.process import Ended
from uneven.errors import InputError, MachineError, RankError
from uneven.timeline.record import STATES, Account


def test_the_law_is_found_from_points_that_follow_it() -> None:
    for alpha in (0.0, 0.07, 1.0):
        assert fit_alpha([(n, predict(n, alpha)) for n in (1, 2, 4, 8)]) == pytest.approx(alpha, abs=1e-12)
    assert predict(4, 1.0) == 1.0
    assert fit_alpha([(1, 1.0)]) is None


def account(rank: int, **seconds: float) -> Account:
    return Account(rank, dict.fromkeys(STATES, 0.0) | seconds)


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


def order(**changes: Any) -> ScalingOrder:
    return ScalingOrder(**{"model": "lenet", "ranks": (1, 2), "repeats": 2, **changes})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Runs that train 1,000 samples/s on one rank and 1,600 on two; compiled in 3 s and twice as fast."""
    asked: list[dict[str, str]] = []

    def run(arguments: list[str], cores: list[int]) -> Ended:
        words = arguments[2:-1]  # without "bench run" and "--json"
        given = dict(zip(words[::2], words[1::2], strict=True))
        asked.append({**given, "cores": str(cores)})
        if given["--samples"] == "7":
            return Ended(1, "", "uneven: needs a GPU")
        ranks = len(given["--devices"].split(","))
        speed = {1: 1000.0, 2: 1600.0, 4: 2000.0}[ranks]
        folder = make_run(Path(given["--out"]), given["--model"], given["--mode"], 0, 0.9, speed)
        return Ended(0, (folder / "summary.json").read_text(), "")

    monkeypatch.setattr(module, "run_uneven", run)
    monkeypatch.setattr(module, "available_cores", lambda: (0, 1, 2, 3))
    return asked


def test_numbers_of_ranks_take_turns_and_the_law_fits(machine: list[dict[str, str]]) -> None:
    found = measure_scaling(order(), lambda _: None)
    assert [given["--devices"] for given in machine[:4]] == ["cpu", "cpu,cpu", "cpu", "cpu,cpu"]
    assert [given["--mode"] for given in machine[:2]] == ["solo-0", "cpu-balanced"]
    assert [given["cores"] for given in machine[:2]] == ["[0, 1]", "[0, 1, 2, 3]"], "two cores for every rank"
    assert [(one.ranks, one.speedup) for one in found.points] == [(1, 1.0), (2, 1.6)]
    assert found.alpha == pytest.approx(0.25)
    assert found.points[1].predicted is None, "one point fits any law: there is nothing to predict it from"


@pytest.mark.usefixtures("machine")
def test_a_number_of_ranks_is_predicted_from_the_others_and_text_is_counted_in_tokens() -> None:
    found = measure_scaling(order(model="gpt-nano", ranks=(1, 2, 4), repeats=1), lambda _: None)
    assert found.unit == "tokens"
    assert [one.per_s for one in found.points] == [128_000, 204_800, 256_000]
    # 2 / 1.6 = 1 + 0.25, so four ranks would reach 4 / 1.75; 4 / 2 = 1 + 3 / 3, so two would reach 2 / (4 / 3).
    assert [one.predicted for one in found.points] == pytest.approx([1.0, 1.5, 4 / 1.75])


def test_disturbed_runs_count_only_where_there_are_no_others(
    machine: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = module.run_uneven

    def disturbed(arguments: list[str], cores: list[int]) -> Ended:
        ended = run(arguments, cores)
        summary = json.loads(ended.stdout)
        is_disturbed = len(summary["devices"]) == 2 and (is_always or len(machine) <= 2)
        summary |= {"is_disturbed": is_disturbed, "samples_per_s": 1.0} if is_disturbed else {}
        folder = Path(arguments[arguments.index("--out") + 1]) / summary["model"] / summary["mode"] / "seed-0"
        (folder / "summary.json").write_text(json.dumps(summary))
        return ended

    monkeypatch.setattr(module, "run_uneven", disturbed)
    is_always = False
    found = measure_scaling(order(), lambda _: None)
    assert [(point.speedup, point.is_disturbed) for point in found.points] == [(1.0, False), (1.6, False)]
    is_always = True
    found = measure_scaling(order(), lambda _: None)
    assert [point.is_disturbed for point in found.points] == [False, True]
    assert found.alpha is None, "no law is fitted to a disturbed point"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": (2, 4)}, "with 1 among them"),
        ({"device": "tpu"}, "must be cpu or cuda"),
        ({"device": "cuda", "ranks": (1, 99)}, "cuda:"),
        ({"model": "lenett"}, "unknown model"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure_scaling(order(**changes), lambda _: None)


@pytest.mark.usefixtures("machine")
def test_more_ranks_than_cores_are_more_than_this_machine_can() -> None:
    with pytest.raises(MachineError, match="8 on 4 cores"):
        measure_scaling(order(ranks=(1, 8)), lambda _: None)


@pytest.mark.usefixtures("machine")
def test_a_run_that_fails_is_told() -> None:
    with pytest.raises(RankError, match="needs a GPU"):
        measure_scaling(order(samples=7), lambda _: None)
