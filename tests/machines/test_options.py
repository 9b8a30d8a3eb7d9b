"""What the user says about other machines: read, checked, refused in words."""

from pathlib import Path
from typing import Any

import pytest

from uneven.config import RunConfig
from uneven.errors import InputError
from uneven.hardware.network import Interface
from uneven.machines.addresses import choose_address, interface_of, unique_labels
from uneven.machines.hosts import Host, join_command, read_hosts
from uneven.machines.options import LeadOptions, lead_options, parse_nodes, parse_ports, read_token

LOOPBACK = Interface("lo", "loopback", True, ("127.0.0.1",), ("::1",))
WIRED = Interface("eth0", "physical", True, ("192.0.2.10",), ("fe80::1", "2001:db8::10"))
WIFI = Interface("wlan0", "physical", True, ("198.51.100.10",))
DOWN = Interface("eth1", "physical", False, ("203.0.113.1",))
V6 = Interface("eth2", "physical", True, (), ("fe80::2", "2001:db8::20"))


def options(**given: Any) -> LeadOptions | None:
    names = ("nodes", "hosts", "token", "bind", "port", "ports", "wait", "ssh")
    return lead_options(**{**dict.fromkeys(names), "environ": {}, **given})


@pytest.mark.parametrize(("text", "nodes"), [("2", (2, 2)), ("2-4", (2, 4)), ("1-3", (1, 3)), ("1", (1, 1))])
def test_numbers_of_machines(text: str, nodes: tuple[int, int]) -> None:
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["0", "4-2", "-1", "two", "", "2-", "0-2", "99999", "2.5"])
def test_a_wrong_number_of_machines(text: str) -> None:
    with pytest.raises(InputError, match=f"--nodes {text}"):
        parse_nodes(text)


@pytest.mark.parametrize("text", ["0-5", "10-5", "70000-70001", "x", "5-"])
def test_wrong_ports(text: str) -> None:
    with pytest.raises(InputError, match=f"--ports {text}"):
        parse_ports(text)


def test_ports() -> None:
    assert parse_ports("29400-29419") == (29400, 29419)
    assert parse_ports(None) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bind": "192.0.2.1"}, "--bind is for several"),
        ({"token": "long-enough"}, "--token or --token-file is for several"),
        ({"nodes": "2", "wait": -1.0}, "--wait -1"),
        ({"nodes": "2", "port": 0}, "--port 0"),
        ({"nodes": "2", "ssh": "ssh"}, "--ssh is for the machines of --hosts"),
        ({"nodes": "2", "hosts": (Host("a"), Host("b"))}, "with this one they are 3"),
    ],
)
def test_options_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        options(**given)


def test_one_machine_needs_no_door() -> None:
    assert options() is None
    assert options(nodes="1") is None


def test_a_token_that_was_made_is_shown_and_one_that_was_given_is_not() -> None:
    made, given = options(nodes="2-4"), options(nodes="2", token="given-by-the-user")
    assert made is not None
    assert given is not None
    assert (made.fewest, made.most, made.shows_token) == (2, 4, True)
    assert len(made.token) > 20
    assert (given.token, given.shows_token) == ("given-by-the-user", False)
    hosts = options(hosts=(Host("a"), Host("b")))
    assert hosts is not None
    assert (hosts.fewest, hosts.most) == (3, 3)


def test_where_a_token_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-the-file\n")
    environ = {"UNEVEN_TOKEN": "from-the-variable"}
    assert read_token("from-the-argument", None, environ) == "from-the-argument"
    assert environ == {}, "whatever the script starts need not know it"
    assert read_token(None, file, {"UNEVEN_TOKEN": "from-the-variable"}) == "from-the-file"
    assert read_token(None, None, {"UNEVEN_TOKEN": "from-the-variable"}) == "from-the-variable"
    assert read_token(None, None, {}) is None


@pytest.mark.parametrize("token", ["short", "with spaces inside", "umlaut-\u00e4\u00f6\u00fc", ""])
def test_a_token_has_a_shape_and_is_not_repeated(token: str) -> None:
    with pytest.raises(InputError, match="the token must be") as caught:
        read_token(token, None, {})
    assert not token or token not in str(caught.value)


