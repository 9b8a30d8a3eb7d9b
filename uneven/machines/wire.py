"""The connection between a leader and the other machines of a run: JSON lines, and files as bytes of a known length.

The token guards it: both sides prove that they know it (HMAC over two nonces) before either reads anything else, and
neither sends it. It is not encrypted: the promise is a trusted network. Nothing that arrives is unpickled, every line
and every wait has a limit, so a stranger costs a bounded amount of memory for a bounded time. No torch in this folder.
"""

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from typing import Any, BinaryIO

from uneven.errors import InputError

HANDSHAKE_S = 5.0  # for a whole handshake: a peer that sends a byte a second is cut off too
MAX_GREETING = 512  # bytes of a line before the peer has shown that it knows the token
MAX_LINE = 1 << 20
CHUNK = 1 << 16


class WireError(ConnectionError):
    """The other side is gone, silent, or does not speak as agreed."""


class BadMessageError(WireError):
    """It sent what nobody of this version sends: the connection is of no use any more."""


class Connection:
    """Lines in both directions over one socket. One thread reads; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._received = bytearray()
        self._lock = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def own_address(self) -> str:
        """The address of this machine on the interface that reached the other one."""
        return str(self.sock.getsockname()[0])

    @property
    def peer_address(self) -> str:
        try:
            return str(self.sock.getpeername()[0])
        except OSError:  # it has hung up already
            return "an unknown address"

    def send(self, **message: Any) -> None:
        """WireError where the other side is gone."""
        try:
            with self._lock:
                self.sock.sendall(_line(message))
        except OSError as error:
            raise WireError(f"the connection is lost: {error}") from error

    def read(self, timeout_s: float, limit: int = MAX_LINE) -> dict[str, Any]:
        """The next message; WireError where none comes in time, whole, or as a JSON object of at most `limit` bytes."""
        end_s = time.monotonic() + timeout_s
        while (length := self._received.find(b"\n")) < 0:
            if len(self._received) > limit:
                raise BadMessageError(f"it sent a line of more than {limit} bytes")
            self._receive(end_s, limit + 1 - len(self._received))
        line = bytes(self._received[:length])
        del self._received[: length + 1]
        if length > limit:
            raise BadMessageError(f"it sent a line of more than {limit} bytes")
        return _parse(line)

    def send_file(self, file: BinaryIO, size: int, stall_s: float, **header: Any) -> None:
        """A line that says `size`, then so many bytes of a file, a piece at a time; no other line comes between.

        WireError where the other side is gone, takes nothing for `stall_s`, or the file has become shorter; the
        connection is then of no use, because the bytes that were promised are missing.
        """
        try:
            with self._lock:
                self.sock.settimeout(stall_s)
                self.sock.sendall(json.dumps({**header, "size": size}).encode() + b"\n")
                while size:
                    if not (piece := file.read(min(size, CHUNK))):
                        self.close()
                        raise WireError(f"{size} bytes of the file are gone")
                    self.sock.sendall(piece)
                    size -= len(piece)
        except WireError:
            raise
        except OSError as error:
            raise WireError(f"the connection is lost: {error}") from error

    def pieces(self, size: int, stall_s: float) -> Iterator[bytes]:
        """The next `size` bytes, as they come; WireError where none comes for `stall_s`."""
        while size:
            if not self._received:
                self._receive(time.monotonic() + stall_s, size)
            piece = bytes(self._received[:size])
            del self._received[: len(piece)]
            size -= len(piece)
            yield piece

    def close(self) -> None:
        """Ends a read in another thread too."""
        with suppress(OSError):  # the other side may have closed it already
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _receive(self, end_s: float, most: int) -> None:
        left_s = end_s - time.monotonic()
        try:
            self.sock.settimeout(max(left_s, 1e-6))  # 0 would mean: do not wait for what is there already
            chunk = self.sock.recv(min(most, CHUNK))
        except TimeoutError as error:
            raise WireError("nothing came in time") from error
        except OSError as error:
            raise WireError(f"the connection is lost: {error}") from error
        if not chunk:
            raise WireError("the other side has closed the connection")
        self._received += chunk


def greet(sock: socket.socket, token: str) -> Connection:
    """The joining side: prove the token, and see that the other side knows it; InputError where one does not."""
    connection, own = Connection(sock), secrets.token_hex(16)
    end_s = time.monotonic() + HANDSHAKE_S
    theirs = _nonce(connection.read(HANDSHAKE_S, MAX_GREETING))
    connection.send(nonce=own, mac=make_mac(token, "join", theirs, own))
    answer = connection.read(end_s - time.monotonic(), MAX_GREETING)
    if "refused" in answer:
        raise InputError(f"the leader refused: {answer['refused']}")
    if not is_mac(str(answer.get("mac", "")), token, "lead", own, theirs):
        raise InputError("the other side does not know the token: it is not the leader of this run")
    return connection


def admit(sock: socket.socket, token: str, on_wrong: Callable[[], None] = lambda: None) -> Connection:
    """The leader's side: WireError where the other side does not prove the token in time.

    `on_wrong` is called before one that sends a wrong proof is told so.
    """
    connection, own = Connection(sock), secrets.token_hex(16)
    connection.send(nonce=own)
    answer = connection.read(HANDSHAKE_S, MAX_GREETING)
    theirs = _nonce(answer)
    if not is_mac(str(answer.get("mac", "")), token, "join", own, theirs):
        on_wrong()
        connection.send(refused="wrong token; take the line that the leader printed")
        raise WireError("wrong token")
    connection.send(mac=make_mac(token, "lead", theirs, own))
    return connection


def new_token() -> str:
    return secrets.token_urlsafe(16)


def _nonce(message: dict[str, Any]) -> str:
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 32:
        raise WireError("the other side is no leader and no machine of a run of uneven")
    return nonce


def _parse(line: bytes) -> dict[str, Any]:
    """A line without its end as a message; WireError where it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadMessageError("it sent what is not a line of JSON") from error
    if not isinstance(message, dict):
        raise BadMessageError("it sent what is not a message")
    return message


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def make_mac(token: str, *words: str) -> str:
    """Shows that the sender knows the token and means these words."""
    return hmac.new(token.encode(), "|".join(words).encode(), sha256).hexdigest()


def is_mac(mac: str, token: str, *words: str) -> bool:
    # As bytes: `compare_digest` refuses texts beyond ASCII, which a stranger may send.
    return hmac.compare_digest(mac.encode(errors="replace"), make_mac(token, *words).encode())
