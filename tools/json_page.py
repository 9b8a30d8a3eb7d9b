"""Write docs/json.md: what every verb prints with --json, from the types of the documents.

    python tools/json_page.py docs/json.md

A document is a dataclass or a TypedDict, and the page has its keys and types; the comment behind a field is what the
page says about the key. tests/cli/test_json.py fails if the committed page differs from the output of this script, and
`mismatches` holds what verbs print against the same types.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints, is_typeddict

from uneven.bench.chaos.report import ChaosReport
from uneven.bench.demo import ModeRow
from uneven.bench.efficiency import Efficiency
from uneven.bench.policies import Trial
from uneven.bench.report.build import Report
from uneven.bench.report.check import Judged
from uneven.bench.scaling import Scaling
from uneven.bench.single.folders import Summary
from uneven.bench.strategies.measure import PairsDocument, RowsDocument
from uneven.cli import (
    bench,
    bench_results,
    config,
    data,
    demo,
    devices,
    init,
    join,
    leave,
    logs,
    preflight,
    run,
    setup,
    simulate,
    state,
    status,
    stop,
    torch_builds,
)
from uneven.install.diagnosis import Diagnosis
from uneven.plan.plan import PlanDocument
from uneven.results.comparison import Comparison
from uneven.results.saved_state import Contents

DOCUMENTS: dict[str, Any] = {
    "bench check": bench_results.Checked,
    "bench efficiency": Efficiency,
    "bench list": bench.Listed,
    "bench policies": Trial,
    "bench report": Report | list[Report],
    "bench run": Summary,
    "bench scaling": Scaling,
    "bench strategies": RowsDocument | PairsDocument,
    "bench sweep": bench.Swept | bench.Planned,
    "chaos": ChaosReport,
    "config check": config.Checked,
    "config show": config.Shown,
    "data get": data.Fetched,
    "data list": data.Listed,
    "demo": demo.Demo,
    "devices": devices.Listed,
    "diagnose": Diagnosis,
    "init": init.Made,
    "join": join.Joined,
    "leave": leave.Left,
    "logs": logs.Printed,
    "plan": PlanDocument,
    "preflight": preflight.Checked,
    "run": run.Ran,
    "setup": setup.SetUp,
    "simulate": simulate.Simulation | simulate.Curve,
    "state diff": Comparison,
    "state export": state.Exported,
    "state show": Contents,
    "status": status.Listed,
    "stop": stop.Stopped,
    "torch activate": torch_builds.Activated,
    "torch build": torch_builds.Covered | torch_builds.SourcePlan,
    "torch install": torch_builds.Covered | torch_builds.Plan,
    "torch list": torch_builds.Listed,
    "torch remove": torch_builds.Removed,
}
WORDS = {str: "text", Path: "text", float: "number", int: "whole", bool: "bool", Any: "any"}
HEAD = """# JSON of every verb

