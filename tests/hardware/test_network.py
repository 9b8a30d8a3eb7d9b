from pathlib import Path

import pytest

from uneven.hardware.network import (
    Interface,
    default_route,
    describe_vpns,
    kind_of,
    likely_interface,
    read_interfaces,
)

from .fakes import write_tree

LO = Interface("lo", "loopback", True, ("127.0.0.1",))
ETH = Interface("eth0", "physical", True, ("192.168.1.2",), speed_mbps=1000)
FAST = Interface("enp5s0", "physical", True, ("10.0.0.2",), speed_mbps=10000)
DOWN = Interface("eth1", "physical", False, ("192.168.2.2",), speed_mbps=100000)
VPN = Interface("tailscale0", "vpn", True, ("100.64.0.2",))
DOCKER = Interface("docker0", "virtual", True, ("172.17.0.1",))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lo", "loopback"),
        ("docker0", "virtual"),
        ("veth12ab", "virtual"),
        ("br-1f", "virtual"),
        ("virbr0", "virtual"),
        *((name, "vpn") for name in ("tailscale0", "wg0", "wg-home", "tun0", "ztabc123", "utun3", "nebula1", "ppp0")),
        ("wlan0", "physical"),
        ("eth0", "physical"),
        ("wlp3s0", "physical"),
        ("bond0", "physical"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("interfaces", "route", "environ", "name"),
    [
        ([LO, ETH, FAST], "eth0", {}, "eth0"),
        ([LO, ETH, FAST, DOWN], None, {}, "enp5s0"),
        ([LO, DOCKER, ETH], "docker0", {}, "eth0"),
        ([LO, DOWN, DOCKER], "eth1", {}, "lo"),
        ([LO, ETH], "eth0", {"GLOO_SOCKET_IFNAME": "wg0"}, "wg0"),
        ([LO, VPN, ETH], None, {}, "eth0"),
        ([LO, VPN, ETH], "tailscale0", {}, "eth0"),
        ([LO, VPN], None, {}, "tailscale0"),
        ([], None, {}, None),
    ],
)
def test_which_one_a_job_takes(
    interfaces: list[Interface], route: str | None, environ: dict[str, str], name: str | None
) -> None:
    found, why = likely_interface(interfaces, route, environ)
    assert found == name
    assert why


ROUTES = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    "eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"
    "eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\n"
)


def test_the_default_route(tmp_path: Path) -> None:
    assert default_route(tmp_path) is None
    assert default_route(write_tree(tmp_path, {"proc/net/route": ROUTES})) == "eth0"


def test_a_machine_that_lets_nobody_list_its_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError

    monkeypatch.setattr("psutil.net_if_addrs", refuse)
    assert read_interfaces() == ()


def test_a_vpn_is_named() -> None:
    (line,) = describe_vpns([LO, ETH, VPN])
    assert line.startswith("tailscale0: a VPN")
    assert describe_vpns([LO, ETH]) == []
