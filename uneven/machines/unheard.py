"""A machine that knocks and hears no answer says so in a datagram, which needs one direction alone.

A firewall that drops what comes from the leader lets the knock out, but TCP needs both directions, so the leader would
wait for a machine that has given up. The datagram is signed with the token, for this door and this sender alone, and
ends a run that has not begun; a stranger's is dropped unread. Used by machines/door.py, on both sides.
"""

import socket
from contextlib import suppress

from uneven.machines.wire import is_mac, make_mac

MOST_BYTES = 256
MOST_REMEMBERED = 64
COPIES = 3  # one may be lost


class UnheardBox:
    """The leader's side: a datagram socket at the door's address and port. Life cycle: as the door."""

    def __init__(self, address: str, port: int, token: str) -> None:
        self.hosts: dict[str, str] = {}  # that heard no answer, by their addresses
        self._place, self._token = f"{address} {port}", token
        self.sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.setblocking(False)
        with suppress(OSError):  # taken by another program: then nobody is heard in this way
            self.sock.bind((address, port))

    def read(self) -> None:
        """Take one datagram."""
        try:
            data, source = self.sock.recvfrom(MOST_BYTES)
        except OSError:
            return
        host, _, mac = data.decode(errors="replace").partition(" ")
        address = str(source[0])
        is_known = is_mac(mac, self._token, "unheard", self._place, address, host)
        if is_known and len(self.hosts) < MOST_REMEMBERED:
            self.hosts[address] = host


def tell_unheard(address: str, port: int, token: str, host: str) -> None:
    """The joining side, when it gives up."""
    host = "".join(host.split())[:64]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        own = str(sock.getsockname()[0])
        for _ in range(COPIES):
            sock.send(f"{host} {make_mac(token, 'unheard', f'{address} {port}', own, host)}".encode())
