"""The reach test between machines, on addresses of the loopback interface; tests/network has real machines."""

import json
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from uneven.errors import MachineError
from uneven.machines import links
from uneven.machines.links import Listener, Peer, judge, reach

PEERS = [Peer(f"node{number}", f"10.0.0.{number}", 7000) for number in (1, 2, 3)]


def reach_all(tokens: Sequence[str]) -> tuple[list[Peer], list[dict[str, Any]]]:
    """A report of every machine, each with its own token."""
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(closing(Listener(f"127.0.0.{number + 1}", token)))
            for number, token in enumerate(tokens)
        ]
        peers = [Peer(f"node{n + 1}", f"127.0.0.{n + 1}", one.port) for n, one in enumerate(listeners)]
        with ThreadPoolExecutor(len(tokens)) as pool:
            jobs = [pool.submit(reach, n, peers, one, tokens[n]) for n, one in enumerate(listeners)]
            return peers, [json.loads(json.dumps(job.result())) for job in jobs]


def test_every_machine_reaches_every_other_and_measures_the_link() -> None:
    peers, reports = reach_all(["secret"] * 3)
    assert judge(peers, reports) == []
    assert [[link["to"] for link in report["links"]] for report in reports] == [[1, 2], [0, 2], [0, 1]]
    for link in (link for report in reports for link in report["links"]):
        assert link["round_trip_s"] > 0
        assert link["jitter_s"] >= 0
        assert link["bytes_per_s"] > 0
        assert abs(link["clock_s"]) <= link["clock_error_s"] + 0.5


def test_a_machine_with_another_token_is_not_reached() -> None:
    peers, reports = reach_all(["secret", "secret", "guess"])
    assert {difference.check for difference in judge(peers, reports)} == {"links"}
    assert all("node3" in str(difference) for difference in judge(peers, reports))
    assert reports[0]["heard"] == [1]


def test_a_strangers_datagram_does_not_end_the_listening() -> None:
    """`compare_digest` refuses texts beyond ASCII: one byte of a port scan ended the thread."""
    with closing(Listener("127.0.0.1", "secret")) as one, closing(Listener("127.0.0.2", "secret")) as other:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as stranger:
            stranger.sendto(b"1 \xff", ("127.0.0.1", one.port))  # arrives first: loopback keeps the order
        other.send_datagram(2, Peer("node1", "127.0.0.1", one.port))
        deadline = time.monotonic() + 20.0
        while not one.heard and time.monotonic() < deadline:
            threading.Event().wait(0.005)
        assert one.heard == [2]


def test_a_machine_probes_no_more_others_at_once_than_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run over more than 65 machines would refuse itself."""
    monkeypatch.setattr(links, "AT_ONCE", 1)
    monkeypatch.setattr(links, "BURST_S", 0.01)
    open_now, most, lock = [0] * 4, [0] * 4, threading.Lock()
    probe, burst = links._probe, links._send_burst

    def counted_probe(peer: Peer, own_address: str, token: str) -> Any:
        with lock:
            me = int(own_address[-1]) - 1
            open_now[me] += 1
            most[me] = max(most[me], open_now[me])
        return probe(peer, own_address, token)

    def counted_burst(sock: socket.socket, seconds: float) -> float | None:
        with lock:
            open_now[int(sock.getsockname()[0][-1]) - 1] -= 1
        return burst(sock, seconds)

    monkeypatch.setattr(links, "_probe", counted_probe)
    monkeypatch.setattr(links, "_send_burst", counted_burst)
    peers, reports = reach_all(["secret"] * 4)
    assert judge(peers, reports) == []
    assert most == [1] * 4


def test_a_port_that_nobody_listens_on_is_named_at_once() -> None:
    with closing(Listener("127.0.0.1", "secret")) as own, socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        taken.close()
        report = reach(0, [Peer("node1", "127.0.0.1", own.port), Peer("node2", "127.0.0.2", port)], own, "secret")
    assert report["links"] == [{"to": 1, "error": "connection refused"}]


def test_the_listener_takes_an_allowed_port_on_one_address() -> None:
    with closing(Listener("127.0.0.1", "secret")) as first:
        with pytest.raises(MachineError, match=r"no port for the reach test at 127.0.0.1: .*; name free ones"):
            Listener("127.0.0.1", "secret", (first.port, first.port))
        with closing(Listener("127.0.0.2", "secret", (first.port, first.port))) as other:
            assert other.port == first.port  # of another address: no listener holds all of them


GOOD = {"round_trip_s": 1e-3, "jitter_s": 0.0, "clock_s": 0.0, "clock_error_s": 1e-3, "bytes_per_s": 1e6}
BAD = {"error": "no answer in time"}


def report(me: int, others: dict[int, dict[str, Any]], heard: Sequence[int]) -> dict[str, Any]:
    return {"machine": me, "links": [{"to": number, **link} for number, link in others.items()], "heard": list(heard)}


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        (  # a firewall that lets answers through, and no new connections
            [report(0, {1: BAD}, [1]), report(1, {0: GOOD}, [])],
            "node2: the way from node1 (10.0.0.1) is closed (no answer in time, while node2 reaches node1); let "
            "10.0.0.1 in by the firewall of node2, as in: sudo ufw allow from 10.0.0.1",
        ),
        (  # one that drops everything of one direction: TCP finds nothing, datagrams tell which
            [report(0, {1: BAD}, []), report(1, {0: BAD}, [0])],
            "node1: the way from node2 (10.0.0.2) is closed (no answer in time, while packets of node1 arrive at "
            "node2); let 10.0.0.2 in by the firewall of node1, as in: sudo ufw allow from 10.0.0.2",
        ),
        (
            [report(0, {1: BAD}, []), report(1, {0: BAD}, [])],
            "node2: the way from node1 (10.0.0.1) is closed (no answer in time); check cable, Wi-Fi isolation and the "
            "firewalls of node2 and node1",
        ),
        (
            [report(0, {1: {**GOOD, "clock_s": -61.0}}, [1]), report(1, {0: GOOD}, [0])],
            "node2: the clock is 61 s behind the leader's; set it there: sudo timedatectl set-ntp true",
        ),
        ([report(0, {1: GOOD}, [1])], "node2 (10.0.0.2) is closed (no report"),
    ],
)
def test_what_is_wrong_with_a_link_is_one_line_with_host_and_fix(reports: list[Any], message: str) -> None:
    (difference,) = judge(PEERS[:2], reports)
    assert message in str(difference)
    assert judge(PEERS[:2], reports, skip=("links", "clock")) == []


def test_machines_of_two_families_are_refused() -> None:
    mixed = [PEERS[0], Peer("node2", "fd00::2", 7000)]
    (difference,) = judge(mixed, [report(0, {1: GOOD}, []), report(1, {0: GOOD}, [])])
    assert str(difference) == (
        "node2: the family of fd00::2 is IPv6, the leader's is IPv4; join by an IPv4 address of the leader"
    )


def test_the_rate_is_that_of_the_second_half() -> None:
    assert links._late_rate([(0.1, 1000), (0.2, 1100), (0.3, 1200)]) == pytest.approx(1000.0)
    assert links._late_rate([(0.5, 1000)]) == 2000.0
    assert links._late_rate([]) == 0.0
