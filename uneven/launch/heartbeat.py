"""Posts: each rank tells the launcher a few times a second where it is, and hears of a stop request.

A thread of the rank with a store client of its own posts, so that a rank deep in a long step still posts and one that
is stopped or dead does not. A rank whose store is gone, and with it the launcher, is told: `deserted` ends it.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from uneven.comm.store import get_text, reach_store

EVERY_S = 0.2


class Heartbeat:
    """Posts `read()` under the rank's key until `close()`; sets `stop` when the launcher asks for it."""

    def __init__(
        self,
        port: int,
        rank: int,
        read: Callable[[], dict[str, Any]],
        stop: threading.Event,
        deserted: Callable[[], None] | None = None,
    ) -> None:
        self._store = reach_store("127.0.0.1", port)
        self._key = f"post/{rank}"
        self._read = read
        self._stop = stop
        self._done = threading.Event()
        self._deserted = deserted or _end_soon
        self._count = 0
        self._thread = threading.Thread(target=self._work, name="uneven-posts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        self._post()

    def _work(self) -> None:
        self._exchange()  # at once: a rank that was heard of can be missed
        while not self._done.wait(EVERY_S):
            self._exchange()

    def _exchange(self) -> None:
        try:
            self._post()
            if get_text(self._store, "stop") is not None:
                self._stop.set()
        except RuntimeError:
            self._deserted()

    def _post(self) -> None:
        self._count += 1
        self._store.set(self._key, json.dumps({"count": self._count, **self._read()}))


def _end_soon() -> None:
    # Where a guard watches the launcher too, it has the first word: it also removes the run's folder.
    time.sleep(1.0)
    os._exit(1)
