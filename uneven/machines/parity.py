"""What must agree between the machines of a run, what may differ, and why. Pure: facts in, differences out.

The leader compares every machine that comes to its door; `uneven preflight` prints the same table. The facts are those
of machines/facts.py.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from uneven.machines.code import differing

CLOCK_S = 30.0  # clocks further apart than this are refused; nearer ones are aligned by round trips


@dataclass(frozen=True)
class Difference:
    """Why a run is refused: `what` of `host` is `theirs`, the leader's is `ours` ('' where `what` says it all)."""

    host: str
    what: str
    theirs: str
    ours: str
    fix: str
    check: str = ""  # the name under which it can be skipped

    def __str__(self) -> str:
        theirs = f" is {self.theirs}" if self.theirs else ""
        ours = f", the leader's is {self.ours}" if self.ours else ""
        return f"{self.host}: {self.what}{theirs}{ours}; {self.fix}"

    def to_json(self) -> dict[str, str]:
        return {"host": self.host, "check": self.check, "message": str(self)}


@dataclass(frozen=True)
class Rule:
    """What is compared of one package or fact: `key` of both sides must be equal."""

    check: str
    what: str
    read: Callable[[Mapping[str, Any]], str | None]
    key: Callable[[str], str]
    fix: str  # {ours} is put in


def minor(version: str) -> str:
    """'2.13.0+cpu' -> '2.13'."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version


def release(version: str) -> str:
    """'2.13.0+cpu' -> '2.13.0': builds for other devices have another suffix."""
    return version.partition("+")[0]


def _read(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda facts: None if facts.get(name) is None else str(facts[name])


def _uneven(facts: Mapping[str, Any]) -> str | None:
    found = facts.get("uneven") or {}
    return f"{found.get('version')} ({found.get('digest')})"


RULES = (
    # The ranks speak a protocol with each other that may change with any line of it.
    Rule("uneven", "uneven", _uneven, str, "install the same uneven on both"),
    # random, hashes and orders of the standard library change between minor versions, and data orders with them.
    Rule("python", "Python", _read("python"), minor, "use Python {ours_minor} there"),
    # Kernels, optimizer steps and the protocols of Gloo and its store change between minor versions.
    Rule("torch", "torch", _read("torch"), minor, "pip install torch=={ours_release} there"),
)

# What may differ, with a note: it changes bits or speed at most, and no result that a user would notice.
NOTES = (
    # A patch release mends kernels: results agree to rounding.
    Rule("torch", "torch", _read("torch"), release, "pip install torch=={ours_release} there for equal bits"),
    # Its random streams may change between minor versions: an augmentation by numpy may differ.
    Rule("numpy", "numpy", _read("numpy"), minor, "pip install numpy=={ours} there"),
)


def compare(
    leader: Mapping[str, Any],
    other: Mapping[str, Any],
    *,
    round_trip_s: float,
    skip: Collection[str] = (),
    precision: str | None = None,
    backend: str | None = None,
) -> list[Difference]:
    """What stops a run of these two machines, gravest first; empty where nothing does. `skip` names checks.

    Both facts are `stamped`: the other's when it sent them, the leader's when they arrived, `round_trip_s` later at
    most. `precision` and `backend` are the settings as far as they are known.
    """
    found = _by_rules(RULES, leader, other)
    found += _compare_nccl(leader, other, backend) + _compare_code(leader, other)
    found += _compare_dtype(leader, other, precision) + _compare_clock(leader, other, round_trip_s)
    return [difference for difference in found if difference.check not in skip]


def notes(leader: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """What differs and may, but is worth a line: patch releases, numpy."""
    refused = {difference.what for difference in _by_rules(RULES, leader, other)}
    return [note for note in _by_rules(NOTES, leader, other) if note.what not in refused]


def _by_rules(rules: tuple[Rule, ...], leader: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    found = []
    for rule in rules:
        ours, theirs = rule.read(leader) or "missing", rule.read(other) or "missing"
        if rule.key(ours) != rule.key(theirs):
            fix = rule.fix.format(ours=ours, ours_minor=minor(ours), ours_release=release(ours))
            found.append(Difference(_host(other), rule.what, theirs, ours, fix, rule.check))
    return found


def _compare_nccl(leader: Mapping[str, Any], other: Mapping[str, Any], backend: str | None) -> list[Difference]:
    """NCCL must be the same where it is used: releases do not talk to each other, and CUDA ranks hang in the first sum.

    It is used where every rank has a CUDA device; a wheel without it, or with one compiled in, cannot be judged.
    """
    has_cuda = [all(d["device"].startswith("cuda") for d in facts.get("devices", ())) for facts in (leader, other)]
    ours, theirs = leader.get("nccl"), other.get("nccl")
    if backend not in (None, "auto", "nccl") or not all(has_cuda) or None in (ours, theirs) or ours == theirs:
        return []
    fix = f"pip install the leader's torch build there, which brings NCCL {ours}; or --backend cpu on all"
    return [Difference(_host(other), "NCCL", str(theirs), str(ours), fix, "nccl")]


def _compare_code(leader: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    ours, theirs = leader.get("code") or {}, other.get("code") or {}
    if not ours or not (names := differing(ours, theirs)):
        return []
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    what = f"{shown} {'differs' if len(names) == 1 else 'differ'}" if theirs else f"{next(iter(ours))} is not there"
    return [Difference(_host(other), what, "", "", "copy the leader's there (git, rsync)", "code")]


def _compare_dtype(leader: Mapping[str, Any], other: Mapping[str, Any], precision: str | None) -> list[Difference]:
    """A format that some devices compute and others emulate, many times slower; 'auto' takes one that all have."""
    if precision in (None, "auto", "fp32"):
        return []
    fix = "use precision='auto' (--precision auto) or 'fp32', or leave that device out"
    for facts, rival in ((other, leader), (leader, other)):
        lacking = [d for d in facts.get("devices", ()) if precision not in d["precisions"]]
        if lacking and any(precision in d["precisions"] for d in rival.get("devices", ())):
            what = f"precision={precision!r} on {lacking[0]['device']} ({lacking[0]['name']})"
            theirs = "not native" if facts is other else f"not native, but that of {_host(other)} is"
            return [Difference(_host(facts), what, theirs, "native" if facts is other else "", fix, "dtype")]
    return []


def _compare_clock(leader: Mapping[str, Any], other: Mapping[str, Any], round_trip_s: float) -> list[Difference]:
    """Times of checkpoints, logs and certificates come from the clock: one that is far off is set first."""
    if "clock" not in leader or "clock" not in other:
        return []
    off_s = float(other["clock"]) - float(leader["clock"])
    if abs(off_s) <= CLOCK_S + round_trip_s:
        return []
    return [clock_difference(_host(other), off_s)]


def clock_difference(host: str, off_s: float) -> Difference:
    where = f"{abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} the leader's"
    return Difference(host, "the clock", where, "", "set it there: sudo timedatectl set-ntp true", "clock")


def _host(facts: Mapping[str, Any]) -> str:
    return str(facts.get("host", "unknown"))
