"""Which of the ranks that have failed is the cause of a failed run, and what the user is told of it.

Called by launch/watch/watch.py when the run cannot go on. One rank that fails takes others with it: those report a lost
connection, or nothing at all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from uneven.errors import USER_ERRORS, NotFiniteError, RankError, RefusedError
from uneven.launch.processes import describe_exit, is_about_peer


def find_cause(
    names: Mapping[int, str],
    errors: Mapping[int, Mapping[str, Any]],
    codes: Sequence[int | None],
    refusal: str,
    gone: Sequence[str] = (),
) -> Exception:
    """A rank that was killed, else the first one that failed by itself, else a machine that is lost.

    `names` of the processes that count; `refusal` is why the others cannot go on without it, or empty; `gone`: the
    lines about lost machines. A rank here may notice such a loss first, and only knows that a connection broke.
    """
    for number, name in names.items():
        if number not in errors and (code := codes[number]) not in (None, 0):
            assert code is not None
            return RankError(f"{name} {describe_exit(code)}{because(refusal)}")
    # A rank whose peer is gone fails too, a moment later, and its message is about the connection.
    by_itself = {number: error for number, error in errors.items() if not is_about_peer(error["what"])}
    if gone and not by_itself:
        return RankError(f"{gone[0]}{because(refusal)}; the run ends on all machines")
    by_itself = by_itself or dict(errors)
    number = min(by_itself, key=lambda number: float(errors[number]["time"]))
    error, name = errors[number], names[number]
    if error["kind"] in USER_ERRORS:
        kind = USER_ERRORS[error["kind"]]
        # All ranks raise those alike, and they name the rank or machine that is the cause.
        return kind(error["message"] if kind in (NotFiniteError, RefusedError) else f"{name}: {error['message']}")
    what = error["what"] + (f"\n  at {error['place']}" if error.get("place") else "") + because(refusal)
    return RankError(f"{name} failed: {what}\n\nIts traceback:\n{error['traceback']}")


def because(refusal: str | None) -> str:
    """What follows a line about a loss, where the run ends with it."""
    return f"; {refusal}" if refusal else ""
