"""The life of the MPS daemon, with every way it can end, on a fake of the driver's program."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from uneven.errors import InputError, MachineError, RankError
from uneven.hardware import mps, mps_supervisor
from uneven.hardware.device import parse_devices
from uneven.hardware.mps import check_slices, oversubscribed, shared_daemon, sliced
from uneven.hardware.mps_supervisor import end_daemon, processes_of, start_daemon

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
    assert percent not in environ  # it would be the upper limit of every slice
    assert fake_mps.quits() == 1
    assert fake_mps.left() == []


def test_launchers_in_a_shared_block_use_its_daemon_and_leave_it(
    fake_mps: FakeMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared_daemon(PAIR) as shared:
        (home,) = fake_mps.homes()
        for name, value in shared.items():
            monkeypatch.setenv(name, value)
        for _ in range(2):
            with sliced(PAIR) as variables, shared_daemon(PAIR) as inner:
                assert [each["CUDA_MPS_PIPE_DIRECTORY"] for each in variables] == [f"{home}/pipe"] * 2
                assert inner == {}
        assert len(processes_of(home)) == 2
    assert len(fake_mps.starts()) == fake_mps.quits() == 1
    assert fake_mps.left() == []


def test_without_slices_nothing_starts(fake_mps: FakeMps) -> None:
    with shared_daemon(parse_devices("cuda:0,cpu@0.4")) as shared:
        assert shared == {}
    with sliced(parse_devices("cuda:0,cpu@0.4")) as variables:
        assert variables == [{}, {}]
    assert fake_mps.starts() == []


def test_the_daemon_ends_when_the_block_raises(fake_mps: FakeMps) -> None:
    with pytest.raises(KeyboardInterrupt), sliced(PAIR):
        raise KeyboardInterrupt
    assert fake_mps.left() == []


def test_missing_mps_is_reported_with_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError) as caught, sliced(PAIR):
        pass
    message = str(caught.value)
    assert "'cuda:0%60': CUDA MPS is not installed" in message
    assert "'cuda:0@0.4' simulates" in message
    assert "\n" not in message


def test_a_failing_daemon_is_reported_and_nothing_is_left(fake_mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS", "failing")
    with pytest.raises(MachineError) as caught, sliced(PAIR):
        pass
    message = str(caught.value)
    assert "does not start: [Control] no GPU will have us; " in message
    assert "'cuda:0@0.4' simulates" in message
    assert fake_mps.left() == []


def test_a_daemon_that_does_not_listen_times_out(
    fake_mps: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MPS", "deaf")
    monkeypatch.setattr(mps_supervisor, "START_S", 1.0)
    why = start_daemon(make_home(tmp_path / "home"))
    assert why is not None
    assert "does not listen" in why or "did not return" in why  # depends on how busy the machine is


def test_a_daemon_that_does_not_quit_is_killed_and_no_other_process_is(
    fake_mps: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps_supervisor, "QUIT_S", 0.5)
    monkeypatch.setattr(mps_supervisor, "GONE_S", 0.1)
    other = make_home(tmp_path / "other")
    assert start_daemon(other) is None
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    stubborn = make_home(tmp_path / "stubborn")
    assert start_daemon(stubborn) is None
    # A rank has the folder in its environment too, but does not belong to the daemon.
    rank_environ = {**os.environ, **mps_supervisor.daemon_variables(stubborn)}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=rank_environ, stdin=subprocess.PIPE) as rank:
        end_daemon(stubborn)
        assert processes_of(stubborn) == []
        assert not stubborn.exists()
        assert rank.poll() is None
        assert len(processes_of(other)) == 2
    end_daemon(other)
    assert fake_mps.left() == []


def test_the_launcher_ends_the_daemon_of_a_killed_supervisor(fake_mps: FakeMps) -> None:
    with sliced(PAIR):
        (home,) = fake_mps.homes()
        os.kill(supervisor_of(home), signal.SIGKILL)
    assert fake_mps.left() == []


def test_a_terminated_supervisor_ends_the_daemon_first(fake_mps: FakeMps) -> None:
    with sliced(PAIR):
        (home,) = fake_mps.homes()
        os.kill(supervisor_of(home), signal.SIGTERM)
        fake_mps.all_gone()
    assert fake_mps.quits() == 1


def test_orphaned_daemons_are_removed_but_not_supervised_ones(
    fake_mps: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps_supervisor, "PARENT_FOLDERS", (tmp_path,))
    home, lock = mps_supervisor._make_home(os.getpid())
    assert start_daemon(home) is None
    mps_supervisor.remove_orphans()
    assert len(processes_of(home)) == 2
    lock.close()  # as the system does for a killed process
    mps_supervisor.remove_orphans()
    assert fake_mps.left() == []


def test_the_supervisor_ends_the_daemon_of_a_killed_launcher(fake_mps: FakeMps) -> None:
    code = (
        "import os, signal, sys\n"
        "from uneven.hardware.device import parse_devices\nfrom uneven.hardware.mps import sliced\n"
        "with sliced(parse_devices('cuda:0%60')):\n"
        "    if os.fork() == 0:\n        sys.stdin.read()\n        os._exit(0)\n"  # holds the supervisor's pipe open
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

    with pytest.raises(kind, match=r"MPS server; last line of the CUDA MPS log: \[Server\] mode is wrong"):
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


def test_slices_of_more_than_the_gpu_give_a_warning() -> None:
    warning = oversubscribed(parse_devices("cuda:0%60,cuda:0%70,cuda:1%100,cpu"))
    assert warning is not None
    assert "slices of cuda:0 add up to 130 %" in warning
    assert "cuda:1" not in warning


@pytest.mark.parametrize(
    ("hidden", "names", "expected"),
    [
        (None, ("GPU-aaaa", "GPU-bbbb"), {}),
        ("1,0", ("GPU-bbbb", "GPU-aaaa"), {"CUDA_VISIBLE_DEVICES": "GPU-bbbb,GPU-aaaa"}),
        ("MIG-cccc", (None,), {}),  # not the UUID of a whole GPU: left unchanged
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
    assert mps._visible_by_uuid() == expected


def supervisor_of(home: Path) -> int:
    """The process that holds the lock in `home`."""
    inode = (home / "lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and int(fields[5].split(":")[2]) == inode:
            return int(fields[4])
    raise AssertionError(f"no process holds the lock of {home}")


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
    assert len(running) >= 2  # the daemon and its server; without this the next assertion would prove nothing
    assert processes_of(home) == []
    assert not home.exists()
