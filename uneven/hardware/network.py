"""The network interfaces, the one that a job over several machines would probably use, and addresses. Sends no packet.

Gloo advertises what this machine's own name resolves to. On Debian that is 127.0.1.1, on a machine without an entry in
/etc/hosts it is nothing; either way other machines wait for ever. So names are resolved here, and the interface is
chosen by the route to a machine that was reached.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from uneven.hardware.optional import read_text

DISCARD = 9  # a port for route look-ups, which send nothing
# Created by containers and virtual machines: up and with an address, but without a link to other machines.
_VIRTUAL = re.compile(r"(docker|veth|br-|virbr|vmnet|vboxnet|cni|flannel|cali|cilium|lxc|lxd|podman|tap|ifb|dummy)")
# Tunnels: Tailscale, WireGuard, OpenVPN, ZeroTier, macOS' own, Nebula, PPP, IPsec, AnyConnect, Mullvad, NordVPN. They
# may lead to the other machines, but slower than a cable and only to members of the VPN.
_VPN = re.compile(r"(tailscale|wg\d|wg-|tun|zt|utun|nebula|ppp|ipsec|cscotun|gpd\d|wt\d|nordlynx|proton|mullvad|vpn)")


InterfaceKind = Literal["loopback", "virtual", "vpn", "physical"]


@dataclass(frozen=True)
class Interface:
    """A network interface and its addresses."""

    name: str
    kind: InterfaceKind
    is_up: bool
    v4: tuple[str, ...] = ()
    v6: tuple[str, ...] = ()
    speed_mbps: int | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """In the order in which Gloo finds them: it takes the first."""
        return (*self.v4, *self.v6)

    @property
    def reachable(self) -> tuple[str, ...]:
        """Those that other machines can reach: an IPv6 address of the link alone needs its interface named too."""
        return tuple(address for address in self.addresses if not address.lower().startswith("fe80:"))


def kind_of(name: str) -> InterfaceKind:
    """The kind of an interface, judged by its name."""
    if re.fullmatch(r"lo\d*|Loopback.*", name):
        return "loopback"
    if _VPN.match(name):
        return "vpn"
    return "virtual" if _VIRTUAL.match(name) else "physical"


def read_interfaces() -> tuple[Interface, ...]:
    """All interfaces, sorted by name; empty if none can be read."""
    try:
        import psutil

        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except Exception:  # it is not installed, or a platform call fails (Android, gVisor)
        return ()
    interfaces = []
    for name in sorted({*addresses, *states}):
        by_family: dict[int, list[str]] = {}
        for address in addresses.get(name, []):
            by_family.setdefault(int(address.family), []).append(address.address.partition("%")[0])
        state = states.get(name)
        interfaces.append(
            Interface(
                name=name,
                kind=kind_of(name),
                is_up=bool(state and state.isup),
                v4=tuple(by_family.get(int(socket.AF_INET), ())),
                v6=tuple(by_family.get(int(socket.AF_INET6), ())),
                speed_mbps=int(state.speed) if state and state.speed > 0 else None,
            )
        )
    return tuple(interfaces)


def default_route(root: Path = Path("/")) -> str | None:
    """The interface of the IPv4 default route."""
    for line in (read_text(root / "proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000":
            return fields[0]
    return None


def likely_interface(
    interfaces: Sequence[Interface], route: str | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[str | None, str]:
    """(name, reason) of the interface that Gloo or NCCL would probably use between machines."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if environ.get(variable):
            return environ[variable], f"set by {variable}"
    ready = [interface for interface in interfaces if interface.is_up and (interface.v4 or interface.v6)]
    physical = [interface for interface in ready if interface.kind == "physical"]
    if any(interface.name == route for interface in physical):
        return route, "it has the default route"
    if physical:
        fastest = max(physical, key=lambda interface: interface.speed_mbps or 0)
        return fastest.name, "it is up and has an address"
    if vpn := next((interface.name for interface in ready if interface.kind == "vpn"), None):
        return vpn, "a VPN, and nothing else is up: other machines must be in it, and its speed is the tunnel's"
    loopback = next((interface.name for interface in ready if interface.kind == "loopback"), None)
    return loopback, "only loopback is up: ranks on this machine only" if loopback else "no interface is up"


def describe_vpns(interfaces: Sequence[Interface]) -> list[str]:
    names = [interface.name for interface in interfaces if interface.kind == "vpn" and interface.is_up]
    if not names:
        return []
    return [
        f"{', '.join(names)}: a VPN; it is used between machines only where the address of rank 0 lies in it, or by "
        f"GLOO_SOCKET_IFNAME={names[0]} on all of them"
    ]


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
