"""Ranks of another launcher meet: one name for the attempt, whatever was left in the store, and the same facts."""

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from uneven.comm.store import open_store, reach_store, under
from uneven.errors import InputError, MachineError
from uneven.launch.context import ProcessContext
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.external import meeting
from uneven.launch.external.meeting import await_all, locate_store, rendezvous, store_addresses, tell_refusal


def met(port: int, attempts: dict[int, str], size: int) -> dict[int, tuple[str, tuple[Any, ...]]]:
    """These ranks meet at a store, each with the number of restarts that its own machine has counted."""

    def run(rank: int) -> tuple[str, tuple[Any, ...]]:
        store = under("uneven/job/meeting", reach_store("127.0.0.1", port))
        return rendezvous(store, rank, size, {"restarts": attempts[rank], "rank": rank}, lambda _: None, 60.0)

    with ThreadPoolExecutor(size) as pool:
        return dict(zip(attempts, pool.map(run, attempts), strict=True))


def test_machines_that_count_restarts_differently_meet_and_no_attempt_reads_the_last_one() -> None:
    store, port = open_store()
    first = met(port, {0: "0", 1: "0", 2: "0"}, 3)
    second = met(port, {2: "0", 1: "1", 0: "1"}, 3)
    names = [{name for name, _ in attempt.values()} for attempt in (first, second)]
    assert [len(found) for found in names] == [1, 1]
    assert names[0] != names[1]
    for attempt, restarts in ((first, ["0", "0", "0"]), (second, ["1", "1", "0"])):
        for _, facts in attempt.values():
            assert [fact["restarts"] for fact in facts] == restarts
            assert [fact["rank"] for fact in facts] == [0, 1, 2]
    del store


def test_a_rank_that_comes_late_replaces_what_its_dead_predecessor_left() -> None:
    store, port = open_store()
    keys = under("uneven/job/meeting", store)
    keys.set("hello/1", json.dumps({"word": "dead", "facts": {"restarts": "old", "rank": 1}}))
    proposed = threading.Event()
    found: dict[int, Any] = {}

    def lead() -> None:
        found[0] = met(port, {0: "new"}, 2)[0]

    leader = threading.Thread(target=lead)
    leader.start()
    keys.wait(["proposal"])  # rank 0 has believed the dead one
    proposed.set()
    found[1] = met(port, {1: "new"}, 2)[1]
    leader.join(60)
    assert found[0] == found[1]
    assert [fact["restarts"] for fact in found[1][1]] == ["new", "new"]


def test_who_waits_says_for_whom_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = open_store()
    said: list[str] = []
    times = iter(range(0, 1000, 4))
    clock = SimpleNamespace(monotonic=lambda: float(next(times)), sleep=lambda _: None)
    monkeypatch.setattr(meeting, "time", clock)
    with pytest.raises(MachineError, match=r"has waited .* not heard of: 1, 2"):
        rendezvous(store, 0, 3, {}, said.append, limit_s=60.0)
    assert said == ["rank 0 waits for ranks 1, 2 of 3"]


def test_what_one_rank_refuses_is_said_by_all() -> None:
    store, port = open_store()
    tell_refusal(reach_store("127.0.0.1", port), 1, "node2", InputError("device 'cuda:3': this machine has cpu"))
    with pytest.raises(InputError, match="rank 1 on node2: device 'cuda:3': this machine has cpu"):
        await_all(store, 0, 2)
    store.set("ready/1", "1")
    await_all(store, 0, 2)


