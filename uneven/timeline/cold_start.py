"""The cold start of a run: what each rank prepared before the first step, and who waited for the slowest of them.

Read from two kinds of events. `prepared` says what a rank did and for how long (Recorder.phase): before the first step
the compilation or warm-up, the capture and the measurement of its speed; in training (`slot`) a step that was the first
of its size. `ready` is the moment when a rank comes to the rendezvous; it waits there until the last rank is ready. One
that `joins` a run in progress waits for nobody there, and nobody for it. The summary, the page and timeline.json show
the result.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from uneven.timeline.timeline import Timeline

SHOWN_S = 0.1  # shorter phases are not worth a line on the terminal
WAITED_S = 1.0  # likewise, where nothing was compiled or captured


@dataclass(frozen=True)
class RankStart:
    """One rank's. `steps` are (slot, seconds) of steps in training that compiled, captured or chose kernels."""

    rank: int
    device: str
    phases: dict[str, float]  # name -> seconds, in the order in which they came
    waited_s: float = 0.0
    waited_for: int | None = None  # the rank that was ready last
    steps: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cold_starts(timeline: Timeline) -> list[RankStart]:
    """Every rank's cold start, in the order of the lanes."""
    ready = {e.rank: e.t_ns for e in timeline.events if e.kind == "ready" and not e.fields.get("joins")}
    slowest = max(ready, key=lambda rank: ready[rank], default=None)
    found = []
    for lane in timeline.lanes:
        events = [event for event in timeline.events if event.kind == "prepared" and event.rank == lane.rank]
        phases: dict[str, float] = {}
        for event in events:
            if "slot" not in event.fields:
                phases[event.fields["phase"]] = phases.get(event.fields["phase"], 0.0) + event.fields["ms"] / 1e3
        steps = tuple((event.fields["slot"], event.fields["ms"] / 1e3) for event in events if "slot" in event.fields)
        is_waiting = slowest is not None and lane.rank in ready and lane.rank != slowest
        waited_s = (ready[slowest] - ready[lane.rank]) / 1e9 if is_waiting and slowest is not None else 0.0
        name = timeline.name(lane)
        found.append(RankStart(lane.rank, name, phases, waited_s, slowest if is_waiting else None, steps))
    return found


def describe_cold_starts(found: Sequence[RankStart]) -> list[str]:
    """A line per rank, where any rank has compiled or captured, or has long waited for another; else none."""
    is_long = any(start.waited_s >= WAITED_S for start in found)
    is_built = any(start.phases.get(name, 0.0) >= SHOWN_S for start in found for name in ("compile", "capture"))
    if not (is_long or is_built or any(start.steps for start in found)):
        return []
    devices = {start.rank: start.device for start in found}
    return [line for start in found if (line := _describe(start, devices))]


def _describe(start: RankStart, devices: dict[int, str]) -> str:
    parts = [f"{name} {seconds:.1f} s" for name, seconds in start.phases.items() if seconds >= SHOWN_S]
    if start.waited_for is not None and start.waited_s >= SHOWN_S:
        parts.append(f"waited {start.waited_s:.1f} s for {devices[start.waited_for]} (rank {start.waited_for})")
    if start.steps:
        seconds = sum(seconds for _, seconds in start.steps)
        slots = ", ".join(str(slot) for slot, _ in start.steps[:5]) + (", ..." if len(start.steps) > 5 else "")
        parts.append(f"first steps of a size {seconds:.1f} s (slots {slots})")
    return f"  cold start of {start.device} (rank {start.rank}): {', '.join(parts)}" if parts else ""
