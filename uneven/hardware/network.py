"""The network interfaces, and which one a job over several machines would probably use. Used by `uneven diagnose`.

Reads psutil, or /sys, /proc and one ioctl if it is missing. Sends no packet.
"""

import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from uneven.hardware.optional import read_int, read_text

# Created by containers and virtual machines: up and with an address, but without a link to other machines.
_VIRTUAL = re.compile(r"(docker|veth|br-|virbr|vmnet|vboxnet|cni|flannel|cali|cilium|lxc|lxd|podman|tap|ifb|dummy)")
# Tunnels: Tailscale, WireGuard, OpenVPN, ZeroTier, macOS' own, Nebula, PPP, IPsec, AnyConnect, Mullvad, NordVPN. They
# may lead to the other machines, but slower than a cable and only to members of the VPN.
_VPN = re.compile(r"(tailscale|wg\d|wg-|tun|zt|utun|nebula|ppp|ipsec|cscotun|gpd\d|wt\d|nordlynx|proton|mullvad|vpn)")


# What decides between interfaces and families: looked up in the strings of torch 2.13 and NCCL's guide.
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "Gloo uses these interfaces (whole names, commas between), the first address of each",
    "NCCL_SOCKET_IFNAME": "NCCL uses interfaces that begin so; =eth0 is that one alone, ^docker all but those",
    "NCCL_SOCKET_FAMILY": "NCCL uses addresses of this kind alone: AF_INET is IPv4, AF_INET6 is IPv6",
    "NCCL_COMM_ID": "NCCL's ranks meet at this HOST:PORT",
    "NCCL_IB_DISABLE": "1 keeps NCCL to sockets where InfiniBand is there",
    "GLOO_DEVICE_TRANSPORT": "Gloo's transport: TCP, or TCP_TLS where torch was built with it",
    "TP_SOCKET_IFNAME": "read by torch's RPC alone, not by Gloo or NCCL",
}
_FURTHER = ("GLOO_LOG_LEVEL", "GLOO_DISABLE_CONNECTION_RETRIES", "GLOO_ENABLE_")


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


def _read_psutil() -> list[Interface] | None:
    try:
        import psutil

        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except Exception:  # not installed, or a platform call that fails (Android, gVisor)
        return None
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
    return interfaces


def _v4_address(name: str) -> tuple[str, ...]:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # SIOCGIFADDR; the answer is a struct ifreq with the address in bytes 20 to 24.
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
        return (socket.inet_ntoa(answer[20:24]),)
    except (ImportError, OSError):
        return ()


def _v6_addresses(root: Path) -> dict[str, tuple[str, ...]]:
    addresses: dict[str, tuple[str, ...]] = {}
    for line in (read_text(root / "proc/net/if_inet6") or "").splitlines():
        fields = line.split()
        if len(fields) == 6 and len(fields[0]) == 32:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
            addresses[fields[5]] = (*addresses.get(fields[5], ()), address)
    return addresses


def _read_sys(root: Path) -> list[Interface]:
    v6 = _v6_addresses(root)
    interfaces = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        if not folder.is_dir():
            continue  # bonding_masters is a file
        flags = read_text(folder / "flags") or "0x0"
        speed = read_int(folder / "speed")
        interfaces.append(
            Interface(
                name=folder.name,
                kind=kind_of(folder.name),
                # Bit 0 of the flags is IFF_UP; operstate is 'unknown' for lo and for many drivers.
                is_up=bool(int(flags.strip() or "0", 16) & 1),
                v4=_v4_address(folder.name) if root == Path("/") else (),
                v6=v6.get(folder.name, ()),
                speed_mbps=speed if speed is not None and speed > 0 else None,
            )
        )
    return interfaces


def read_interfaces(root: Path = Path("/")) -> tuple[Interface, ...]:
    """All interfaces, sorted by name; empty if none can be read."""
    interfaces = _read_psutil() if root == Path("/") else None
    return tuple(interfaces if interfaces is not None else _read_sys(root))


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


def describe_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line for each variable that is set about the network of a job, and for those that nobody reads."""
    lines = [f"{name}={environ[name]} is set: {what}" for name, what in VARIABLES.items() if environ.get(name)]
    unread = [
        name for name in sorted(environ) if name.startswith("GLOO_") and not name.startswith((*VARIABLES, *_FURTHER))
    ]
    return lines + [
        f"{name}={environ[name]} is set, but Gloo does not read it: it takes the first address of "
        "GLOO_SOCKET_IFNAME's interface, IPv4 before IPv6; NCCL has NCCL_SOCKET_FAMILY"
        for name in unread
    ]


def describe_vpns(interfaces: Sequence[Interface]) -> list[str]:
    names = [interface.name for interface in interfaces if interface.kind == "vpn" and interface.is_up]
    if not names:
        return []
    return [
        f"{', '.join(names)}: a VPN; it is used between machines only where the address of rank 0 lies in it, or by "
        f"GLOO_SOCKET_IFNAME={names[0]} on all of them"
    ]
