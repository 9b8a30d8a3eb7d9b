"""How ranks are asked to leave from outside: small files in the private folder of a run. No torch in this file.

`uneven leave` writes a request there and waits for the answer (launch/control/ask.py). The launcher of the run looks
for requests while it watches its ranks (launch/watch/watch.py); `uneven join` passes them on to its leader
(launch/nodes/node.py). A request counts as long as its file is there.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_S = 5.0  # for `uneven leave` to read its answer
ENDS = "the run ends"  # why nobody leaves any more
Answer = Mapping[str, Any]  # {"refused": why} or {"left": one line}


@dataclass(frozen=True, eq=False)
class LeaveRequest:
    """Some ranks are to leave; held by the leader until it is answered.

    `ranks` are numbers as the user reads them, None means all of `home`: the processes of the machine that asks.
    """

    home: tuple[int, ...]
    answer: Callable[[Answer], None]
    ranks: tuple[int, ...] | None = None
    may_be_elsewhere: bool = False  # asked on the leader's machine: any rank of the run
    is_urgent: bool = False  # a signal: where they cannot leave now, something else is done at once
    is_open: Callable[[], bool] = lambda: True  # False once it was withdrawn


class RequestFiles:
    """The side of the run: `take` new requests, `answer` each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()

    def take(self) -> dict[str, tuple[int, ...] | None]:
        """Requests that have come since the last call, by their names, with the ranks that are meant; None: all."""
        found: dict[str, tuple[int, ...] | None] = {}
        for path in self._folder.glob("leave-*.json"):
            if path.stem not in self._seen:
                self._seen.add(path.stem)
                ranks = json.loads(path.read_text())["ranks"]
                found[path.stem] = None if ranks is None else tuple(ranks)
        return found

    def is_open(self, name: str) -> bool:
        return (self._folder / f"{name}.json").exists()

    def answer(self, name: str, answer: Answer) -> None:
        draft = self._folder / f".answer-{name}"
        draft.write_text(json.dumps(dict(answer)))
        draft.rename(self._folder / f"answer-{name}.json")

    def requests(self, home: tuple[int, ...]) -> list[LeaveRequest]:
        """On the leader's machine, whose processes are `home`."""
        return [
            LeaveRequest(
                home,
                lambda answer, name=name: self.answer(name, answer),  # type: ignore[misc]
                ranks,
                may_be_elsewhere=True,
                is_open=lambda name=name: self.is_open(name),  # type: ignore[misc]
            )
            for name, ranks in self.take().items()
        ]


def await_readers(folder: Path) -> None:
    """Before a run's folder is removed: whoever has asked reads its answer first, and takes its request back."""
    end_s = time.monotonic() + READ_S
    while time.monotonic() < end_s:
        names = [path.name.removeprefix("answer-") for path in folder.glob("answer-*.json")]
        if not any((folder / name).exists() for name in names):
            return
        time.sleep(0.02)


class AskedToLeave:
    """The side of `uneven leave`: one request. `close` withdraws it where it has not been answered."""

    def __init__(self, run: Path, ranks: tuple[int, ...] | None) -> None:
        name = f"leave-{secrets.token_hex(4)}"
        self._path, self._answer = run / f"{name}.json", run / f"answer-{name}.json"
        draft = run / f".{name}"
        draft.write_text(json.dumps({"ranks": ranks}))
        draft.rename(self._path)

    def answer(self) -> Answer | None:
        try:
            found: Answer = json.loads(self._answer.read_text())
        except OSError:
            return None
        return found

    @property
    def is_run_over(self) -> bool:
        return not self._path.exists()

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._answer.unlink(missing_ok=True)
