"""Groups that are over: given up for a newer generation, left by a peer, or closed; and how they are freed.

Used by every group of this folder. A group and all that were made from it by `new_group` are over together. Whoever
waits looks here between two slices of its wait, so that no peer, stopped or unplugged, can hold it.
"""

import re
import threading
from typing import Any

from uneven.errors import GroupLostError

SLICE_S = 0.05  # of a wait: the longest until an abort, or a signal, is seen
FREE_S = 1.0  # for which `free` waits itself: far longer than it takes where no collective is under way ...
LOST_FREE_S = 0.5  # ... or where one is whose connections are cut

# What `describe_wrong` says.
_WRONG_BITS = re.compile(r"verify: chunk \d+ of rank (\d+) arrived with another checksum")
# What Gloo and sockets say of a peer that is gone. Other errors (a CUDA device, a wrong argument) are no lost group.
_PEER = re.compile(r"gloo/transport|connection|\bpeer\b|socket|timed out|broken pipe|unreachable", re.IGNORECASE)
# What Gloo says around that: its own file and line, and to look at other logs.
_NOISE = re.compile(r"^\[[^\]]*\.(?:cc|h):\d+\] |\. This (?:is|may be) typically caused by .*", re.DOTALL)

_TIMEOUT = re.compile(r"timed out waiting|no answer", re.IGNORECASE)
OTHER_ORDER = "a peer that still runs waits in another one, where ranks start collectives in different orders"


class Lost:
    """Whether a group, and all that were made from it, is over, and why. Any thread may call it at any time."""

    def __init__(self) -> None:
        self.error: RuntimeError | None = None  # None: it is not. Looked at before every collective and wait
        self.has_lost_peer = False  # some wait has raised that: what is under way may never complete

    def abort(self, why: str) -> None:
        """The first reason stays; an abort comes before a close, for it says why."""
        if not self.is_aborted:
            self.error = GroupLostError(why)

    def close(self) -> None:
        if self.error is None:
            self.error = RuntimeError("the group was closed")

    def check(self) -> None:
        if self.error is not None:
            raise type(self.error)(*self.error.args)  # one of its own for every thread that raises it

    @property
    def is_aborted(self) -> bool:
        return isinstance(self.error, GroupLostError)

    @property
    def is_lost(self) -> bool:
        return self.has_lost_peer or self.is_aborted


def as_lost(error: RuntimeError) -> RuntimeError:
    """A GroupLostError in its own words where a transport says that a peer is gone; else the error itself."""
    if type(error).__module__.startswith("uneven.") or not _PEER.search(str(error)):
        return error
    return GroupLostError(_NOISE.sub("", str(error)))


def is_timeout(why: str) -> bool:
    """Whether a peer was given up that may still run."""
    return _TIMEOUT.search(why) is not None


def describe_wrong(number: int, writer: int) -> str:
    """Why a group is given up where a message arrived with other bits than it was sent with."""
    return f"verify: chunk {number} of rank {writer} arrived with another checksum than it was sent"


def sender_of(cause: str) -> int | None:
    """The rank that sent such a message, from the words in which a rank tells the launcher; None of other causes.

    launch/watch/watch.py leaves a rank out that sends wrong bits twice in a row.
    """
    found = _WRONG_BITS.search(cause)
    return None if found is None else int(found.group(1))


def free(process_groups: list[Any], is_lost: bool) -> None:
    """Free process groups, of which nobody else holds a reference, in a thread.

    Their destructors wait for collectives that are under way, and a stopped peer may hold those until their timeout.
    What a collective may still write, its tensors, is freed with it.
    """
    if not process_groups:
        return
    thread = threading.Thread(target=process_groups.clear, name="uneven-free", daemon=True)
    thread.start()
    thread.join(LOST_FREE_S if is_lost else FREE_S)
