"""Numeric addresses: of a name, of this machine towards another one, and the interface that has them. Sends no packet.

Gloo advertises what this machine's own name resolves to. On Debian that is 127.0.1.1, on a machine without an entry in
/etc/hosts it is nothing; either way other machines wait for ever. So names are resolved here, and the interface is
chosen by the route to a machine that was reached.
"""

import ipaddress
import os
import socket
from collections.abc import Sequence

from uneven.hardware.network import Interface, default_route, likely_interface, read_interfaces

DISCARD = 9  # a port for route look-ups, which send nothing


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_v6(address: str) -> bool:
    return ":" in address


def resolve(host: str) -> tuple[str, ...]:
    """The numeric addresses of a name, IPv4 first, each once; empty where nobody knows the name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return tuple(sorted(addresses, key=is_v6))


def source_address(target: str) -> str | None:
    """The address of this machine from which packets to `target` would leave; None without a route to it."""
    family = socket.AF_INET6 if is_v6(target) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, DISCARD))  # of a datagram socket: looks up the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_with(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    """The interface that has this address; that of all loopback addresses is lo."""
    if is_loopback(address):
        return next((interface for interface in interfaces if interface.kind == "loopback"), None)
    return next((interface for interface in interfaces if address in interface.addresses), None)


def own_name_resolves_to() -> str:
    """Where this machine's own name leads: 'nowhere', or an address, which Gloo would advertise."""
    addresses = resolve(socket.gethostname())
    return addresses[0] if addresses else "nowhere"


def outward_address(peers: Sequence[str] = ()) -> str | None:
    """The address at which other machines reach this one: on the way to one of `peers`, else of the likely interface.

    `peers` are names or addresses of other machines. None where only loopback is up.
    """
    interfaces = read_interfaces()
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        for address in (address for peer in peers for address in resolve(peer)):
            source = None if is_loopback(address) else source_address(address)
            if source is not None and not is_loopback(source):
                return source
    name, _ = likely_interface(interfaces, default_route(), os.environ)
    name = (name or "").split(",")[0].lstrip("=")
    found = next((interface for interface in interfaces if interface.name == name), None)
    if found is None or found.kind == "loopback" or not found.reachable:
        return None
    return found.reachable[0]
