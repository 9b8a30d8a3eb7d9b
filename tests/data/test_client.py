"""npm and pip as subprocesses: arguments, failures, missing clients, and that none is left running."""

import os
import shlex
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.data import tiny_sets
from tests.data.stand_ins import FakeClient
from uneven.data import client
from uneven.data.description import Package, SourceError, no_progress

NPM, PIP = (source for source in tiny_sets.digits().sources if isinstance(source, Package))
SDIST = Package("pip", "old-texts==0.6", 1000, NPM.unpack, sha256="1" * 64, is_source_package=True)


def test_npm_packs_the_pinned_version_in_a_private_folder(fake_client: FakeClient, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    fake_client("npm", f'echo "$@" > {seen}; echo "$npm_config_cache" >> {seen}; touch tiny-1.0.0.tgz')
    archive = client.fetch_archive(NPM, tmp_path, no_progress)
    arguments, cache = seen.read_text().splitlines()
    assert arguments.startswith("pack tiny-digits@1.0.0 --ignore-scripts")
    assert Path(cache).is_relative_to(tmp_path)
    assert archive.name == "tiny-1.0.0.tgz"


def test_pip_pins_the_archive_by_its_checksum(fake_client: FakeClient, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    fake_client("pip", f'echo "$@" > {seen}; cat ../requirements.txt >> {seen}; touch tiny.whl')
    assert client.fetch_archive(PIP, tmp_path, no_progress).name == "tiny.whl"
    arguments, requirement = seen.read_text().splitlines()
    assert arguments.startswith("download --no-deps")
    assert "--only-binary :all:" in arguments
    assert requirement == f"tiny-hub==1.0.0 --hash=sha256:{'0' * 64}"


def test_a_source_package_is_tried_again_without_build_isolation(fake_client: FakeClient, tmp_path: Path) -> None:
    fake_client(
        "pip",
        'case "$*" in *--no-build-isolation*) touch texts.tar.gz;; *) echo ERROR: no tools; exit 1;; esac',
    )
    assert client.fetch_archive(SDIST, tmp_path, no_progress).name == "texts.tar.gz"


def test_when_both_commands_fail_the_first_reason_is_reported(fake_client: FakeClient, tmp_path: Path) -> None:
    fake_client("pip", 'case "$*" in *--no-build-isolation*) echo ERROR: second;; *) echo ERROR: first;; esac; exit 1')
    with pytest.raises(SourceError, match=r"^first$"):
        client.fetch_archive(SDIST, tmp_path, no_progress)


def test_the_reason_is_found_in_the_output(fake_client: FakeClient, tmp_path: Path) -> None:
    log = [
        "npm error code ENOTFOUND",
        "npm error network request to somewhere failed, reason: getaddrinfo ENOTFOUND somewhere",
        "npm error A complete log of this run can be found in: /x",
    ]
    fake_client("npm", "\n".join(f"echo {shlex.quote(line)} >&2" for line in log) + "\nexit 1")
    with pytest.raises(SourceError, match=r"reason: getaddrinfo ENOTFOUND somewhere$"):
        client.fetch_archive(NPM, tmp_path, no_progress)


def test_success_without_an_archive_is_a_failure(fake_client: FakeClient, tmp_path: Path) -> None:
    fake_client("npm", "exit 0")
    with pytest.raises(SourceError, match="0 archives instead of one"):
        client.fetch_archive(NPM, tmp_path, no_progress)


def test_missing_clients_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SourceError, match="npm is not installed"):
        client.fetch_archive(NPM, tmp_path, no_progress)
    with pytest.raises(SourceError, match="pip is not installed"):
        client.fetch_archive(PIP, tmp_path, no_progress)


def test_without_a_pip_module_the_pip_command_is_used(
    fake_client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_client("pip", "touch tiny.whl")
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert client.fetch_archive(PIP, tmp_path, no_progress).name == "tiny.whl"


def test_a_client_that_exceeds_its_limit_is_killed(fake_client: FakeClient, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    fake_client("npm", f"echo $$ > {pid_file}; exec sleep 600")

    def wait_until_it_runs(event: object) -> None:
        # The limit must not pass before the fake npm has written its pid.
        del event
        while not (pid_file.exists() and pid_file.read_text().strip()):
            pass

    with pytest.raises(SourceError, match=r"did not finish within 0\.01 s"):
        client.fetch_archive(NPM, tmp_path, wait_until_it_runs, limit_s=0.01)
    assert_ended(int(pid_file.read_text()))


def assert_ended(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_interrupt_while_the_client_starts_leaves_no_process(
    fake_client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the fork, before Popen returns; KeyboardInterrupt is raised once the client was killed."""
    fake_client("npm", "exec sleep 600")
    started = []
    start = subprocess.Popen

    def start_and_interrupt(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        started.append(process)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr("uneven.data.client.subprocess.Popen", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.fetch_archive(NPM, tmp_path, no_progress)
    assert len(started) == 1
    assert_ended(started[0].pid)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_while_the_client_is_killed_leaves_no_process(
    fake_client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_client("npm", "exec sleep 600")
    killed = []
    kill = os.killpg

    def interrupt_and_kill(group: int, number: int) -> None:
        signal.raise_signal(signal.SIGINT)
        killed.append(group)
        kill(group, number)

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.killpg", interrupt_and_kill)
    with pytest.raises(KeyboardInterrupt):
        client.fetch_archive(NPM, tmp_path, interrupt)
    assert len(killed) == 1
    assert_ended(killed[0])


def test_a_client_runs_in_any_thread(fake_client: FakeClient, tmp_path: Path) -> None:
    """Only the main thread may set signal handlers."""
    fake_client("npm", "touch tiny-1.0.0.tgz")
    archives = []
    thread = threading.Thread(target=lambda: archives.append(client.fetch_archive(NPM, tmp_path, no_progress)))
    thread.start()
    thread.join()
    assert [archive.name for archive in archives] == ["tiny-1.0.0.tgz"]


def test_a_client_that_does_not_start_is_a_failure(
    fake_client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_client("npm", "true")

    def fail(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("uneven.data.client.subprocess.Popen", fail)
    with pytest.raises(SourceError, match=r"npm does not start \(Permission denied\)"):
        client.fetch_archive(NPM, tmp_path, no_progress)
