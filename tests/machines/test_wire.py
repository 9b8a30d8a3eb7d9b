"""The wire between machines: who knows the token gets in, everybody else costs a bounded amount."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from uneven.errors import InputError
from uneven.machines.wire import MAX_GREETING, Connection, WireError, admit, greet


@contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        joining = socket.create_connection(server.getsockname())
        leading, _ = server.accept()
    with closing(joining), closing(leading):
        yield leading, joining


def handshake(leader_token: str, join_token: str) -> tuple[object, object]:
    """What each side got: its connection, or its error."""
    found: list[object] = [None, None]

    def run(place: int, side: object, sock: socket.socket, token: str) -> None:
        try:
            found[place] = side(sock, token)  # type: ignore[operator]
        except (InputError, WireError) as error:
            found[place] = error

    with sockets() as (leading, joining):
        threads = [
            threading.Thread(target=run, args=(0, admit, leading, leader_token)),
            threading.Thread(target=run, args=(1, greet, joining, join_token)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found[0], found[1]


def test_both_sides_prove_the_token() -> None:
    leader, joined = handshake("secret", "secret")
    assert isinstance(leader, Connection)
    assert isinstance(joined, Connection)


def test_a_wrong_token_is_refused_and_says_so() -> None:
    leader, joined = handshake("secret", "guess")
    assert isinstance(leader, WireError)
    assert isinstance(joined, InputError)
    assert "wrong token" in str(joined)


def test_the_token_is_never_sent() -> None:
    with sockets() as (leading, joining):
        leading.sendall(json.dumps({"nonce": "0" * 32}).encode() + b"\n" + b'{"refused": "no"}\n')
        with pytest.raises(InputError, match="refused"):
            greet(joining, "the-very-secret")
        joining.shutdown(socket.SHUT_WR)
        assert b"the-very-secret" not in leading.recv(4096)


def test_a_leader_without_the_token_is_not_believed() -> None:
    with sockets() as (leading, joining):
        leading.sendall(json.dumps({"nonce": "0" * 32}).encode() + b"\n" + b'{"mac": "00"}\n')
        with pytest.raises(InputError, match="not the leader"):
            greet(joining, "secret")


@pytest.mark.parametrize(
    "line", [b"\x00garbage\n", b"[1]\n", b"{}\n", b'{"nonce": 5}\n', b"x" * (MAX_GREETING + 2)], ids=repr
)
def test_garbage_and_long_lines_end_the_handshake(line: bytes) -> None:
    with sockets() as (leading, joining):
        joining.sendall(line)
        with pytest.raises(WireError):
            admit(leading, "secret")


def test_a_peer_that_leaves_or_says_nothing_ends_a_read() -> None:
    with sockets() as (leading, joining):
        with pytest.raises(WireError, match="in time"):
            Connection(leading).read(0.01)
        joining.close()
        with pytest.raises(WireError, match="closed"):
            Connection(leading).read(5.0)


def test_messages_arrive_whole_and_in_order() -> None:
    with sockets() as (leading, joining):
        sender, reader = Connection(joining), Connection(leading)
        sent = [{"number": number, "text": "x" * number} for number in (0, 1, 5000)]
        for message in sent:
            sender.send(**message)
        assert [reader.read(5.0) for _ in sent] == sent
