"""The interface between machines: the one on the way to the store, and what is said of a wrong one of the user's."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from uneven.comm.store import open_store, reach_store, under
from uneven.errors import InputError
from uneven.hardware.network import Interface
from uneven.launch.external import interface
from uneven.launch.external.interface import Choice, agree_on_interface, check_nccl, choose
from uneven.launch.external.placement import Placement

LO = Interface("lo", "loopback", True, ("127.0.0.1",), ("::1",))
LAN = Interface("lan0", "physical", True, ("10.0.0.1", "10.0.0.11"), ("fd77::1",))
VPN = Interface("tailscale0", "vpn", True, ("100.64.0.1",))
DOWN = Interface("eth1", "physical", False, ("10.1.0.1",))
BARE = Interface("eth2", "physical", True)
V6 = Interface("six0", "physical", True, (), ("fe80::1", "fd00::6"))
ALL = (LO, LAN, VPN, DOWN, BARE, V6)


def placed(*addresses: str, names: tuple[str, ...] = ("10.0.0.1", "10.0.0.2")) -> Placement:
    return Placement(
        tuple(
            {"host": f"node{number + 1}", "machine": str(number), "address": address, "name": name}
            for number, (address, name) in enumerate(zip(addresses, names, strict=True))
        )
    )


def test_the_interface_is_the_one_on_the_way_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(placed("10.0.0.1", "10.0.0.2"), 0, ALL, "").interface == "lan0"
    assert choose(placed("fd77::1", "fd77::2"), 0, ALL, "").address == "fd77::1"
    # On the machine of the store its name leads to loopback: then it is the way to one of the others.
    monkeypatch.setattr(interface, "source_address", lambda target: {"10.0.0.2": "10.0.0.1"}.get(target))
    own = choose(placed("127.0.0.1", "10.0.0.2"), 0, ALL, "")
    assert (own.interface, own.address, own.problem) == ("lan0", "10.0.0.1", "")
    monkeypatch.setattr(interface, "source_address", lambda target: None)
    assert "no route leads to 10.0.0.2" in choose(placed("127.0.0.1", "10.0.0.2"), 0, ALL, "").problem


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("eth9", "there is no interface 'eth9' (here are lo, lan0, tailscale0, eth1, eth2, six0)"),
        ("lan0,eth9", "there is no interface 'eth9'"),
        ("eth1", "the interface eth1 is down"),
        ("eth2", "the interface eth2 has no address"),
        ("lo", "is loopback, which other machines cannot reach"),
        ("six0", "the interface six0 has no IPv4 address, and the store has one"),
    ],
)
def test_a_wrong_choice_of_the_users_is_named_with_the_line_to_export(given: str, words: str) -> None:
    problem = choose(placed("10.0.0.1", "10.0.0.2"), 0, ALL, given).problem
    assert problem.startswith(f"node1: GLOO_SOCKET_IFNAME={given}")
    assert words in problem
    assert problem.endswith("export GLOO_SOCKET_IFNAME=lan0")


def test_on_one_machine_loopback_is_right() -> None:
    one = Placement(({"host": "a", "machine": "1", "address": "127.0.0.1", "name": "127.0.1.1"},) * 2)
    assert choose(one, 0, ALL, "").interface == "lo"
    assert choose(one, 1, ALL, "lo").problem == ""


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        *[("", True), ("lan", True), ("=lan0", True), ("=lan", False), ("^lo", True)],
        *[("^lo,lan,tailscale,six", False), ("eth1", False), ("=eth9,tailscale0", True)],
    ],
)
def test_the_choice_for_nccl_is_a_list_of_prefixes(given: str, is_right: bool) -> None:
    assert (check_nccl("node1", given, ALL) == "") == is_right


def agreed(placement: Placement, environs: list[dict[str, str]], interfaces: list[tuple[Interface, ...]]) -> list[Any]:
    store, port = open_store()

    def run(rank: int) -> Any:
        keys = under("interface", reach_store("127.0.0.1", port))
        try:
            return agree_on_interface(keys, rank, placement, environs[rank], interfaces[rank])
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(len(environs)) as pool:
        found = [*pool.map(run, range(len(environs)))]
    del store
    return found


HERE, THERE = (LO, LAN), (LO, Interface("enp3s0", "physical", True, ("10.0.0.2",)))


def test_what_gloo_and_nccl_read_is_set_and_the_names_that_would_mislead_are_told() -> None:
    environs: list[dict[str, str]] = [{}, {"NCCL_SOCKET_IFNAME": "enp"}]
    placement = placed("10.0.0.1", "10.0.0.2", names=("127.0.1.1", "nowhere"))
    said = agreed(placement, environs, [HERE, THERE])
    assert [choice.address for choice, _ in said] == ["10.0.0.1", "10.0.0.2"]
    (line,) = said[0][1]
    assert line.startswith("  network: lan0 (10.0.0.1), the way to the store, not what the hostnames lead to ")
    assert "(node1 to 127.0.1.1; node2 to nowhere)" in line
    assert environs[0] == {
        "GLOO_SOCKET_IFNAME": "lan0",
        "NCCL_SOCKET_IFNAME": "=lan0",
        "NCCL_SOCKET_FAMILY": "AF_INET",
    }
    assert environs[1] == {
        "GLOO_SOCKET_IFNAME": "enp3s0",
        "NCCL_SOCKET_IFNAME": "enp",
        "NCCL_SOCKET_FAMILY": "AF_INET",
    }


def test_all_ranks_refuse_what_is_wrong_on_one() -> None:
    placement = placed("10.0.0.1", "10.0.0.2")
    said = agreed(placement, [{}, {"GLOO_SOCKET_IFNAME": "eth9"}], [HERE, THERE])
    assert said[0] == said[1]
    assert "node2: GLOO_SOCKET_IFNAME=eth9: there is no interface 'eth9'" in said[0]
    assert "export GLOO_SOCKET_IFNAME=enp3s0" in said[0]
    six = (LO, Interface("enp3s0", "physical", True, (), ("fd77::2",)))
    said = agreed(placed("10.0.0.1", "fd77::2"), [{}, {}], [HERE, six])
    assert said[0] == said[1]
    assert "node1 has 10.0.0.1 and node2 has fd77::2" in said[0]


def test_beside_ipv4_an_ipv6_address_is_given_to_gloo_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(interface, "use_gloo_address", used.append)
    there = (LO, Interface("enp3s0", "physical", True, (), ("fd77::2",)))
    environs: list[dict[str, str]] = [{}, {}]
    agreed(placed("fd77::1", "fd77::2"), environs, [HERE, there])
    assert used == ["fd77::1"]
    assert {environ["NCCL_SOCKET_FAMILY"] for environ in environs} == {"AF_INET6"}


def test_an_interface_that_does_not_lead_to_the_others_is_blamed() -> None:
    wrong = Choice("node2", "tailscale0", "100.64.0.2", "lan0", True)
    assert wrong.doubt.startswith("node2: GLOO_SOCKET_IFNAME=tailscale0 (100.64.0.2) does not lead")
    assert wrong.doubt.endswith("export GLOO_SOCKET_IFNAME=lan0")
    assert Choice("node1", "lan0", "10.0.0.1", "lan0", True).doubt == ""
    assert Choice("node1", "lan1", "10.0.0.1", "lan0").doubt == ""
