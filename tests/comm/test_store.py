"""The launcher's store: ranks on this machine can reach it, other machines cannot."""

from pathlib import Path

import pytest

from uneven.comm.store import open_store, reach_store


def listening_addresses(port: int) -> set[str]:
    """Local addresses, in the kernel's hexadecimal, on which any process listens at this port."""
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for _, local, _, state, *_ in (line.split() for line in lines):
            address, number = local.split(":")
            if int(number, 16) == port and state == "0A":
                found.add(address)
    return found


def test_a_client_of_this_machine_reaches_it() -> None:
    store, port = open_store()
    reach_store("127.0.0.1", port).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the kernel's table of sockets")
def test_it_listens_on_the_loopback_interface_only() -> None:
    """TCPStore has no authentication, and given a host name alone it listens on all interfaces."""
    store, port = open_store()
    assert listening_addresses(port) == {"0100007F"}  # 127.0.0.1, least significant byte first
    del store
