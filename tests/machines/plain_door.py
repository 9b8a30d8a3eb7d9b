"""A leader's door without a leader: a listener on loopback that admits who knows the token and serves files."""

import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from uneven.machines.file_service import FileService
from uneven.machines.transfer import LeaderFiles
from uneven.machines.wire import WireError, admit

TOKEN = "secret"


class PlainDoor:
    """`door` is what ranks are told of it."""

    def __init__(self, server: socket.socket) -> None:
        self.service = FileService()
        self.door: tuple[str, int, str] = ("127.0.0.1", server.getsockname()[1], TOKEN)
        self._server, self._threads = server, [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def reach(self, home: Path) -> LeaderFiles:
        """As a rank whose private folders are in `home`."""
        home.mkdir(parents=True, exist_ok=True)
        return LeaderFiles(self.door, lambda: Path(tempfile.mkdtemp(dir=home)), shutil.rmtree)

    def close(self) -> None:
        """Nobody is let in any more; wait for those who are inside."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._server.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
                self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(WireError):
            connection = admit(sock, TOKEN)
            message = connection.read(5)
            assert message["role"] == "files"
            self.service.handle(connection, message)


@contextmanager
def plain_door() -> Iterator[PlainDoor]:
    door = PlainDoor(socket.create_server(("127.0.0.1", 0)))
    try:
        yield door
    finally:
        door.close()
