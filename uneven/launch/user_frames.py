"""Tracebacks that begin with the user's code: frames of uneven and of what started the script are left out.

Used where an exception of the user's leaves us: a rank's error report, `Run.join`, and the command line. A frame of
ours stays where the exception was raised by it: that is a defect of uneven, or a use that its message explains.
"""

import runpy
from pathlib import Path
from types import TracebackType

from uneven.files import is_users_code

OURS = str(Path(__file__).parent.parent)
RUNPY = ("<frozen runpy>", runpy.__file__)


def show_user_frames(error: BaseException) -> None:
    """Shorten the traceback of an exception, and of those that it came from."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _shortened(one.__traceback__)
            pending += [one.__cause__, one.__context__]


def user_place(error: BaseException) -> str | None:
    """The user's line that an exception came from, as in 'train.py:12, in loss_of'; None where there is none."""
    places = [entry for entry in _entries(error.__traceback__) if _is_users(entry)]
    if not places:
        return None
    code = places[-1].tb_frame.f_code
    return f"{Path(code.co_filename).name}:{places[-1].tb_lineno}, in {code.co_name}"


def _shortened(traceback: TracebackType | None) -> TracebackType | None:
    entries = _entries(traceback)
    started = max((place for place, entry in enumerate(entries) if _file(entry) in RUNPY), default=-1)
    if started == len(entries) - 1:
        return None  # a script that does not compile: the error itself names file and line
    rest = entries[started + 1 :]
    if _is_ours(rest[-1]):
        first = next((place for place, entry in enumerate(rest) if not _is_ours(entry)), 0)
        kept = rest[first:]
    else:
        kept = [entry for entry in rest if not _is_ours(entry)]
    shortened = None
    for entry in reversed(kept):
        shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _is_ours(entry: TracebackType) -> bool:
    return _file(entry).startswith(OURS)


def _is_users(entry: TracebackType) -> bool:
    """Not a part of Python's import system either, which has no file."""
    name = _file(entry)
    return is_users_code(name) and not name.startswith("<frozen")
