"""Ranks on several machines: one number format for all, one refusal for all. The machines are made up."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn

from uneven.config import RunConfig, Task
from uneven.data.tensors import TensorData
from uneven.errors import RefusedError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.checks import preflight
from uneven.launch.checks.parity import (
    Among,
    DeviceFormat,
    check_data_parity,
    check_facts,
    check_formats,
    check_links,
    describe_initial,
    initial_norms,
)
from uneven.launch.environment import LaunchEnvironment
from uneven.machines import links
from uneven.machines.facts import collect_facts

ROSTER = Roster(parse_devices("cpu,cuda:0,cuda:0,cpu"), (0, 1, 1, 2), ("node1", "node2", "node3"))
CONFIG = RunConfig(batch_size=2, epochs=1)


def on_ranks(work: Callable[[Among], Any], roster: Roster = ROSTER) -> list[Any]:
    """What `work` returns on every rank, or its refusal; the ranks are threads and share through a list."""
    barrier, posted = Barrier(len(roster.devices)), [None] * len(roster.devices)

    def rank(number: int) -> Any:
        def share(value: Any) -> list[Any]:
            posted[number] = value
            barrier.wait(30)
            found = list(posted)
            barrier.wait(30)
            return found

        try:
            return work(Among(roster, number, share))
        except RefusedError as error:
            return str(error)

    with ThreadPoolExecutor(len(roster.devices)) as pool:
        return list(pool.map(rank, range(len(roster.devices))))


def task(values: float = 0.0) -> Task:
    return Task(lambda: nn.Linear(1, 1), lambda params: None, lambda *_: None, TensorData(torch.full((8, 1), values)))


def test_all_ranks_refuse_other_data_with_host_and_fix() -> None:
    def check(among: Among) -> None:
        is_other = among.roster.host(among.rank) == "node3"
        check_data_parity(task(1.0 if is_other else 0.0), CONFIG, among)

    errors = on_ranks(check)
    assert len(set(errors)) == 1
    assert errors[0].startswith("node3: tensor 0 of the data set is other values (")
    assert "--skip data" in errors[0]
    skipping = RunConfig(batch_size=2, epochs=1, skip="data")
    assert skipping.to_json()["skip"] == "data"
    assert on_ranks(lambda among: check_data_parity(task(among.rank), skipping, among)) == [[]] * 4


def test_data_that_cannot_be_looked_into_is_told_and_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(dataset: Any) -> Any:
        raise KeyError("a property")

    monkeypatch.setattr("uneven.launch.checks.parity.describe_data", fail)
    lines = on_ranks(lambda among: check_data_parity(task(), CONFIG, among))[0]
    assert lines[2] == "  the data set of node3 could not be compared: KeyError: 'a property'"


def test_one_rank_of_each_machine_reads_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr("uneven.launch.checks.parity.describe_data", lambda dataset: read.append(dataset) or {})
    monkeypatch.setattr("uneven.launch.checks.parity.compare_data", lambda *_: None)
    on_ranks(lambda among: check_data_parity(task(), CONFIG, among))
    assert len(read) == 3


def formats(precision: str, **settings: Any) -> list[Any]:
    """What every rank settles on, where node2 alone has a GPU, with bf16."""
    gpu, cpu = ("fp32", "bf16", "fp16"), ("fp32",)

    def settle(among: Among) -> Any:
        device = among.roster.devices[among.rank]
        own = [DeviceFormat("cuda:0", "bf16", "sm_90", gpu) if device.kind == "cuda" else
               DeviceFormat("cpu", "fp32", "no bf16", cpu)]  # fmt: skip
        known = preflight.exchange_devices(own[0], device.kind == "cuda", True, among)
        config, notes = preflight._resolve_precision(
            RunConfig(batch_size=2, epochs=1, precision=precision, **settings), known
        )
        return config.precision, notes, known.is_crowded

    return on_ranks(settle)


def test_auto_is_chosen_from_the_devices_of_all_machines() -> None:
    (found,) = {repr(one) for one in formats("auto")}
    assert "'fp32'" in found
    assert "cuda:0 on node2 would take bf16 (sm_90)" in found
    assert "cpu on node3 would take fp32" in found
    assert found.endswith("True)")  # two ranks of node2 share a GPU, and all ranks know


def test_a_format_that_one_machine_only_emulates_is_refused_on_all() -> None:
    (found,) = set(formats("bf16"))
    assert found == (
        "node1: precision='bf16' on cpu is not native (no bf16), on node2 it is; use precision='auto' (--precision "
        "auto) or 'fp32', or leave that device out"
    )
    assert all(one[0] == "bf16" and "emulated" in one[1][0] for one in formats("bf16", skip="dtype"))


def test_what_all_machines_emulate_is_the_users_choice() -> None:
    check_formats("bf16", [DeviceFormat("cpu", "fp32", "", ("fp32",), host) for host in ("node1", "node2")])
    check_formats("fp32", [DeviceFormat("cpu", "fp32", "", ("fp32",), host) for host in ("node1", "node2")])


def test_other_initial_values_are_told_and_rounding_is_not() -> None:
    roster = Roster(parse_devices("cpu,cpu"), (0, 1), ("node1", "node2"))
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    norms = [initial_norms([*one.named_parameters()]) for one in (model, other)]
    (line,) = describe_initial(norms, roster)
    assert line == (
        "  rank 1 on node2 built weight with other initial values than rank 0; rank 0's are used on all ranks"
    )
    near = [(name, value * (1 + 1e-7)) for name, value in norms[0]]
    assert describe_initial([norms[0], near], roster) == []


@pytest.mark.parametrize(
    ("changes", "skip", "words"),
    [
        ({}, None, None),
        ({"torch": "2.0.0"}, None, "node3: torch is 2.0.0, the leader's is "),
        ({"code": {"train.py": "other"}}, None, "node3: train.py differs;"),
        ({"code": {"train.py": "other"}}, "code", None),
        ({"clock": 60.0}, None, "node3: the clock is 60 s ahead of the leader's; set it there"),
    ],
)
def test_machines_of_an_engine_compare_their_facts(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], skip: str | None, words: str | None
) -> None:
    """Versions and clocks are injected: all ranks come to the same refusal, which names the host and the fix."""
    facts = {**collect_facts({}, ["cpu"]), "code": {"train.py": "same"}}
    late = threading.local()
    monkeypatch.setattr(
        "uneven.launch.checks.parity.collect_facts", lambda *_: {**facts, **getattr(late, "changes", {})}
    )
    monkeypatch.setattr("uneven.launch.checks.parity.time.time", lambda: 1000.0 + getattr(late, "clock", 0.0))

    def check(among: Among) -> Any:
        if among.roster.host(among.rank) == "node3":
            late.changes, late.clock = changes, changes.get("clock", 0.0)
        return check_facts(RunConfig(batch_size=2, epochs=1, skip=skip), among)

    found = on_ranks(check)
    assert all(one == found[0] for one in found)
    assert found[0] == [] if words is None else words in found[0]


def test_machines_of_an_engine_try_the_ways_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would wait half an hour for a way that is closed: all ranks refuse, and name it."""
    monkeypatch.setattr(links, "BURST_S", 0.01)

    doubts: dict[str, str] = {}

    def check(among: Among) -> None:
        address = f"127.0.0.{among.roster.machines[among.rank] + 1}"
        check_links(CONFIG, among, LaunchEnvironment("srun", address=address, doubt=doubts.get(address, "")))

    assert on_ranks(check) == [None] * 4

    class Closed(links.Listener):
        def __init__(self, address: str, token: str) -> None:
            super().__init__(address, token)
            if address == "127.0.0.3":
                self.close()

    monkeypatch.setattr("uneven.launch.checks.parity.Listener", Closed)
    found = on_ranks(check)
    assert all(one == found[0] for one in found)
    assert found[0].startswith("node3: the way from node1 (127.0.0.1) is closed (connection refused")
    assert "sudo ufw allow from 127.0.0.1" in found[0]
    doubts["127.0.0.3"] = "node3: GLOO_SOCKET_IFNAME=tailscale0 does not lead there"
    assert on_ranks(check) == [doubts["127.0.0.3"]] * 4
    skipped = RunConfig(batch_size=2, epochs=1, skip="links")
    assert on_ranks(lambda among: check_links(skipped, among, LaunchEnvironment("srun"))) == [None] * 4
