"""A run's timeline: the state of every rank's device at every moment, with events and machine samples.

The worker makes one per rank with `Timeline.of`, the launcher merges them, and idle, lanes, curves, page and export
read the result. Invariant: the spans of a lane are in order and have no gaps. The JSON form is described in export.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from uneven.timeline.record import STATES, Account, Event, Recorder, Span, account_of, device_spans
from uneven.timeline.sample import Sample

VERSION = 1


@dataclass(frozen=True)
class Lane:
    """One rank's spans, in order and without gaps."""

    rank: int
    device: str
    spans: list[Span]


@dataclass(frozen=True)
class Timeline:
    """Everything recorded about a run; times are in ns since the start of the run."""

    lanes: list[Lane]
    accounts: list[Account]
    events: list[Event]
    samples: list[Sample]

    @classmethod
    def of(
        cls, recorder: Recorder, device: str, samples: list[Sample], busy: Sequence[tuple[int, int]] = ()
    ) -> "Timeline":
        """One rank's timeline in the machine's monotonic clock; `merge` subtracts the start of the run.

        `busy` holds the intervals in which a CUDA device computed. If it is given, the lane shows the device, not the
        host.
        """
        spans = recorder.spans()
        if not busy:
            return cls([Lane(recorder.rank, device, spans)], [recorder.account()], list(recorder.events), samples)
        spans = device_spans(spans, busy)
        account = account_of(recorder.rank, spans)
        return cls([Lane(recorder.rank, device, spans)], [account], list(recorder.events), samples)

    @classmethod
    def merge(cls, parts: Sequence["Timeline"]) -> "Timeline":
        """One timeline of all ranks. Ranks on one machine share a clock, so their times need no alignment."""
        start = min(lane.spans[0][1] for part in parts for lane in part.lanes)
        return cls(
            [
                Lane(lane.rank, lane.device, [(state, a - start, b - start) for state, a, b in lane.spans])
                for part in parts
                for lane in part.lanes
            ],
            [account for part in parts for account in part.accounts],
            sorted(
                (replace(event, t_ns=event.t_ns - start) for part in parts for event in part.events),
                key=lambda event: event.t_ns,
            ),
            # Every rank samples the same machine, so the samples of the first rank are enough.
            [replace(sample, t_ns=sample.t_ns - start) for sample in parts[0].samples],
        )

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Timeline":
        """The inverse of `to_json`."""
        if record.get("version") != VERSION:
            raise ValueError(f"the timeline has version {record.get('version')!r}; only version {VERSION} can be read")
        names = record["states"]
        lanes = []
        for rank in record["ranks"]:
            bounds = [*rank["starts"], rank["end"]]
            spans = [(names[code], a, b) for code, (a, b) in zip(rank["states"], pairwise(bounds), strict=True)]
            lanes.append(Lane(rank["rank"], rank["device"], spans))
        events = [
            Event(e["t"], e["rank"], e["kind"], {k: v for k, v in e.items() if k not in ("t", "rank", "kind")})
            for e in record["events"]
        ]
        samples = [
            Sample(
                s["t"],
                s["cpu"],
                s["process_cpu"],
                s["ram_bytes"],
                s["process_bytes"],
                tuple((int(i), float(u), int(m)) for i, u, m in s["gpus"]),
            )
            for s in record["samples"]
        ]
        return cls(lanes, [Account(a["rank"], a["seconds"]) for a in record["accounts"]], events, samples)

    def to_json(self) -> dict[str, Any]:
        codes: dict[str, int] = {state: code for code, state in enumerate(STATES)}
        return {
            "version": VERSION,
            "unit": "ns since the run's start",
            "states": list(STATES),
            "ranks": [
                {
                    "rank": lane.rank,
                    "device": lane.device,
                    "end": lane.spans[-1][2],
                    "starts": [start for _, start, _ in lane.spans],
                    "states": [codes[state] for state, _, _ in lane.spans],
                }
                for lane in self.lanes
            ],
            "accounts": [
                {
                    "rank": a.rank,
                    "seconds": a.seconds,
                    "shares": a.shares,
                    "training_s": a.training_s,
                    "wall_s": a.wall_s,
                }
                for a in self.accounts
            ],
            "events": [{"t": e.t_ns, "rank": e.rank, "kind": e.kind, **e.fields} for e in self.events],
            "samples": [{"t": s.t_ns, **s.fields()} for s in self.samples],
        }


@dataclass(frozen=True, slots=True)
class RankRound:
    """One rank's part in a round of averaging, in ns of the timeline: snapshot <= joined <= averaged <= merged.

    Until `joined_ns` the snapshot waits for the ranks that have not joined yet, until `averaged_ns` the params are
    summed, and then the average waits for the end of the rank's current step. Timelines that were recorded without
    these times have `snapshot_ns` None.
    """

    rank: int
    number: int
    merged_ns: int
    snapshot_ns: int | None
    joined_ns: int
    averaged_ns: int
    wire_bytes: int | None
    cost_ms: float  # of the rank's own time: snapshot, merge, and the part of the transfer that it waited for
    wait_ms: float
    steps_late: int
    divergence: float


def rank_rounds(events: Iterable[Event]) -> list[RankRound]:
    """The rounds among the events, in the order of the events."""
    return [_rank_round(event) for event in events if event.kind == "round"]


def _rank_round(event: Event) -> RankRound:
    fields = event.fields

    def time_ns(name: str) -> int:
        return event.t_ns - int(fields.get(name, 0.0) * 1e6)

    return RankRound(
        rank=event.rank,
        number=int(fields["round"]),
        merged_ns=event.t_ns,
        snapshot_ns=time_ns("left_ms_ago") if "left_ms_ago" in fields else None,
        joined_ns=time_ns("met_ms_ago"),
        averaged_ns=time_ns("back_ms_ago"),
        wire_bytes=fields.get("bytes"),
        cost_ms=fields.get("transfer_ms", 0.0),
        wait_ms=fields.get("wait_ms", 0.0),
        steps_late=int(fields.get("steps_late", 0)),
        divergence=fields.get("divergence", 0.0),
    )
