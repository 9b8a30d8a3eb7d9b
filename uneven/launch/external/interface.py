"""The interface between machines, for ranks that another launcher started: the one to the store, or the user's.

Called once per process by meeting.py after the ranks have met, before a group forms. Gloo and NCCL read the
choice from their variables. What is wrong with a variable that the user set is told to all ranks, and all refuse
together with the line to export: Gloo would wait without a word, and on one side only. Whether the machines reach each
other is tested before the first run (launch/checks/parity.py).
"""

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace

from uneven.comm.fingerprint import exchange
from uneven.comm.gloo import use_gloo_address
from uneven.comm.store import Store
from uneven.errors import InputError
from uneven.hardware.network import Interface, interface_with, is_loopback, is_v6, read_interfaces, source_address
from uneven.launch.external.placement import Placement

GLOO = "GLOO_SOCKET_IFNAME"
NCCL, FAMILY = "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"


@dataclass(frozen=True)
class Choice:
    """How one rank speaks to the others: `address` is the one that Gloo would advertise."""

    host: str
    interface: str
    address: str
    proposal: str  # the interface on the way to the store
    is_users: bool = False
    problem: str = ""

    @property
    def doubt(self) -> str:
        """What is to be said of the user's choice if the machines do not reach each other; empty where nothing is."""
        if not self.is_users or self.interface == self.proposal:
            return ""
        return (
            f"{self.host}: {GLOO}={self.interface} ({self.address}) does not lead to the other machines; unset it, or: "
            f"export {GLOO}={self.proposal}"
        )


def choose(placement: Placement, rank: int, interfaces: Sequence[Interface], given: str) -> Choice:
    """The interface of this rank; `given` is what the user set for Gloo. A problem stands in the choice."""
    facts, machines = placement.facts, placement.machines
    host, address = placement.hosts[machines[rank]], str(facts[rank]["address"])
    others = [
        str(fact["address"])
        for fact, machine in zip(facts, machines, strict=True)
        if machine != machines[rank] and not is_loopback(str(fact["address"]))
    ]
    if others and is_loopback(address):  # the store is on this machine, under a name that leads to loopback
        address = source_address(others[0]) or address
    routed = interface_with(address, interfaces)
    name = "" if routed is None else routed.name
    if not given:
        problem = "" if not others or not is_loopback(address) else f"{host}: no route leads to {others[0]}"
        return Choice(host, name, address, name, problem=problem)
    problem, first = _check_given(given, interfaces, len(placement.hosts) > 1, is_v6(address), name)
    return Choice(host, given, first or address, name, True, f"{host}: {problem}" if problem else "")


def _check_given(
    given: str, interfaces: Sequence[Interface], is_many: bool, needs_v6: bool, routed: str
) -> tuple[str, str]:
    """(what is wrong with the user's choice for Gloo, the address that Gloo would take)."""
    by_name = {interface.name: interface for interface in interfaces}
    kind, addresses = ("IPv6" if needs_v6 else "IPv4"), list[str]()
    for name in given.split(","):
        found = by_name.get(name)
        family = () if found is None else found.v6 if needs_v6 else found.v4
        what = ""
        if found is None:
            what = f": there is no interface {name!r} (here are {', '.join(by_name)})"
        elif not found.is_up or not found.addresses:
            what = f": the interface {name} {'has no address' if found.is_up else 'is down'}"
        elif is_many and found.kind == "loopback":
            what = " is loopback, which other machines cannot reach"
        elif not family:
            what = f": the interface {name} has no {kind} address, and the store has one"
        if what:
            return f"{GLOO}={given}{what}; unset it, or: export {GLOO}={routed or 'NAME'}", ""
        addresses += family
    return "", addresses[0]


def check_nccl(host: str, given: str, interfaces: Sequence[Interface]) -> str:
    """What is wrong with the user's NCCL_SOCKET_IFNAME: a list of prefixes, '=' for whole names, '^' for all others."""
    pattern = given.removeprefix("^")
    is_exact = pattern.startswith("=")
    wanted = [name for name in pattern.removeprefix("=").split(",") if name]

    def matches(name: str) -> bool:
        return any(name == want if is_exact else name.startswith(want) for want in wanted)

    left = [one for one in interfaces if matches(one.name) != given.startswith("^") and one.is_up and one.addresses]
    if given and not left:
        names = ", ".join(interface.name for interface in interfaces if interface.is_up)
        return f"{host}: {NCCL}={given} leaves no interface that is up (up are {names}); unset it, or name one of them"
    return ""


def keep_gloo_at(address: str, interfaces: Sequence[Interface]) -> None:
    """Groups of this process use this address: by itself Gloo takes the first one of the interface, an IPv4 one."""
    listed = interface_with(address, interfaces)
    if listed is None or listed.addresses[0] != address:
        use_gloo_address(address)


def agree_on_interface(
    store: Store,
    rank: int,
    placement: Placement,
    environ: MutableMapping[str, str] = os.environ,
    interfaces: Sequence[Interface] | None = None,
) -> tuple[Choice, list[str]]:
    """Choose, agree, and set what Gloo and NCCL read; InputError on all ranks together.

    Returns how this rank speaks to the others, and lines for the user.
    """
    interfaces = read_interfaces() if interfaces is None else interfaces
    own = choose(placement, rank, interfaces, environ.get(GLOO, ""))
    own = replace(own, problem=own.problem or check_nccl(own.host, environ.get(NCCL, ""), interfaces))
    ranks, is_many = range(len(placement.facts)), len(placement.hosts) > 1
    choices = [Choice(**one) for one in exchange(store, "interface", rank, ranks, asdict(own))]
    _refuse([choice.problem for choice in choices])
    _refuse_two_families(choices)
    if not own.is_users and own.interface:
        environ[GLOO] = own.interface
    keep_gloo_at(own.address, interfaces)
    if own.interface and "," not in own.interface:
        environ.setdefault(NCCL, f"={own.interface}")
        environ.setdefault(FAMILY, "AF_INET6" if is_v6(own.address) else "AF_INET")
    return own, _describe(placement, choices, own) if is_many else []


def _refuse(problems: Sequence[str]) -> None:
    found = list(dict.fromkeys(problem for problem in problems if problem))
    if found:
        raise InputError("; ".join(found))


def _refuse_two_families(choices: Sequence[Choice]) -> None:
    by_family = {is_v6(choice.address): choice for choice in reversed(choices)}
    if len(by_family) == 2:
        v4, v6 = by_family[False], by_family[True]
        raise InputError(
            f"{v4.host} has {v4.address} and {v6.host} has {v6.address} on the way to the store: all machines need "
            "addresses of one kind; export MASTER_ADDR=ADDRESS of the kind that all have (uneven diagnose lists them)"
        )


def _describe(placement: Placement, choices: Sequence[Choice], own: Choice) -> list[str]:
    how = f"set by {GLOO}" if own.is_users else "the way to the store"
    line = f"  network: {own.interface or own.address} ({own.address}), {how}"
    wrong: dict[str, list[str]] = {}
    for machine, host in enumerate(placement.hosts):
        rank = placement.machines.index(machine)
        name = str(placement.facts[rank]["name"])
        if not choices[rank].is_users and (name == "nowhere" or is_loopback(name)):
            wrong.setdefault(name, []).append(host)
    if wrong:
        names = "; ".join(f"{', '.join(hosts)} to {name}" for name, hosts in wrong.items())
        line += f", not what the hostnames lead to ({names}), which Gloo would tell the others"
    return [line]
