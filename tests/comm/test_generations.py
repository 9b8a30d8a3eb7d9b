"""Groups that are lost, given up and formed anew in the same processes: over Gloo, in shared memory, over machines."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.forked import ForkedPopen
from uneven.comm import form
from uneven.comm.form import form_group
from uneven.comm.gloo import SILENCE_S, Connections
from uneven.comm.group import Group, SoloGroup
from uneven.comm.store import Store, open_store, reach_store, under
from uneven.comm.torch_group import GlooGroup
from uneven.errors import GroupLostError

# A stopped rank over Gloo alone, continued, has once not ended within 100 s after it had raised (docs/log.md).
GLOO = pytest.param("gloo", "0,0,0,0", marks=pytest.mark.soak)
KINDS = [GLOO, ("shm", "0,0,0,0"), ("cpu", "0,0,1,1")]
FORMED = {
    "gloo": ["TorchGroup", "GlooGroup", "GlooGroup"],
    "shm": ["SharedMemoryGroup"] * 3,
    "cpu": ["HierarchicalGroup", "HierarchicalGroup", "SharedMemoryGroup"],
}


@pytest.mark.parametrize(("backend", "machines"), KINDS)
def test_survivors_of_a_killed_and_of_a_stopped_rank_go_on_and_the_stopped_one_harms_nobody(
    backend: str, machines: str
) -> None:
    store, port = open_store()
    command = [sys.executable, "-c", "from tests.comm.survivor import main; main()", str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [ForkedPopen([*command, str(rank), backend, machines], **pipes) for rank in range(4)]  # type: ignore[call-overload]
    try:
        os.waitid(os.P_PID, ranks[2].pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for rank in ranks[:2]:
            rank.stdin.write("rank 2 is silent\n")
            rank.stdin.flush()
        said = [[rank.stdout.readline().strip() for _ in range(3)] for rank in ranks[:2]]
        os.kill(ranks[2].pid, signal.SIGCONT)
        zombie = ranks[2].communicate(timeout=100)[0].splitlines()
        for rank in ranks[:2]:
            rank.stdin.write("go on\n")
            rank.stdin.flush()
        ends = [rank.communicate(timeout=100)[0].splitlines() for rank in ranks[:2]]
        ranks[3].communicate(timeout=100)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    del store
    assert [rank.returncode for rank in ranks] == [0, 0, 0, -signal.SIGKILL]
    first, second, third = FORMED[backend]
    for lines in said:
        assert lines[0].startswith(first)
        assert "peer" in lines[0]
        # The first of them to abort leaves, which the other may see before it is told itself.
        assert lines[1].startswith(f"{second} rank 2 is silent") or "peer" in lines[1]
        assert lines[2] == f"{third} {{3.0}}"
    assert any("rank 2 is silent" in lines[1] for lines in said)
    assert zombie[1].startswith(second)
    assert "peer" in zombie[1]
    assert ends == [["{3.0} True [True]"]] * 2


def on_two(function: Callable[[int, Store], None]) -> None:
    """function(rank, a client of the store) on two ranks, which are threads."""
    store, port = open_store()
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(function, rank, reach_store("127.0.0.1", port)) for rank in range(2)]
        for future in futures:
            future.result()
    del store


def form_two(store: Store, rank: int, backend: str, generation: int) -> Group:
    machines = (0, 0) if backend == "shm" else (0, 1)
    keys = under(f"g/{generation}", store)
    return form_group(keys, rank, 2, torch.device("cpu"), backend, False, machines=machines, generation=generation)


def held() -> tuple[int, int, int]:
    """File descriptors, threads and shared memory of this process."""
    with open("/proc/self/maps") as maps:
        memory = maps.read().count("memfd:uneven")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), memory


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_nothing_is_left_of_groups_that_were_aborted(backend: str, count: int) -> None:
    counts: list[tuple[int, int, int]] = []
    together = threading.Barrier(2)

    def rank(number: int, store: Store) -> None:
        for generation in range(1, count + 2):
            group = form_two(store, number, backend, generation)
            twin = group.new_group()
            # Rank 1 never comes: it is as if it had been stopped.
            works = [group.all_reduce(torch.ones(500_000)), twin.all_reduce(torch.ones(5))] if number == 0 else []
            together.wait(60)
            group.abort("given up")
            for work in works:
                assert work.is_completed()
                with pytest.raises(GroupLostError, match="given up"):
                    work.wait()
            with pytest.raises(GroupLostError, match="given up"):
                twin.all_reduce(torch.ones(1))
            group.close()
            with pytest.raises(GroupLostError, match="given up"):
                group.all_reduce(torch.ones(1))
            del works, group, twin
            together.wait(60)
            if number == 0 and generation in (1, count + 1):
                for thread in threading.enumerate():
                    if thread.name in ("uneven-free", "uneven-connect"):
                        thread.join(60)
                        assert not thread.is_alive()
                gc.collect()  # errors and the frames that raised them
                until = time.monotonic() + 30
                while counts and held() != counts[0] and time.monotonic() < until:
                    time.sleep(0.01)  # the system lists a thread that has ended for a moment longer
                counts.append(held())
            together.wait(60)

    on_two(rank)
    assert counts[1] == counts[0]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_an_abort_ends_the_wait_of_another_thread(backend: str) -> None:
    """Rank 1 takes no part in the sum, and keeps its connections."""
    is_done = threading.Event()

    def rank(number: int, store: Store) -> None:
        group = form_two(store, number, backend, 1)
        if number == 0:
            waiting = threading.Event()

            def abort() -> None:
                assert waiting.wait(60)
                group.abort("a newer generation")

            thread = threading.Thread(target=abort)
            thread.start()
            work = group.all_reduce(torch.ones(3))
            waiting.set()
            with pytest.raises(GroupLostError, match="a newer generation"):
                work.wait()
            thread.join()
            is_done.set()
        assert is_done.wait(60)
        group.close()

    on_two(rank)


class Stale:
    """Says so when it was asked a few times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(("backend", "machines"), [("gloo", (0, 0, 0)), ("shm", (0, 0, 0)), ("cpu", (0, 0, 1))])
