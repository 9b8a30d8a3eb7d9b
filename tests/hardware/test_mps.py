"""The MPS daemon from its start to its end, in every way it may end; on a stand-in for the driver's program."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from uneven.errors import InputError, MachineError, RankError
from uneven.hardware import mps, mpskeeper
from uneven.hardware.device import parse_devices
from uneven.hardware.mps import check_slices, oversubscribed, sliced
from uneven.hardware.mpskeeper import end_daemon, processes_of, start_daemon

from .fake_mps import FakeMps, folders_of
from .fake_mps import fake_mps as fake_mps

PAIR = parse_devices("cuda:0%60,cuda:0%24")


def make_home(folder: Path) -> Path:
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True)
    return folder


def test_every_slice_gets_its_variables_and_the_daemon_ends_by_its_own_quit(
    fake_mps: FakeMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    with sliced(parse_devices("cuda:0%60,cpu,cuda:0%24,cuda:1")) as variables:
        (home,) = fake_mps.homes()
        assert len(processes_of(home)) == 2
        both = {"CUDA_MPS_PIPE_DIRECTORY": f"{home}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{home}/log"}
        percent = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
        assert variables == [both | {percent: "60"}, {}, both | {percent: "24"}, {}]
        assert home.stat().st_mode & 0o777 == 0o700
        assert len(f"{home}/pipe/control_privileged") < 100
    (environ,) = fake_mps.starts()
    assert environ["CUDA_MPS_PIPE_DIRECTORY"] == f"{home}/pipe"
    assert percent not in environ  # it would be the most that a slice may have
    assert fake_mps.quits() == 1
    assert fake_mps.left() == []


def test_without_slices_nothing_starts(fake_mps: FakeMps) -> None:
    with sliced(parse_devices("cuda:0,cpu@0.4")) as variables:
        assert variables == [{}, {}]
    assert fake_mps.starts() == []


def test_whatever_happens_inside_the_daemon_ends(fake_mps: FakeMps) -> None:
    with pytest.raises(KeyboardInterrupt), sliced(PAIR):
        raise KeyboardInterrupt
    assert fake_mps.left() == []


def test_mps_that_is_not_installed_is_said_with_the_way_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError) as caught, sliced(PAIR):
        pass
    message = str(caught.value)
    assert "'cuda:0%60': CUDA MPS is not installed" in message
    assert "'cuda:0@0.4' simulates" in message
    assert "\n" not in message


def test_a_daemon_that_fails_is_quoted_and_leaves_nothing(fake_mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS", "failing")
    with pytest.raises(MachineError) as caught, sliced(PAIR):
        pass
    message = str(caught.value)
    assert "does not start: [Control] no GPU will have us; " in message
    assert "'cuda:0@0.4' simulates" in message
    assert fake_mps.left() == []


def test_a_daemon_that_does_not_listen_is_given_up(
    fake_mps: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS", "deaf")
    monkeypatch.setattr(mpskeeper, "START_S", 1.0)
    why = start_daemon(make_home(tmp_path / "home"))
    assert why is not None
    assert "does not listen" in why or "did not return" in why  # whichever a busy machine meets first


def test_what_does_not_quit_is_ended_by_its_pids_and_nobody_else(
    fake_mps: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpskeeper, "QUIT_S", 0.5)
    monkeypatch.setattr(mpskeeper, "GONE_S", 0.1)
    other = make_home(tmp_path / "other")
    assert start_daemon(other) is None
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    stubborn = make_home(tmp_path / "stubborn")
    assert start_daemon(stubborn) is None
    # A rank has the folder in its environment too, but is no part of the daemon.
    rank_environ = {**os.environ, **mpskeeper.variables(stubborn)}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=rank_environ, stdin=subprocess.PIPE) as rank:
        end_daemon(stubborn)
        assert processes_of(stubborn) == []
        assert not stubborn.exists()
        assert rank.poll() is None
        assert len(processes_of(other)) == 2
    end_daemon(other)
    assert fake_mps.left() == []


def test_a_killed_keeper_is_stood_in_for(fake_mps: FakeMps) -> None:
    with sliced(PAIR):
        (home,) = fake_mps.homes()
        os.kill(keeper_of(home), signal.SIGKILL)
    assert fake_mps.left() == []


def test_a_keeper_that_is_asked_to_end_ends_the_daemon_first(fake_mps: FakeMps) -> None:
    with sliced(PAIR):
        (home,) = fake_mps.homes()
        os.kill(keeper_of(home), signal.SIGTERM)
        fake_mps.all_gone()
    assert fake_mps.quits() == 1


def test_what_a_killed_keeper_left_is_swept_but_not_what_is_kept(
    fake_mps: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpskeeper, "PLACES", (tmp_path,))
    home, lock = mpskeeper._make_home(os.getpid())
    assert start_daemon(home) is None
    mpskeeper.sweep()
    assert len(processes_of(home)) == 2
    lock.close()  # as the system does for a killed process
    mpskeeper.sweep()
    assert fake_mps.left() == []


def test_the_keeper_ends_the_daemon_of_a_killed_launcher(fake_mps: FakeMps) -> None:
    code = (
        "import os, signal, sys\n"
        "from uneven.hardware.device import parse_devices\nfrom uneven.hardware.mps import sliced\n"
        "with sliced(parse_devices('cuda:0%60')):\n"
        "    if os.fork() == 0:\n        sys.stdin.read()\n        os._exit(0)\n"  # it holds the keeper's pipe open
        "    print('here', flush=True)\n    signal.pause()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "here\n"
        assert len(processes_of(fake_mps.homes()[0])) == 2
        launcher.kill()
        launcher.wait()
        fake_mps.all_gone()
    assert folders_of(launcher.pid) == []
    assert fake_mps.quits() == 1


@pytest.mark.parametrize("kind", [RankError, MachineError])
def test_a_failure_that_names_mps_is_explained_by_its_log(fake_mps: FakeMps, kind: type[Exception]) -> None:
    def fail(words: str) -> None:
        with sliced(PAIR):
            (fake_mps.homes()[-1] / "log" / "server.log").write_text("[Server] up\n[Server] mode is wrong\n")
            raise kind(words)

    with pytest.raises(kind, match=r"connect to the MPS server; CUDA MPS said: \[Server\] mode is wrong"):
        fail("failed to connect to the MPS server")
    with pytest.raises(kind, match=r"^out of memory$"):
        fail("out of memory")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("cuda:0,cuda:0%24", "'cuda:0%76,cuda:0%24'"),
        ("cuda:1,cuda:0%30,cuda:0,cuda:0@0.5", "'cuda:1,cuda:0%30,cuda:0%35,cuda:0%35'"),
        ("cuda:0%100,cuda:0", "'cuda:0%100,cuda:0%1'"),
    ],
)
def test_a_slice_beside_a_whole_gpu_is_refused_with_the_fix(text: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        check_slices(parse_devices(text))
    assert repr(text) in str(caught.value)
    assert fix in str(caught.value)


@pytest.mark.parametrize("text", ["cuda:0%60,cuda:0%24", "cuda:0%60,cuda:1,cpu", "cuda:0,cuda:0@0.4", "cuda:0%60"])
def test_slices_beside_other_devices_are_fine(text: str) -> None:
    check_slices(parse_devices(text))
    assert oversubscribed(parse_devices(text)) is None


def test_slices_that_are_more_than_the_gpu_are_said() -> None:
    said = oversubscribed(parse_devices("cuda:0%60,cuda:0%70,cuda:1%100,cpu"))
    assert said is not None
    assert "slices of cuda:0 add up to 130 %" in said
    assert "cuda:1" not in said


@pytest.mark.parametrize(
    ("hidden", "names", "expected"),
    [
        (None, ("GPU-aaaa", "GPU-bbbb"), {}),
        ("1,0", ("GPU-bbbb", "GPU-aaaa"), {"CUDA_VISIBLE_DEVICES": "GPU-bbbb,GPU-aaaa"}),
        ("MIG-cccc", (None,), {}),  # no name of a whole GPU: it stays as it is
        ("", (), {}),
    ],
)
def test_the_daemon_and_its_clients_count_the_same_gpus(
    monkeypatch: pytest.MonkeyPatch, hidden: str | None, names: Sequence[str | None], expected: dict[str, str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    gpus = [SimpleNamespace(uuid=name) for name in names]
    monkeypatch.setattr(mps, "read_visible", lambda *_: SimpleNamespace(gpus=gpus))
    assert mps._named_devices() == expected


def keeper_of(home: Path) -> int:
    """By the lock it holds."""
    inode = (home / "lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and int(fields[5].split(":")[2]) == inode:
            return int(fields[4])
    raise AssertionError(f"nobody holds {home}")


MATMUL = """
import sys, torch
from uneven.hardware.device import parse_device
place = torch.device(parse_device(sys.argv[1]).torch_name)
square = torch.ones(1024, 1024, device=place)
assert (square @ square)[0, 0].item() == 1024
print(torch.cuda.get_device_properties(place).multi_processor_count, flush=True)
sys.stdin.read()
"""


@pytest.mark.cuda
@pytest.mark.alone
def test_two_slices_of_a_true_gpu_have_different_multiprocessors() -> None:
    import torch

    whole = torch.cuda.get_device_properties(0).multi_processor_count
    ranks: list[subprocess.Popen[str]] = []
    pipe = subprocess.PIPE
    with sliced(PAIR) as variables:
        home = Path(variables[0]["CUDA_MPS_PIPE_DIRECTORY"]).parent
        try:
            for device, more in zip(PAIR, variables, strict=True):
                command = [sys.executable, "-c", MATMUL, str(device)]
                ranks.append(subprocess.Popen(command, env=os.environ | more, stdin=pipe, stdout=pipe, text=True))
            seen = [int(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]
            running = processes_of(home)
        finally:
            for rank in ranks:
                rank.communicate()
    assert whole > seen[0] > seen[1]
    assert len(running) >= 2  # the daemon and its server: found, or what follows would prove nothing
    assert processes_of(home) == []
    assert not home.exists()
