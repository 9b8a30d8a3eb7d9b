"""The files of examples/clusters/, and what is said where one is wrong."""

import copy
from pathlib import Path
from typing import Any

import pytest

from uneven.cli.simulate import read_file
from uneven.errors import InputError
from uneven.simulate.cluster import POLICIES, Job
from uneven.simulate.scenario import read_scenario
from uneven.simulate.simulation import simulate
from uneven.simulate.window_run import local_config

FILES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.toml"))
SMALL: dict[str, Any] = {
    "devices": [{"name": "a", "sample_ms": 1.0}, {"name": "b", "sample_ms": 2.0, "machine": "other"}],
    "inside": {"rate_mb_s": 100},
    "between": {"rate_mb_s": 10, "delay_ms": 1},
    "job": {"samples_per_epoch": 1000, "batch_size": 8, "param_mb": 0.5},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_scenario_of_the_examples_runs(path: Path) -> None:
    _, cluster, job = read_file(path)
    hours = 0.05 / len(cluster.ranks)
    for policy in POLICIES if len(cluster.ranks) < 1000 else ("async",):
        found = simulate(cluster, job, policy, max_hours=hours)
        assert 0.0 < found.efficiency <= 1.05
        assert found.limits


def test_a_table_becomes_a_cluster() -> None:
    cluster, job = read_scenario(SMALL)
    assert [kind.name for kind in cluster.ranks] == ["a", "b"]
    assert cluster.machines == (0, 1)
    assert job.param_bytes == 500_000
    kinds = [{"name": "c", "sample_ms": 1.0, "count": 5, "per_machine": 2}, {"name": "d", "sample_ms": 1, "count": 2}]
    assert read_scenario({**SMALL, "devices": kinds})[0].machines == (0, 0, 1, 1, 2, 3, 3)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("job", "batchsize"), 8, r"\[job\]: unknown key 'batchsize'; did you mean 'batch_size'\?"),
        (("job", "batch_size"), "8", r"batch_size = '8' must be a whole number"),
        (("job", "batch_size"), True, r"must be a whole number"),
        (("job", "epochs"), -1, r"\[job\]: epochs=-1 must be above 0"),
        (("job", "anchor"), 0, r"anchor=0 must be at least 1"),
        (("job", "max_anchor"), 0, r"\[job\]: max_anchor=0 must be at least 1"),
        (("job", "max_anchor"), -5, r"max_anchor=-5 must be at least 1"),
        (("between", "rate_mb_s"), 0, r"\[between\]: rate_mb_s=0.0 of a link must be above 0"),
        (("between", "rate_mb_s"), float("nan"), r"rate_mb_s = nan must be a number"),
        (("faults",), {"failure_per_hour": 3}, r"\[faults\]: unknown key 'failure_per_hour'; did you mean"),
        (("faults",), {"failures_per_hour": -3}, r"failures_per_hour=-3 must be at least 0"),
        (("devices",), [], r"\[\[devices\]\] is missing"),
        (("devices", 0, "sampel_ms"), 3.0, r"\[\[devices\]\] 'a': unknown key 'sampel_ms'; did you mean 'sample_ms'"),
        (("devices", 0, "count"), 0, r"count = 0"),
        (("devices", 0, "count"), 10**6, r"more than 100,000 ranks"),
        (("devices", 1, "per_machine"), 2, r"exclude each other"),
        (("devices", 1, "name"), "a", r"\[\[devices\]\] 'a': an earlier table has this name and other costs"),
        (("linkz",), {}, r"unknown key 'linkz'; the keys are devices"),
        (("inside",), 3, r"\[inside\] is missing, or no table"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(place: tuple[Any, ...], value: object, message: str) -> None:
    table = copy.deepcopy(SMALL)
    part: Any = table
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    with pytest.raises(InputError, match=message):
        read_scenario(table)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("job", "param_mb", 1e305),
        ("job", "epochs", 1e308),
        ("job", "epochs", 5e-324),
        ("job", "samples_per_epoch", 10**400),
        ("job", "eval_ms", -1e300),
        ("inside", "rate_mb_s", float("inf")),
    ],
    ids=["param", "epochs", "tiny", "400 digits", "below 0", "inf"],
)
def test_a_number_that_is_too_large_to_compute_with_is_refused(part: str, key: str, value: float) -> None:
    table = copy.deepcopy(SMALL)
    table[part][key] = value
    with pytest.raises(InputError, match=rf"\[{part}\]: {key} must be 0, or of a size between 1e-15 and 1e\+15"):
        read_scenario(table)


def test_memory_and_seed_have_their_bounds() -> None:
    device = {"name": "a", "sample_ms": 1.0, "memory_gb": 1e300}
    with pytest.raises(InputError, match="memory_gb must be 0, or of a size"):
        read_scenario({**SMALL, "devices": [device]})
    assert read_scenario({**SMALL, "seed": 2**64 - 1})[0].seed == 2**64 - 1
    with pytest.raises(InputError, match=r"cluster\.toml: seed must be 0, or of a size"):
        read_scenario({**SMALL, "seed": 16**5000})  # Python refuses to write so many digits down


def test_one_kind_may_be_on_two_machines() -> None:
    kind = {"name": "a", "sample_ms": 1.0}
    cluster, _ = read_scenario({**SMALL, "devices": [kind, {**kind, "machine": "other", "count": 2}]})
    assert cluster.machines == (0, 1, 1)
    assert len(set(cluster.ranks)) == 1


@pytest.mark.parametrize(
    ("given", "anchors"),
    [({}, (10, 200)), ({"anchor": 300}, (300, 300)), ({"max_anchor": 5}, (5, 5)), ({"anchor": 3}, (3, 200))],
)
def test_anchor_and_its_bound_follow_each_other_as_in_a_run(given: dict[str, int], anchors: tuple[int, int]) -> None:
    found = local_config(Job(1000, 8, **given), is_async=False)  # type: ignore[arg-type]
    assert (found.anchor, found.max_anchor) == anchors
    with pytest.raises(InputError, match="anchor=30 is above max_anchor=20"):
        Job(1000, 8, anchor=30, max_anchor=20)


@pytest.mark.parametrize(("part", "key"), [("job", "batch_size"), ("inside", "rate_mb_s")])
def test_what_is_missing_is_named(part: str, key: str) -> None:
    table = copy.deepcopy(SMALL)
    del table[part][key]
    with pytest.raises(InputError, match=rf"\[{part}\]: {key} is missing"):
        read_scenario(table)
    with pytest.raises(InputError, match=r"\[between\] is missing: 2 machines need"):
        read_scenario({name: value for name, value in SMALL.items() if name != "between"})
