import sys
from pathlib import Path

import pytest

from uneven.hardware.network import (
    Interface,
    default_route,
    describe_variables,
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


def test_a_tree_without_psutil(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "sys/class/net/eth0/flags": "0x1003\n",
            "sys/class/net/eth0/speed": "2500\n",
            "sys/class/net/wlan0/flags": "0x1002\n",
            "sys/class/net/wlan0/speed": "-1\n",
            "sys/class/net/bonding_masters": "\n",
            "proc/net/if_inet6": "fe8000000000000000fcfffffe000001 02 40 20 80     eth0\n",
            "proc/net/route": (
                "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
                "eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"
                "eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\n"
            ),
        },
    )
    assert read_interfaces(root) == (
        Interface("eth0", "physical", True, (), ("fe80::fc:ffff:fe00:1",), 2500),
        Interface("wlan0", "physical", False),
    )
    assert default_route(root) == "eth0"


@pytest.mark.skipif(sys.platform != "linux", reason="the fallback reads Linux trees")
def test_the_fallback_agrees_with_psutil_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")
    by_psutil = {interface.name: interface for interface in read_interfaces()}
    monkeypatch.setitem(sys.modules, "psutil", None)
    by_sys = {interface.name: interface for interface in read_interfaces()}
    assert by_sys.keys() == by_psutil.keys()
    for name, one in by_sys.items():
        assert one.is_up == by_psutil[name].is_up
        assert set(one.v4) <= set(by_psutil[name].v4)
        assert bool(one.v4) == bool(by_psutil[name].v4)


def test_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    assert read_interfaces(tmp_path) == ()
    assert default_route(tmp_path) is None


def test_variables_that_are_set_are_explained_and_those_that_nobody_reads_named() -> None:
    lines = describe_variables({"NCCL_SOCKET_FAMILY": "AF_INET", "GLOO_IPV6": "0", "GLOO_LOG_LEVEL": "1", "HOME": "/"})
    assert len(lines) == 2
    assert lines[0].startswith("NCCL_SOCKET_FAMILY=AF_INET is set: NCCL uses addresses of this kind alone")
    assert lines[1].startswith("GLOO_IPV6=0 is set, but Gloo does not read it")
    assert describe_variables({}) == []


def test_a_vpn_is_named() -> None:
    (line,) = describe_vpns([LO, ETH, VPN])
    assert line.startswith("tailscale0: a VPN")
    assert describe_vpns([LO, ETH]) == []