def test_checks_that_can_be_left_out() -> None:
    assert RunConfig(batch_size=1, epochs=1, skip="data, clock").skipped_checks == ("data", "clock")
    for wrong in ("colour", "data,colour", ""):
        with pytest.raises(InputError, match=f"skip={wrong!r} must be one or more of uneven, python, "):
            RunConfig(batch_size=1, epochs=1, skip=wrong)


def test_the_address_of_the_default_route_else_of_the_only_interface() -> None:
    assert choose_address(None, [LOOPBACK, WIRED, WIFI], "wlan0") == "198.51.100.10"
    assert choose_address(None, [LOOPBACK, WIRED, DOWN]) == "192.0.2.10"
    assert choose_address(None, [LOOPBACK, V6]) == "2001:db8::20", "not one of the link alone"
    with pytest.raises(InputError, match=r"several interfaces .*--bind.*192.0.2.10 \(eth0\)"):
        choose_address(None, [LOOPBACK, WIRED, WIFI])
    with pytest.raises(InputError, match="no interface that leads to other machines"):
        choose_address(None, [LOOPBACK, DOWN])


def test_an_address_or_an_interface_can_be_chosen() -> None:
    assert choose_address("198.51.100.10", [LOOPBACK, WIRED, WIFI]) == "198.51.100.10"
    assert choose_address("eth0", [LOOPBACK, WIRED, WIFI]) == "192.0.2.10"
    with pytest.raises(InputError, match=r"--bind 203.0.113.9: no address of this machine; it has"):
        choose_address("203.0.113.9", [LOOPBACK, WIRED])
    for everywhere in ("0.0.0.0", "::", "*"):
        with pytest.raises(InputError, match="all interfaces is refused"):
            choose_address(everywhere, [LOOPBACK, WIRED])
    assert interface_of("2001:db8::10", [LOOPBACK, WIRED]) == "eth0"
    assert interface_of("127.0.1.1", [LOOPBACK, WIRED]) == "lo"
    with pytest.raises(InputError, match="no interface"):
        interface_of("203.0.113.9", [LOOPBACK, WIRED])


def test_machines_with_one_name_are_told_apart() -> None:
    assert unique_labels(["pc", "pc", "box", "pc"]) == ("pc", "pc#2", "box", "pc#3")


HOSTS = """
[[hosts]]
address = "192.0.2.11"
user = "ann"
devices = "cuda:0,cuda:1"
folder = "my project"
python = "venv/bin/python"

[[hosts]]
name = "box"
"""


def test_hosts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(HOSTS)
    first, second = read_hosts(path)
    assert first == Host("192.0.2.11", "ann", "cuda:0,cuda:1", "my project", "venv/bin/python")
    assert (second.address, second.label) == ("box", "box")
    *ssh, where, remote = join_command(first, "192.0.2.10:7000", "ssh -p 2222")
    assert (ssh, where) == (["ssh", "-p", "2222", "-T", "-o", "BatchMode=yes"], "ann@192.0.2.11")
    assert remote == (
        "cd 'my project' && exec venv/bin/python -m uneven join 192.0.2.10:7000 --token-file - --devices cuda:0,cuda:1"
    )
    assert join_command(second, "192.0.2.10:7000", "ssh")[-2] == "box"
    path.write_text('hosts = ["box", "ann@192.0.2.11"]')
    assert [(host.user, host.address) for host in read_hosts(path)] == [(None, "box"), ("ann", "192.0.2.11")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a list of"),
        ("hosts = []", "a list of"),
        ("[[machines]]\naddress = 'a'", "and not machines"),
        ("[[hosts]]\nuser = 'ann'", "entry 1: address = ''"),
        ("[[hosts]]\naddress = '-oProxyCommand=evil'", "entry 1: address = "),
        ("[[hosts]]\naddress = 'a'\ncolour = 'red'", "'colour' is not known; allowed are address"),
        ("[[hosts]]\naddress = 'a'\ndevices = 2", "devices = 2 must be text"),
        ("not toml", "hosts.toml"),
    ],
)
def test_wrong_files_of_hosts(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_hosts(path)


@pytest.mark.parametrize(
    ("fewest", "most", "words"),
    [
        (2, 2, "one other machine"),
        (3, 3, "2 other machines"),
        (2, 4, "1-3 other machines"),
        (1, 2, "0-1 other machines"),
    ],
)
def test_how_many_are_to_join_in_words(fewest: int, most: int, words: str) -> None:
    assert LeadOptions(fewest, most, "token").others == words
