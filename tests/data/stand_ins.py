"""A local web server that can truncate, refuse or delay its responses."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Site:
    """The state of the server: `pages` by path; `cuts` are the lengths at which the next responses break off."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.asked: list[str] = []  # paths
        self.gate = threading.Event()  # responses wait for it
        self.gate.set()
        self.url = ""


@contextmanager
def serve() -> Iterator[Site]:
    """A running server on a free local port."""
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            assert state.gate.wait(60)
            body = state.pages.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # of who no longer waits
                self.wfile.write(body[: state.cuts.pop(0)] if state.cuts else body)

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
