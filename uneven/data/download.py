"""Download a URL over HTTP(S) into a `.part` file, resuming where the last attempt stopped. Called by datasets.py.

A blocked network must fail fast, so connecting has one time limit that includes name resolution and all addresses of
the host. urllib honours the proxy variables. Only the length of a download is checked here; the caller verifies the
checksum.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

CONNECT_S = 8.0
TRIES = 5
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Event:
    """A message (`done` is None), or progress of the download `text` in bytes; `total` is None if unknown."""

    text: str
    done: int | None = None
    total: int | None = None


# The library never prints: the command line passes a callback that draws a bar or prints lines.
Progress = Callable[[Event], None]


class DownloadError(Exception):
    """A download failed; the message is the reason."""


def part_path(url: str, work: Path) -> Path:
    """The partial file of a download. Its name contains the host: mirrors may compress the same file differently."""
    parts = urlsplit(url)
    return work / f"{re.sub('[^A-Za-z0-9.]', '_', parts.netloc)}-{Path(parts.path).name}.part"


def download(url: str, work: Path, progress: Progress, connect_s: float = CONNECT_S) -> Path:
    """Download `url` and return the complete `.part` file; DownloadError if it cannot be completed.

    An OSError is a failure to write the file, never of the network.
    """
    part = part_path(url, work)
    reason = ""
    for _ in range(TRIES):
        size = part.stat().st_size if part.exists() else 0
        try:
            response = _open(url, size, connect_s)
        except _RangeError as error:
            if error.total == size:
                return part  # already complete: the last run ended between download and unpacking
            part.unlink()
            continue
        except DownloadError:
            if reason:
                break  # report what interrupted the transfer, not why the retry failed
            raise
        with response:
            reason = _transfer(response, part, size, progress)
        if not reason:
            return part
    raise DownloadError(f"{reason or 'the server refused every range'}, and could not be resumed")


class _RangeError(Exception):
    """HTTP 416: the server has no byte at the requested offset; `total` is the size it reports, or -1."""

    def __init__(self, total: int) -> None:
        self.total = total


def _open(url: str, size: int, connect_s: float) -> HTTPResponse:
    # In a thread, because a socket timeout bounds neither name resolution nor trying many addresses in turn.
    # A daemon thread, so that a hanging one does not delay the exit of the program.
    request = Request(url, headers={"User-Agent": "uneven", **({"Range": f"bytes={size}-"} if size else {})})
    outcome: list[HTTPResponse | Exception] = []
    is_too_late = threading.Event()

    def attempt() -> None:
        try:
            response = urlopen(request, timeout=connect_s)
        except Exception as error:
            outcome.append(error)
            return
        if is_too_late.is_set():
            response.close()
        outcome.append(response)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(connect_s)
    if not outcome:
        is_too_late.set()
        raise DownloadError(f"no connection within {connect_s:g} s")
    result = outcome[0]
    if isinstance(result, HTTPError):
        if result.code == 416 and size:
            total = (result.headers.get("Content-Range") or "").rpartition("/")[2]
            raise _RangeError(int(total) if total.isdigit() else -1)
        raise DownloadError(f"HTTP {result.code} {result.reason}")
    if isinstance(result, URLError):
        cause = result.reason
        raise DownloadError(getattr(cause, "strerror", None) or str(cause))
    if isinstance(result, Exception):
        raise DownloadError(f"{type(result).__name__}: {result}")
    return result


def _transfer(response: HTTPResponse, part: Path, size: int, progress: Progress) -> str:
    """Append the body to the partial file; the reason if it ended before its announced length, else ""."""
    resumed = re.match(rf"bytes {size}-\d+/(\d+)", response.headers.get("Content-Range") or "")
    if response.status == 206 and not resumed:
        part.unlink(missing_ok=True)
        return "the server sent a different range than requested"
    done = size if resumed else 0  # a server without range support sends the whole file again
    length = response.headers.get("Content-Length")
    total = int(resumed[1]) if resumed else int(length) if length else None
    text = part.name.removesuffix(".part").partition("-")[2]
    with part.open("ab" if resumed else "wb") as stream:
        while True:
            try:
                chunk = response.read(_CHUNK)
            except (HTTPException, OSError) as error:
                return f"the transfer broke off at {done:,} bytes ({type(error).__name__})"
            if not chunk:
                break
            stream.write(chunk)
            done += len(chunk)
            progress(Event(text, done, total))
    if total is not None and done != total:
        return f"truncated at {done:,} of {total:,} bytes"
    return ""
