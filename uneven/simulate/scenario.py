"""A cluster and its job as a table, the form of the files in examples/clusters/: checked key by key.

`uneven simulate` reads the file and calls `read_scenario`; docs/simulate.md has all keys.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from uneven.errors import InputError
from uneven.simulate.cluster import Cluster, Job, RankKind
from uneven.simulate.links import Link

NUMBER = "a number"
WHOLE = "a whole number"
TEXT = "text"
DEVICE = {"name": TEXT, "count": WHOLE, "machine": TEXT, "per_machine": WHOLE} | dict.fromkeys(
    ("fixed_ms", "sample_ms", "jitter", "round_ms", "memory_gb"), NUMBER
)
LINK = dict.fromkeys(("rate_mb_s", "delay_ms"), NUMBER)
RATES = ("failures_per_hour", "joins_per_hour", "slowdowns_per_hour")
FAULTS = dict.fromkeys((*RATES, "slowdown_factor", "slowdown_s", "settle_s"), NUMBER)
WHOLE_OF_JOB = ("samples_per_epoch", "batch_size", "global_batch_size", "anchor", "max_anchor")
JOB = {
    **dict.fromkeys(WHOLE_OF_JOB, WHOLE),
    **dict.fromkeys(("epochs", "param_mb", "eval_ms", "overlap"), NUMBER),
    "backend": TEXT,
}
TOP = {"devices": "", "inside": "", "between": "", "faults": "", "job": "", "seed": WHOLE, "title": TEXT}
MAX_RANKS = 100_000
LEAST, MOST = 1e-15, 1e15  # of a number that is not 0: what is computed of several stays finite
MOST_SEED = 2**64  # nothing is computed of it


def read_scenario(table: Mapping[str, Any], source: str = "cluster.toml") -> tuple[Cluster, Job]:
    """The cluster and the job of a table; InputError with its place where something is wrong. `source` names it."""
    _check(table, TOP, source)
    job = _job(_part(table, "job", source), f"{source}: [job]")
    kinds, machines = _devices(table.get("devices"), source)
    inside = _link(_part(table, "inside", source), f"{source}: [inside]")
    between = _link(_part(table, "between", source), f"{source}: [between]") if "between" in table else None
    faults = _part(table, "faults", source) if "faults" in table else {}
    _check(faults, FAULTS, f"{source}: [faults]")
    if between is None and len(set(machines)) > 1:
        raise InputError(
            f"{source}: [between] is missing: {len(set(machines))} machines need the link between them, as in\n"
            "  [between]\n  rate_mb_s = 110\n  delay_ms = 0.3"
        )
    with _located(source):
        return Cluster(kinds, machines, inside, between, seed=table.get("seed", 0), **faults), job


def _job(table: Mapping[str, Any], where: str) -> Job:
    known = {**JOB, **({"anchor": TEXT} if table.get("anchor") == "auto" else {})}
    _check(table, known, where, needed=("samples_per_epoch", "batch_size"))
    values = dict(table)
    values["param_bytes"] = int(1e6 * values.pop("param_mb", 0.0))
    with _located(where):
        return Job(**values)


def _devices(entries: object, source: str) -> tuple[tuple[RankKind, ...], tuple[int, ...]]:
    """Every rank's kind and machine. A kind names its machine, or has machines of its own with so many ranks each."""
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{source}: [[devices]] is missing: a table for each kind of device, with a name and a count")
    kinds: list[RankKind] = []
    machines: list[str] = []
    by_name: dict[str, RankKind] = {}
    for place, entry in enumerate(entries):
        where = f"{source}: [[devices]] {entry.get('name', place + 1)!r}"
        _check(entry, DEVICE, where, needed=("name", "sample_ms"))
        count, per_machine = entry.get("count", 1), entry.get("per_machine")
        if count < 1 or (per_machine is not None and per_machine < 1):
            raise InputError(f"{where}: count = {count} and per_machine = {per_machine} must be at least 1")
        if "machine" in entry and per_machine is not None:
            raise InputError(f"{where}: machine and per_machine exclude each other")
        if len(kinds) + count > MAX_RANKS:
            raise InputError(f"{where}: count = {count} makes more than {MAX_RANKS:,} ranks")
        kind = _kind(entry, where)
        # One kind may stand in two tables, as on two machines. Results are by name: two kinds would become one there.
        if by_name.setdefault(kind.name, kind) != kind:
            raise InputError(f"{where}: an earlier table has this name and other costs: give each kind its own name")
        kinds += [kind] * count
        if per_machine is None:
            machines += [str(entry.get("machine", "1"))] * count
        else:
            machines += [f"{place}/{rank // per_machine}" for rank in range(count)]
    names = list(dict.fromkeys(machines))
    numbers = {name: number for number, name in enumerate(names)}
    return tuple(kinds), tuple(numbers[name] for name in machines)


def _kind(entry: Mapping[str, Any], where: str) -> RankKind:
    memory = entry.get("memory_gb")
    with _located(where):
        return RankKind(
            name=entry["name"],
            fixed_ms=float(entry.get("fixed_ms", 0.0)),
            sample_ms=float(entry["sample_ms"]),
            jitter=float(entry.get("jitter", 0.0)),
            memory_bytes=None if memory is None else int(1e9 * memory),
            round_ms=float(entry.get("round_ms", 0.0)),
        )


def _link(table: Mapping[str, Any], where: str) -> Link:
    _check(table, LINK, where, needed=("rate_mb_s",))
    with _located(where):
        return Link(float(table["rate_mb_s"]), float(table.get("delay_ms", 0.0)))


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Errors name the place in the file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _part(table: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    part = table.get(name)
    if not isinstance(part, dict):
        raise InputError(f"{source}: [{name}] is missing, or no table")
    return part


def _check(table: Mapping[str, Any], known: Mapping[str, str], where: str, needed: Sequence[str] = ()) -> None:
    """Every key is known and has a value of its type, and those that are needed are there."""
    for name, value in table.items():
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1)
            meant = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(known)}"
            raise InputError(f"{where}: unknown key {name!r}; {meant}")
        most = MOST_SEED if name == "seed" else MOST
        if known[name] in (NUMBER, WHOLE) and _is_beyond(value, most):
            raise InputError(f"{where}: {name} must be 0, or of a size between {LEAST:g} and {most:g}")
        if known[name] and not _fits(value, known[name]):
            raise InputError(f"{where}: {name} = {value!r} must be {known[name]}")
    for name in needed:
        if name not in table:
            raise InputError(f"{where}: {name} is missing ({known[name]})")


def _is_beyond(value: object, most: float) -> bool:
    """Whether a number is too large or too close to 0.

    Compared as it is: a whole number of 400 digits becomes no float, and one of 5,000 cannot even be shown.
    """
    return isinstance(value, int | float) and (abs(value) > most or 0.0 < abs(value) < LEAST)


def _fits(value: object, kind: str) -> bool:
    if kind == TEXT:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if kind == WHOLE else int | float):
        return False
    return math.isfinite(value)
