"""A local web server that can truncate, refuse or delay its responses."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Site:
    """The state of the server: `pages` by path; `cuts` are the lengths at which the next responses break off."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.knows_ranges = True
        self.cuts: list[int] = []
        self.asked: list[tuple[str, str | None]] = []  # (path, Range header)
        self.gate = threading.Event()  # responses wait for it
        self.gate.set()
        self.request_received = threading.Event()
        self.url = ""


@contextmanager
def serve() -> Iterator[Site]:
    """A running server on a free local port."""
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append((self.path, wanted))
            state.request_received.set()
            assert state.gate.wait(60)
            body = state.pages.get(self.path)
            if body is None:
                self.send_error(404)
                return
            start = 0
            if wanted and state.knows_ranges:
                start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
                if start >= len(body):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(body)}")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            rest = body[start:]
            self.wfile.write(rest[: state.cuts.pop(0)] if state.cuts else rest)

        def log_message(self, *args: object) -> None:
            del args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/"
    yield state
    state.gate.set()
    server.shutdown()
    server.server_close()
    thread.join()