With `--json` a verb prints one JSON document to stdout and nothing else; messages and progress go to stderr. If a verb
fails, stdout is empty, the message is on stderr, and the [exit code](cli.md#exit-codes) says what kind of failure it
is. Verbs whose result is a verdict always print their document, and the exit code says whether all is well: `config
check` (2), `bench check`, `state diff` and `chaos` (1), `diagnose` (3). `run` also prints it for a run that was stopped
(130, 143).

    uneven run train.py --devices cpu,cpu@0.4 --json | jq '.runs[0].metrics'
    uneven devices --json | jq -r '.devices[].device'

`tools/json_page.py` makes this page from the types of the documents; tests compare real outputs with them. New keys may
be added; existing keys keep their names and types. Types: text, number, whole (a whole number), bool, object (with keys
that vary), any, list of a type. "or null" means that the value may be null, "may be absent" that the key may be
missing. `[]` stands for each entry of a list, `*` for any key. A number that is NaN or infinite is null, because JSON
has no such numbers.
"""


class Member(NamedTuple):
    """One key of a document."""

    kind: Any
    may_be_absent: bool
    meaning: str


def members(kind: Any) -> dict[str, Member]:
    hints, meanings = get_type_hints(kind, localns={"Judged": Judged, "ModeRow": ModeRow}), _meanings(kind)
    if is_typeddict(kind):
        absent = set(kind.__optional_keys__)
        names = list(hints)
    else:
        absent = {field.name for field in fields(kind) if field.metadata.get("absent")}
        names = [field.name for field in fields(kind)]
    return {name.rstrip("_"): Member(hints[name], name in absent, meanings.get(name, "")) for name in names}


def _meanings(kind: Any) -> dict[str, str]:
    """The comments behind the fields of a class and of those that it extends."""
    found: dict[str, str] = {}
    for part in reversed([kind, *getattr(kind, "__orig_bases__", ()), *kind.__mro__]):
        if is_dataclass(part) or is_typeddict(part):
            found |= dict(re.findall(r"^    (\w+): .*?  # (?!noqa|type:)(.+)$", inspect.getsource(part), re.MULTILINE))
    return found


def alternatives(kind: Any) -> tuple[list[Any], bool]:
    """The members of a union, and whether None is one of them."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [part for part in parts if part is not type(None)], type(None) in parts


def is_object(kind: Any) -> bool:
    return is_dataclass(kind) or is_typeddict(kind)


def entry_of(kind: Any) -> Any:
    """The type of a list's entries; None for what is no list."""
    is_list = get_origin(kind) in (list, tuple, Sequence) or kind in (list, tuple)
    return (*get_args(kind), Any)[0] if is_list else None


def value_of(kind: Any) -> Any:
    """The type of the values of an object with keys of any name; None for what is no such object."""
    is_dict = get_origin(kind) in (dict, Mapping) or kind in (dict, Mapping)
    return (*get_args(kind), Any, Any)[1] if is_dict else None


def words(kind: Any) -> str:
    parts, has_none = alternatives(kind)
    return " or ".join([*dict.fromkeys(map(_word, parts)), *(["null"] if has_none else [])])


def _word(kind: Any) -> str:
    if (entry := entry_of(kind)) is not None:
        return "list" if is_object(entry) else f"list of {words(entry)}"
    if is_object(kind) or value_of(kind) is not None:
        return "object"
    return "text" if get_origin(kind) is Literal or issubclass_of(kind, Enum) else WORDS[kind]


def issubclass_of(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def rows(kind: Any, place: str = "", absent: bool = False, meaning: str = "") -> Iterator[tuple[str, str, str]]:
    """The lines of the table for one type: of a document its keys, of anything else the type in words."""
    parts, has_none = alternatives(kind)
    inner = [row for part in parts for row in _inner_rows(part, place)]
    if place and (not inner or has_none or absent or meaning):
        told = words(kind).removesuffix(" or null") + ", may be absent" if absent else words(kind)
        yield place, told, meaning
    yield from inner


def _inner_rows(kind: Any, place: str) -> Iterator[tuple[str, str, str]]:
    if is_object(kind):
        for key, member in members(kind).items():
            yield from rows(member.kind, f"{place}.{key}".lstrip("."), member.may_be_absent, member.meaning)
    elif (entry := entry_of(kind)) is not None and (is_object(entry) or not place):
        yield from rows(entry, f"{place}[]")
    elif (value := value_of(kind)) not in (None, Any):
        yield from rows(value, f"{place}.*")


def make_page() -> str:
    return HEAD + "".join(_section(verb, kind) for verb, kind in sorted(DOCUMENTS.items()))


def _section(verb: str, kind: Any) -> str:
    tables = []
    for one in alternatives(kind)[0]:
        lines = "".join(f"| `{key}` | {kind} | {meaning} |\n" for key, kind, meaning in rows(one))
        tables.append(f"\n| key | type | meaning |\n|---|---|---|\n{lines}")
    return f"\n## uneven {verb}\n" + "\nOr:\n".join(tables)


def mismatches(kind: Any, value: Any, place: str = "") -> Iterator[str]:
    """Where a document is not as its type says, in words; nothing where it is."""
    parts, has_none = alternatives(kind)
    if not (value is None and (has_none or float in parts)):  # of NaN and infinity
        yield from min((list(_mismatches(part, value, place)) for part in parts), key=len)


def _mismatches(kind: Any, value: Any, place: str) -> Iterator[str]:
    shown = place or "the document"
    if is_object(kind) and isinstance(value, dict):
        known = members(kind)
        yield from (f"{place} lacks {key}" for key, one in known.items() if not one.may_be_absent and key not in value)
        yield from (f"{place} has {key}, which its type has not" for key in value if key not in known)
        for key in known.keys() & value.keys():
            yield from mismatches(known[key].kind, value[key], f"{place}.{key}")
    elif (entry := entry_of(kind)) is not None and isinstance(value, list):
        for number, one in enumerate(value):
            yield from mismatches(entry, one, f"{place}[{number}]")
    elif (inner := value_of(kind)) is not None and isinstance(value, dict):
        for key, one in value.items():
            yield from mismatches(inner, one, f"{place}.{key}")
    elif kind is not Any and not _fits(kind, value):
        yield f"{shown} is {value!r}, not {words(kind)}"


def _fits(kind: Any, value: Any) -> bool:
    allowed = {"text": str, "number": int | float, "whole": int, "bool": bool}.get(_word(kind))
    return allowed is not None and isinstance(value, allowed) and isinstance(value, bool) == (kind is bool)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_page())
