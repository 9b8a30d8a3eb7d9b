"""The door against strangers: whoever knows the token gets in, whatever others do to it meanwhile."""

import errno
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from uneven.errors import InputError
from uneven.machines.door import MOST_STRANGERS, Door, knock, listen, split_place, tell_unheard
from uneven.machines.wire import MAX_GREETING, Connection

TOKEN = "the-right-token"


class Guests:
    """What came through the door."""

    def __init__(self) -> None:
        self.first: list[dict[str, Any]] = []
        self.came = threading.Semaphore(0)

    def __call__(self, connection: Connection, first: dict[str, Any]) -> None:
        self.first.append(first)
        connection.send(welcome=1)
        self.came.release()
        connection.close()


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(listen("127.0.0.1"), TOKEN)
    door.open({"node": Guests()})
    yield door
    door.close()


def enter(door: Door) -> None:
    """The right one still gets in."""
    guests = door._handlers["node"]
    assert isinstance(guests, Guests)
    connection = knock(door.address, door.port, TOKEN, 20.0)
    connection.send(role="node", host="here")
    assert connection.read(20.0) == {"welcome": 1}
    assert guests.came.acquire(timeout=20.0)
    assert guests.first[-1] == {"role": "node", "host": "here"}
    connection.close()


def strangers(door: Door, count: int, stack: ExitStack) -> list[socket.socket]:
    return [stack.enter_context(closing(socket.create_connection((door.address, door.port)))) for _ in range(count)]


def test_a_thousand_wrong_tokens_keep_nobody_out(door: Door) -> None:
    for _ in range(1000):
        with pytest.raises(InputError, match="wrong token"):
            knock(door.address, door.port, "a-wrong-token", 5.0)
    assert door.wrong_tokens == {"127.0.0.1": 1000}
    enter(door)


def test_half_open_slow_and_garbage_keep_nobody_out(door: Door) -> None:
    with ExitStack() as stack:
        strangers(door, 2 * MOST_STRANGERS, stack)  # say nothing
        for slow in strangers(door, MOST_STRANGERS // 2, stack):
            slow.sendall(b"{")
        for loud in strangers(door, 40, stack):
            loud.sendall(b"\x00\xff garbage \n" * 20)
        for mute in strangers(door, 40, stack):
            mute.shutdown(socket.SHUT_WR)
        enter(door)
        assert len(door._strangers) <= MOST_STRANGERS


def test_the_oldest_stranger_makes_room(door: Door) -> None:
    with ExitStack() as stack:
        first, *_ = strangers(door, MOST_STRANGERS + 1, stack)
        first.settimeout(20.0)
        while first.recv(4096):  # its challenge, then the end
            pass


def test_an_oversized_line_is_cut_off_and_memory_stays_bounded(door: Door) -> None:
    enter(door)
    much = b"x" * (16 << 20)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(10):
            with socket.create_connection((door.address, door.port)) as loud:
                loud.settimeout(20.0)
                with pytest.raises(OSError, match=r"."):
                    loud.sendall(much)
        enter(door)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 1 << 20


def test_an_answer_with_odd_characters_is_a_wrong_one(door: Door) -> None:
    with socket.create_connection((door.address, door.port)) as stranger:
        stranger.sendall(b'{"nonce": "' + b"0" * 32 + b'", "mac": "\\u00e9"}\n')
        stranger.settimeout(20.0)
        answer = b""
        while chunk := stranger.recv(4096):
            answer += chunk
        assert b"wrong token" in answer
    enter(door)


def test_nesting_and_numbers_without_end_are_garbage(door: Door) -> None:
    for line in (b"[" * MAX_GREETING, b"9" * MAX_GREETING, b'{"nonce": "' + b"0" * 32 + b'"}'):
        with socket.create_connection((door.address, door.port)) as stranger:
            stranger.sendall(line + b"\n")
            stranger.settimeout(20.0)
            while stranger.recv(4096):
                pass
    enter(door)


def test_an_unknown_role_is_refused_in_words(door: Door) -> None:
    connection = knock(door.address, door.port, TOKEN, 20.0)
    connection.send(role="burglar")
    assert "no role 'burglar'" in connection.read(20.0)["refused"]
    connection.close()


def test_whoever_knocks_before_the_door_is_open_waits() -> None:
    """A machine that came between the door and its handler was told that there is no role 'node'."""
    early = Door(listen("127.0.0.1"), TOKEN)
    with ThreadPoolExecutor(1) as pool, closing(early):
        knocked = pool.submit(knock, early.address, early.port, TOKEN, 20.0)
        early.open({"node": Guests()})
        connection = knocked.result(20.0)
        connection.send(role="node")
        assert connection.read(20.0) == {"welcome": 1}
        connection.close()


def test_it_listens_on_one_address_and_within_the_ports() -> None:
    taken = listen("127.0.0.1")
    port = taken.getsockname()[1]
    with closing(taken):
        with pytest.raises(InputError, match=rf"127.0.0.1, port {port} .*; choose another --port, or another address"):
            listen("127.0.0.1", (port, port), "--port")
        with pytest.raises(InputError, match=rf"127.0.0.1, port {port} .*; choose other --ports, or another address"):
            listen("127.0.0.1", (port, port))
        with closing(listen("127.0.0.1", (port, min(port + 20, 65535)))) as other:
            assert port < other.getsockname()[1] <= port + 20
            assert other.getsockname()[0] == "127.0.0.1"


def test_no_leader_is_an_error_in_words() -> None:
    with closing(listen("127.0.0.1")) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(InputError, match=f"no leader at 127.0.0.1:{port}.*uneven run"):
        knock("127.0.0.1", port, TOKEN, 0.3)


def test_a_machine_that_hears_no_answer_says_so_and_a_stranger_cannot(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its firewall drops what the leader sends: TCP finds nothing, and a datagram needs one direction alone."""
    tell_unheard(door.address, door.port, "a-wrong-token", "stranger")
    tell_unheard(door.address, door.port + 1, TOKEN, "of-another-door")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        for garbage in (b"", b"\xff" * 200, b"x " + b"0" * 4000):
            other.sendto(garbage, (door.address, door.port))

    def no_answer(*_: object, **__: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr("uneven.machines.door.socket.create_connection", no_answer)
    with pytest.raises(InputError, match=r"no leader at .*sudo ufw allow from 127\.0\.0\.1"):
        knock(door.address, door.port, TOKEN, 0.1)
    end_s = time.monotonic() + 20.0
    while not door.unheard and time.monotonic() < end_s:
        time.sleep(0.01)
    assert door.unheard == {"127.0.0.1": socket.gethostname()}


def test_a_machine_without_the_leaders_family_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("uneven.machines.door.socket.create_connection", unreachable)
    with pytest.raises(InputError, match=f"{socket.gethostname()} has no way to an IPv4 address: .*--bind and an IPv6"):
        knock("192.0.2.1", 7000, TOKEN, 0.1)


@pytest.mark.parametrize("place", ["", "host", "host:", ":7000", "host:0", "host:70000", "host:x"])
def test_a_place_needs_address_and_port(place: str) -> None:
    with pytest.raises(InputError, match="ADDRESS:PORT"):
        split_place(place)


def test_addresses_of_both_families() -> None:
    assert split_place("192.0.2.10:7000") == ("192.0.2.10", 7000)
    assert split_place("[fd00::1]:7000") == ("fd00::1", 7000)
