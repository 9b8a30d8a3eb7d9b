"""Downloads: whole, resumed, restarted, refused."""

import socket
from pathlib import Path

import pytest

from tests.data.stand_ins import Site
from uneven.data.download import TRIES, DownloadError, Event, download, part_path

PAGE = bytes(range(256)) * 4000


def ignore(event: Event) -> None:
    del event


def test_a_download_reports_its_bytes(site: Site, tmp_path: Path) -> None:
    site.pages["/a.bin"] = PAGE
    events: list[Event] = []
    part = download(site.url + "a.bin", tmp_path, events.append)
    assert part.read_bytes() == PAGE
    assert events[-1] == Event("a.bin", len(PAGE), len(PAGE))


def test_a_broken_transfer_is_resumed_where_it_stopped(site: Site, tmp_path: Path) -> None:
    site.pages["/a.bin"] = PAGE
    site.cuts = [300_000, 200_000]
    assert download(site.url + "a.bin", tmp_path, ignore).read_bytes() == PAGE
    assert [wanted for _, wanted in site.asked] == [None, "bytes=300000-", "bytes=500000-"]


def test_a_part_of_an_earlier_run_is_resumed(site: Site, tmp_path: Path) -> None:
    site.pages["/a.bin"] = PAGE
    part_path(site.url + "a.bin", tmp_path).write_bytes(PAGE[:1000])
    assert download(site.url + "a.bin", tmp_path, ignore).read_bytes() == PAGE
    assert site.asked == [("/a.bin", "bytes=1000-")]


def test_a_complete_part_is_used_unchanged(site: Site, tmp_path: Path) -> None:
    site.pages["/a.bin"] = PAGE
    part_path(site.url + "a.bin", tmp_path).write_bytes(PAGE)
    assert download(site.url + "a.bin", tmp_path, ignore).read_bytes() == PAGE
    assert len(site.asked) == 1


def test_a_part_longer_than_the_page_is_discarded(site: Site, tmp_path: Path) -> None:
    site.pages["/a.bin"] = PAGE
    part_path(site.url + "a.bin", tmp_path).write_bytes(PAGE + b"more")
    assert download(site.url + "a.bin", tmp_path, ignore).read_bytes() == PAGE


def test_without_range_support_a_download_starts_over(site: Site, tmp_path: Path) -> None:
    site.pages["/a.bin"] = PAGE
    site.knows_ranges = False
    site.cuts = [300_000]
    assert download(site.url + "a.bin", tmp_path, ignore).read_bytes() == PAGE


def test_a_download_that_stays_truncated_fails(site: Site, tmp_path: Path) -> None:
    site.pages["/a.bin"] = PAGE
    site.knows_ranges = False
    site.cuts = [300_000] * 50
    with pytest.raises(DownloadError, match=r"300,000.*could not be resumed"):
        download(site.url + "a.bin", tmp_path, ignore)
    assert len(site.asked) == TRIES


def test_the_reason_of_a_refusal_is_reported(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="HTTP 404"):
        download(site.url + "absent", tmp_path, ignore)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        with pytest.raises(DownloadError, match="refused"):
            download(f"http://127.0.0.1:{taken.getsockname()[1]}/a", tmp_path, ignore)


def test_a_server_that_does_not_respond_times_out(site: Site, tmp_path: Path) -> None:
    site.pages["/a.bin"] = PAGE
    site.gate.clear()
    with pytest.raises(DownloadError, match=r"no connection within 0\.2 s|timed out"):
        download(site.url + "a.bin", tmp_path, ignore, connect_s=0.2)
