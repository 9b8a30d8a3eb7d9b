"""The one address on which a machine takes part in a run, and the interface that has it. Names are never resolved."""

import socket
from collections.abc import Sequence

from uneven.errors import InputError
from uneven.hardware.network import Interface, default_route, interface_with, read_interfaces


def choose_address(
    bind: str | None = None, interfaces: Sequence[Interface] | None = None, route: str | None = None
) -> str:
    """The leader's address: `bind`, which may name an interface too; else that of the default route's interface, else
    that of the only physical one. InputError with what there is where that does not settle it."""
    if interfaces is None:
        interfaces, route = read_interfaces(), default_route()
    ready = [interface for interface in interfaces if interface.is_up and interface.reachable]
    known = ", ".join(f"{address} ({one.name})" for one in ready for address in one.reachable) or "none"
    if bind is not None:
        if bind in ("0.0.0.0", "::", "*"):
            raise InputError(f"--bind {bind}: listening on all interfaces is refused; this machine has {known}")
        named = [interface for interface in ready if interface.name == bind]
        if named:
            return named[0].reachable[0]
        if not any(bind in (*one.v4, *one.v6) for one in ready) and not bind.startswith("127."):
            raise InputError(f"--bind {bind}: no address of this machine; it has {known}")
        return bind
    physical = [interface for interface in ready if interface.kind == "physical"]
    routed = [interface for interface in ready if interface.name == route]
    if len(found := routed or physical) == 1:
        return found[0].reachable[0]
    why = "several interfaces and no default route" if found else "no interface that leads to other machines"
    raise InputError(f"this machine has {why}: choose its address by --bind ADDRESS; it has {known}")


def interface_of(address: str, interfaces: Sequence[Interface] | None = None) -> str:
    """The name of the interface with this address; InputError where there is none."""
    found = interface_with(address.partition("%")[0], read_interfaces() if interfaces is None else interfaces)
    if found is not None:
        return found.name
    raise InputError(f"no interface of this machine has the address {address}; see: uneven diagnose")


def host_label() -> str:
    """What this machine calls itself, for messages alone: it may resolve to anything, or to nothing."""
    return socket.gethostname() or "unknown"


def unique_labels(hosts: Sequence[str]) -> tuple[str, ...]:
    """Machines may have the same name: the second is 'pc#2'."""
    labels: list[str] = []
    for host in hosts:
        names = (host, *(f"{host}#{count}" for count in range(2, len(hosts) + 1)))
        labels.append(next(name for name in names if name not in labels))
    return tuple(labels)