def test_forming_is_given_up_where_a_newer_generation_is_wanted_or_a_peer_does_not_come(
    backend: str, machines: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = open_store()

    def alone(generation: int, rank: int, stale: Stale) -> None:
        keys = under(f"g/{generation}", store)
        options = {"machines": machines, "generation": generation, "is_stale": stale}
        form_group(keys, rank, 3, torch.device("cpu"), backend, False, **options)  # type: ignore[arg-type]

    for rank in range(3):
        with pytest.raises(GroupLostError, match="a newer generation was announced"):
            alone(1 + rank, rank, Stale(3))
    monkeypatch.setattr(form, "REFORM_TIMEOUT", form.REFORM_TIMEOUT / 1000)
    with pytest.raises(GroupLostError, match=r"a peer did not come within 0.02 s"):
        alone(4, 0, Stale(10**9))


def test_forming_is_given_up_while_gloo_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is there, and is lost before it connects. Gloo's own wait, in a thread, ends by the limit."""
    store, _ = open_store()
    monkeypatch.setattr(form, "REFORM_TIMEOUT", form.REFORM_TIMEOUT / 20)
    keys = under("g/1", store)
    keys.set("here/1", "[]")
    with pytest.raises(GroupLostError, match="a newer generation was announced"):
        form_group(keys, 0, 2, torch.device("cpu"), "gloo", False, generation=1, is_stale=Stale(3))
    for thread in threading.enumerate():
        if thread.name == "uneven-connect":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="connections are found in /proc")
def test_a_connection_of_gloo_ends_where_nothing_is_acknowledged_for_a_while() -> None:
    """A way between two machines that drops all packets, while both reach the leader, held the run for 15 minutes."""
    have_read = threading.Barrier(2)  # the sockets of both: those of a group that its peer has closed are gone

    def rank(number: int, store: Store) -> None:
        group = form_group(under("it", store), number, 2, torch.device("cpu"), "gloo", False, generation=1)
        group.all_reduce(torch.ones(3)).wait()
        assert isinstance(group, GlooGroup)
        limits_ms = {
            one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            for one in group._connections._sockets()
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        }
        have_read.wait(60)
        group.close()
        assert limits_ms == {1000 * SILENCE_S}

    on_two(rank)


def test_a_connection_that_a_peer_has_closed_already_keeps_no_other_from_being_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = socket.socketpair()
    with socket.socket() as closed, one, other:
        monkeypatch.setattr(Connections, "_sockets", lambda _: iter([closed, one]))
        connections = Connections(0, 2)
        connections.limit_silence()
        connections.cut()
        assert other.recv(1) == b""


def test_whoever_is_left_alone_has_a_group_of_one_and_hears_of_a_newcomer() -> None:
    store, _ = open_store()
    group = form_group(store, 0, 1, torch.device("cpu"), "gloo", False, generation=7)
    assert isinstance(group, SoloGroup)
    assert (group.generation, group.new_group().generation) == (7, 7)
    assert group.all_reduce(torch.ones(1)).wait().item() == 1.0
    twin = group.new_group()
    group.abort("a rank joins")
    with pytest.raises(GroupLostError, match="a rank joins"):
        twin.all_reduce(torch.ones(1))
