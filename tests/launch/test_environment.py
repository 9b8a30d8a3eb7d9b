"""What torchrun says in its variables, and where ranks meet."""

import socket

import pytest

from uneven import InputError
from uneven.launch import environment
from uneven.launch.context import ProcessContext
from uneven.launch.environment import LaunchEnvironment, read_torchrun

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}


def test_what_torchrun_says_is_read() -> None:
    started = read_torchrun({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert started == LaunchEnvironment("torchrun", 3, 4, 1, 2, "host", 1234, "uneven/job/2/", hosts_store=False)
    first = read_torchrun({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert first is not None
    assert first.hosts_store
    assert read_torchrun({**TORCHRUN, "RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}) != first
    assert read_torchrun({"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_ranks_whose_starter_has_no_store_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_hosted", [])
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = finder.getsockname()[1]
    first, second = (
        LaunchEnvironment("torchrun", rank, 2, rank, 2, "127.0.0.1", port, "uneven/job/0/", hosts_store=rank == 0)
        for rank in range(2)
    )
    first.connect("run/1").set("key", "here")
    assert second.connect("run/1").get("key") == b"here"
    assert not second.connect("run/2").check(["key"])  # every run has its own keys


def test_devices_must_match_the_processes_there_are() -> None:
    started = read_torchrun(TORCHRUN)
    assert started is not None
    with pytest.raises(InputError) as caught:
        ProcessContext(started).devices("cpu,cpu@0.4")
    assert "names 2 for the 4 processes that torchrun started" in str(caught.value)