def test_a_rank_that_shares_hears_of_one_that_will_not() -> None:
    store, port = open_store()
    first, second = (LaunchEnvironment("torchrun", rank, 2, host="127.0.0.1", port=port) for rank in range(2))
    tell_refusal(second.connect("run/1"), 1, "node2", InputError("device 'cuda:3': this machine has cpu"))
    with pytest.raises(InputError, match="rank 1 on node2: device 'cuda:3'"):
        ProcessContext(first).share("a value")
    ranks = [ProcessContext(one) for one in (first, second)]
    ranks[0].environment.connect("run/1").delete_key("refused")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda rank: rank.share(rank.environment.rank), ranks)) == [[0, 1], [0, 1]]
    del store


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What names lead to, and which address other machines know this one by."""
    monkeypatch.setattr(meeting, "_hosted", [])

    def know(outward: str | None = None, **addresses: tuple[str, ...]) -> None:
        monkeypatch.setattr(meeting, "resolve", lambda name: addresses.get(name, (name,) if "." in name else ()))
        monkeypatch.setattr(meeting, "outward_address", lambda peers: outward)

    return know


def started(host: str, rank: int = 0, local: int | None = 1, **others: Any) -> LaunchEnvironment:
    return LaunchEnvironment("srun", rank, 2, 0, local, host, 29500, variable=f"MASTER_ADDR={host}", **others)


def test_a_name_that_leads_to_loopback_is_this_machines_address_on_the_network(names: Callable[..., None]) -> None:
    names("10.77.0.1", node1=("127.0.1.1",), localhost=("127.0.0.1", "::1"), both=("10.77.0.9", "fd77::9"))
    assert store_addresses(started("node1", has_store=False)) == ("10.77.0.1",)
    assert store_addresses(started("node1", has_store=False, local=None)) == ("10.77.0.1",)
    assert store_addresses(started("node1", has_store=False, local=2)) == ("127.0.1.1",)  # all ranks are here
    assert store_addresses(started("localhost", has_store=False, local=None)) == ("127.0.0.1", "::1")
    # Older operators of Kubernetes tell the master pod 'localhost', and the others its name.
    assert store_addresses(started("localhost", has_store=False, local=None, is_kubernetes=True)) == ("10.77.0.1",)
    assert store_addresses(started("node1", node=0)) == ("127.0.1.1",)  # torchrun's agent listens there, too
    assert store_addresses(started("both", has_store=False)) == ("10.77.0.9", "fd77::9")
    assert store_addresses(started("nobody", has_store=False, fallback="10.0.0.3")) == ("10.0.0.3",)
    assert store_addresses(started("nobody", local=2)) == ("127.0.0.1",)


def test_what_leads_nowhere_is_named_with_the_line_to_export(names: Callable[..., None]) -> None:
    names(None, node1=("127.0.1.1",))
    for rank in range(2):  # rank 0 would else wait for the others
        with pytest.raises(InputError, match=r"MASTER_ADDR=nobody: 'nobody' is no name that .* export MASTER_ADDR="):
            locate_store(started("nobody", rank=rank, has_store=False))
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = finder.getsockname()[1]
        lost = LaunchEnvironment("torchrun", 1, 2, 0, 1, "node1", port, node=1, variable="MASTER_ADDR=node1")
        with pytest.raises(InputError, match=r"MASTER_ADDR=node1 is 127\.0\.1\.1 on .* this machine itself"):
            locate_store(lost)
        finder.listen()
        taken = LaunchEnvironment("srun", 0, 2, 0, 2, "127.0.0.1", port, has_store=False)
        with pytest.raises(InputError, match=f"MASTER_PORT={port}: another program has it"):
            locate_store(taken)
    with pytest.raises(
        InputError, match=r"MASTER_ADDR=192\.0\.2\.7 is 192\.0\.2\.7, no address of .* export MASTER_ADDR="
    ):
        locate_store(started("192.0.2.7", has_store=False))
    gone = LaunchEnvironment("srun", 1, 2, 0, 1, "127.0.0.1", port, has_store=False, variable="MASTER_ADDR=x")
    with pytest.raises(MachineError, match=r"rank 1 on .* finds no store at port .*MASTER_ADDR=x.*refused"):
        locate_store(gone, limit_s=0.0)


def test_ranks_whose_launcher_has_no_store_meet_at_rank_0_on_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_hosted", [])
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = finder.getsockname()[1]
    first, second = (
        LaunchEnvironment("srun", rank, 2, rank, 2, "localhost", port, "uneven/1.0/", has_store=False)
        for rank in range(2)
    )
    first = locate_store(first)
    assert first.host == "127.0.0.1"
    second = locate_store(second)
    first.connect("run/1").set("key", "here")
    assert second.connect("run/1").get("key") == b"here"
    assert not second.connect("run/2").check(["key"])  # every run has its own keys
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), 2):
        pass
