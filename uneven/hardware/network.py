"""The network interfaces, and which one a job over several machines would probably use. Sends no packet."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from uneven.hardware.optional import read_text

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
