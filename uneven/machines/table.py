"""The preflight as one table: a row per check and a column per machine. Pure: facts and reports in, lines out.

Printed by the leader before a run over several machines, and by `uneven preflight`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from uneven.format import GIB, align_columns, format_gib
from uneven.machines.links import describe_rate

LOW_DISK = 1 * GIB  # a checkpoint or a compiled kernel may not fit


def rows(facts: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]] = ()) -> list[list[str]]:
    """[check, value of each machine, ...]; `reports` of machines/links.py, the leader's first."""
    lines = [
        ["machine", *(str(one["host"]) for one in facts)],
        ["system", *(f"{one['os']}, {one['arch']}" for one in facts)],
        ["python", *(str(one["python"]) for one in facts)],
        ["torch", *(str(one["torch"] or "missing") for one in facts)],
        ["uneven", *(f"{one['uneven']['version']} ({one['uneven']['digest'][:8]})" for one in facts)],
        ["devices", *(", ".join(_device(device) for device in one["devices"]) for one in facts)],
        ["dtype", *(", ".join(dict.fromkeys(_dtype(device) for device in one["devices"])) for one in facts)],
        ["memory", *(f"{format_gib(one['memory_available_bytes'])} free" for one in facts)],
        ["disk", *(f"{format_gib(one['disk_free_bytes'])} free" for one in facts)],
    ]
    if any(one["nccl"] for one in facts):
        lines.append(["nccl", *(str(one["nccl"] or "none") for one in facts)])
    if any(one["code"] for one in facts):
        lines.append(["code", *(_code(one["code"], facts[0]["code"]) for one in facts)])
    return lines + (_links(reports) if reports else [])


def lines(facts: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    return align_columns(rows(facts, reports))


def warnings(facts: Mapping[str, Any]) -> list[str]:
    """What may stop a run on this machine later."""
    free = facts["disk_free_bytes"]
    if free is None or free >= LOW_DISK:
        return []
    return [f"{facts['host']}: {format_gib(free)} of disk are free, which a checkpoint may not fit into; make room"]


def _links(reports: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """What each machine sees of the others: the worst of its links, and its clock as the leader sees it."""
    found: dict[str, list[str]] = {"reach": [], "round trip": [], "jitter": [], "bandwidth": [], "clock": ["reference"]}
    clocks = {link["to"]: link for link in reports[0]["links"]}
    for report in reports:
        links = report["links"]
        good = [link for link in links if not link.get("error")]
        found["reach"].append("all" if len(good) == len(links) else f"{len(good)} of {len(links)}")
        found["round trip"].append(_most([link["round_trip_s"] for link in good]))
        found["jitter"].append(_most([link["jitter_s"] for link in good]))
        rates = [link["bytes_per_s"] for link in good if link.get("bytes_per_s")]
        found["bandwidth"].append(describe_rate(min(rates)) if rates else "?")
        if report["machine"]:
            link = clocks.get(report["machine"], {})
            found["clock"].append(f"{link['clock_s'] * 1e3:+.1f} ms" if "clock_s" in link else "?")
    return [[name, *cells] for name, cells in found.items()]


def _most(seconds: Sequence[float]) -> str:
    return f"{max(seconds) * 1e3:.2f} ms" if seconds else "?"


def _device(device: Mapping[str, Any]) -> str:
    return str(device["device"]) if str(device["device"]).startswith("cpu") else f"{device['device']} {device['name']}"


def _dtype(device: Mapping[str, Any]) -> str:
    return f"{device['auto']} ({device['why']})"


def _code(code: Mapping[str, str], leader: Mapping[str, str]) -> str:
    if not code:
        return "not there"
    first = next(iter(code))
    files = f"{first} and {len(code) - 1} more" if len(code) > 1 else first
    return f"{files}, {'the same' if code == leader else 'other'}" if code is not leader else files
