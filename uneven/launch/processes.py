"""How rank processes end: their exit codes, and the reports of those that failed by themselves, in words.

A rank leaves error-NUMBER.json in its launcher's private folder (launch/rank.py); whoever watches reads it.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uneven.errors import USER_ERRORS

EARLY = 256  # no exit code of a process: one that ended with 0 in the middle of its run, which nobody would miss
INTERRUPTED = 130  # exit code of a rank whose script ended because it was asked to stop


def describe_exit(code: int) -> str:
    if code == EARLY:
        return "ended with exit code 0 before its run was over"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def leave_error(folder: Path, number: int, report: Mapping[str, Any]) -> None:
    """Of a rank that failed by itself; complete from the first moment that it can be seen."""
    draft = folder / f".error-{number}"
    draft.write_text(json.dumps(report))
    draft.rename(folder / f"error-{number}.json")


def read_errors(folder: Path, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What those of these processes that failed by themselves have reported."""
    paths = {number: folder / f"error-{number}.json" for number in numbers}
    return {number: json.loads(path.read_text()) for number, path in paths.items() if path.exists()}


def describe_error(error: Mapping[str, Any]) -> str:
    """What a rank has reported in its error-NUMBER.json, as one line; whole where it is a sentence for the user."""
    if error["kind"] in USER_ERRORS:
        return str(error["message"]).partition("\n")[0]
    place = f" at {error['place']}" if error.get("place") else ""
    return str(error["what"]).partition("\n")[0][:200] + place


def is_about_peer(what: str) -> bool:
    """Whether this error of a rank only says that another one is gone."""
    return "peer" in what or what.startswith("GroupLostError")
