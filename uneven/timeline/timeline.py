"""A run's timeline: the state of every rank's device at every moment, with events and machine samples.

The worker makes one per rank with `Timeline.of`, the launcher merges them, and idle, lanes, curves, page and export
read the result. Merged, all times are on the clock of the first machine (clock.py). Invariants: the spans of a lane are
in order and have no gaps; everyone who took part has a lane, also a rank that was lost or has left (train/settler.py).
The JSON form is described in export.py.

[Note: speed of a run] The samples that this part of the run has trained, since it was started or resumed last, over its
training time. The last lines of a run, its page, `uneven run --json` and timeline.json take it from here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from uneven.hardware.interference import Interference
from uneven.timeline.clock import Machine, unite
from uneven.timeline.record import STATES, TRAINING, Account, Event, Recorder, Span, account_of, device_spans
from uneven.timeline.sample import Sample

VERSION = 1
HERE = Machine(0, "localhost")
LOST, LEFT = "lost", "left"


@dataclass(frozen=True)
class Ended:
    """Why a rank took no part in the run any more: it was LOST, or LEFT and had handed in everything. In one line."""

    how: str
    why: str


@dataclass(frozen=True)
class Lane:
    """One rank's spans, in order and without gaps.

    `samples` are those of this part of the run that it has trained and that count, None where it was not recorded;
    `redone` others that it had trained, and that were trained again. `ended`: before the run did.
    """

    rank: int
    device: str
    spans: list[Span]
    machine: int = 0
    samples: int | None = None
    redone: int = 0
    ended: Ended | None = None

    @property
    def end_ns(self) -> int:
        return self.spans[-1][2]


@dataclass(frozen=True)
class RunFacts:
    """What the lanes do not tell. `resumed_at`: the step from which this part of the run went on, if it was resumed."""

    resumed_at: int | None = None
    samples_before: int = 0  # of all parts before this one
    interference: Interference | None = None  # by other programs, on the first machine; None: it was not measured

    @property
    def is_disturbed(self) -> bool | None:
        return None if self.interference is None else self.interference.is_disturbed


@dataclass(frozen=True)
class Timeline:
    """Everything recorded about a run; times are in ns since the start of the run.

    `machines` is in the order of their numbers.
    """

    lanes: list[Lane]
    accounts: list[Account]
    events: list[Event]
    samples: list[Sample]
    machines: tuple[Machine, ...] = (HERE,)
    run: RunFacts = RunFacts()

    @property
    def training_s(self) -> float:
        """The training time of the run: that of the rank that trained longest.

        Where ranks were lost or have left nobody may have been there all the time: then it is the time in which any
        rank trained.
        """
        longest_s = max((account.training_s for account in self.accounts), default=0.0)
        return max(longest_s, _covered_s(self.lanes)) if any(lane.ended for lane in self.lanes) else longest_s

    @property
    def trained(self) -> int | None:
        """The samples of all lanes, None where one's are not known."""
        known = [lane.samples for lane in self.lanes if lane.samples is not None]
        return sum(known) if len(known) == len(self.lanes) else None

    @property
    def samples_per_s(self) -> float | None:
        """See [Note: speed of a run]; None where it is not known."""
        seconds = self.training_s
        return self.trained / seconds if self.trained is not None and seconds else None

    @classmethod
    def of(
        cls,
        recorder: Recorder,
        device: str,
        samples: list[Sample],
        busy: Sequence[tuple[int, int]] = (),
        machine: Machine = HERE,
        trained: int | None = None,
    ) -> "Timeline":
        """One rank's timeline in its machine's monotonic clock, which `merge` aligns with that of other machines.

        `busy` holds the intervals in which a CUDA device computed. If it is given, the lane shows the device, not the
        host. `trained`: the samples that the rank has trained.
        """
        spans = recorder.spans()
        account = recorder.account()
        if busy:
            spans = device_spans(spans, busy)
            account = account_of(recorder.rank, spans)
        lane = Lane(recorder.rank, device, spans, machine.number, trained)
        own = [replace(sample, machine=machine.number) for sample in samples]
        # Ranks change when others are lost: all of it is told of the last one, whose lane this is.
        events = [replace(event, rank=recorder.rank) for event in recorder.events]
        return cls([lane], [account], events, own, (machine,))

    @classmethod
    def merge(cls, parts: Sequence["Timeline"]) -> "Timeline":
        """One timeline of all ranks, on the clock of the first machine; accounts stay as each rank measured them.

        All ranks of a machine are moved alike: they share a clock, and their lanes fit together exactly as recorded.
        """
        machines = unite(machine for part in parts for machine in part.machines)
        clocks = {machine.number: machine for machine in machines}
        start = min(clocks[lane.machine].alignment()(lane.spans[0][1]) for part in parts for lane in part.lanes)
        lanes: list[Lane] = []
        events: list[Event] = []
        samples: list[Sample] = []
        sampled: set[int] = set()
        for part in parts:
            number = part.lanes[0].machine
            align = clocks[number].alignment(start)
            lanes += [
                replace(lane, spans=[(state, align(a), align(b)) for state, a, b in lane.spans]) for lane in part.lanes
            ]
            events += [replace(event, t_ns=align(event.t_ns)) for event in part.events]
            if number not in sampled:  # every rank of a machine samples the same machine
                sampled.add(number)
                samples += [replace(sample, t_ns=align(sample.t_ns)) for sample in part.samples]
        return cls(
            lanes,
            [account for part in parts for account in part.accounts],
            sorted(events, key=lambda event: event.t_ns),
            sorted(samples, key=lambda sample: sample.t_ns),
            tuple(machines),
        )

    @property
    def is_one_machine(self) -> bool:
        return len(self.machines) == 1

    def machine(self, lane: Lane) -> Machine:
        return next(machine for machine in self.machines if machine.number == lane.machine)

    def lanes_of(self, machine: Machine) -> list[Lane]:
        return [lane for lane in self.lanes if lane.machine == machine.number]

    def name(self, lane: Lane) -> str:
        """A lane's device, with its host where there are several."""
        return lane.device if self.is_one_machine else f"{lane.device} on {self.machine(lane).host}"

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
            ended = None if rank["ended"] is None else Ended(rank["ended"]["how"], rank["ended"]["why"])
            own = {name: rank[name] for name in ("rank", "device", "machine", "samples", "redone")}
            lanes.append(Lane(spans=spans, ended=ended, **own))
        events = [
            Event(e["t"], e["rank"], e["kind"], {k: v for k, v in e.items() if k not in ("t", "rank", "kind")})
            for e in record["events"]
        ]
        samples = [Sample.from_json(sample) for sample in record["samples"]]
        accounts = [Account(a["rank"], a["seconds"]) for a in record["accounts"]]
        machines = tuple(Machine.from_json(machine) for machine in record["machines"])
        return cls(lanes, accounts, events, samples, machines, _run_facts(record["run"]))

    def to_json(self) -> dict[str, Any]:
        codes: dict[str, int] = {state: code for code, state in enumerate(STATES)}
        return {
            "version": VERSION,
            "unit": "ns since the run's start",
            "states": list(STATES),
            "run": self._run_json(),
            "machines": [machine.to_json() for machine in self.machines],
            "ranks": [
                {
                    "rank": lane.rank,
                    "device": lane.device,
                    "machine": lane.machine,
                    "host": self.machine(lane).host,
                    "end": lane.end_ns,
                    "samples": lane.samples,
                    "redone": lane.redone,
                    "ended": None if lane.ended is None else {"t": lane.end_ns, **asdict(lane.ended)},
                    "starts": [start for _, start, _ in lane.spans],
                    "states": [codes[state] for state, _, _ in lane.spans],
                }
                for lane in self.lanes
            ],
            "accounts": [
                {**asdict(a), "shares": a.shares, "training_s": a.training_s, "wall_s": a.wall_s} for a in self.accounts
            ],
            "events": [{"t": e.t_ns, "rank": e.rank, "kind": e.kind, **e.fields} for e in self.events],
            "samples": [{"t": s.t_ns, **s.fields()} for s in self.samples],
        }

    def _run_json(self) -> dict[str, Any]:
        """What a reader wants to know first; the speed and "disturbed" follow from the rest."""
        interference = self.run.interference
        return {
            "resumed_at": self.run.resumed_at,
            "samples_before": self.run.samples_before,
            "samples": self.trained,
            "training_s": self.training_s,
            "samples_per_s": self.samples_per_s,
            "disturbed": self.run.is_disturbed,
            "interference": None if interference is None else interference.to_json(),
        }


def _run_facts(record: Mapping[str, Any]) -> RunFacts:
    known = record["interference"]
    measured = None if known is None else {name: known[name] for name in known if name != "is_disturbed"}
    interference = None if measured is None else Interference(**measured)
    return RunFacts(record["resumed_at"], record["samples_before"], interference)


def _covered_s(lanes: Iterable[Lane]) -> float:
    """The time in which any of them was in a state of training, in seconds."""
    trains = sorted((first, last) for lane in lanes for state, first, last in lane.spans if state in TRAINING)
    covered, until = 0, trains[0][0] if trains else 0
    for first, last in trains:
        if last > until:
            covered += last - max(first, until)
            until = last
    return covered / 1e9


@dataclass(frozen=True, slots=True)
class RankRound:
    """One rank's part in a round of averaging, in ns of the timeline: snapshot <= joined <= averaged <= merged.

    Until `joined_ns` the snapshot waits for the ranks that have not joined yet, until `averaged_ns` the params are
    summed, and then the average waits for the end of the rank's current step.
    """

    rank: int
    number: int
    merged_ns: int
    snapshot_ns: int
    joined_ns: int
    averaged_ns: int
    wire_bytes: int
    cost_ms: float  # of the rank's own time: snapshot, merge, and the part of the transfer that it waited for
    wait_ms: float
    steps_late: int
    divergence: float

    @property
    def mb_per_s(self) -> float | None:
        """What was summed over the time that it took, once all ranks had joined; None where it took none."""
        summed_ns = self.averaged_ns - self.joined_ns
        return None if not self.wire_bytes or summed_ns <= 0 else 1e3 * self.wire_bytes / summed_ns


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
        snapshot_ns=time_ns("left_ms_ago"),
        joined_ns=time_ns("met_ms_ago"),
        averaged_ns=time_ns("back_ms_ago"),
        wire_bytes=int(fields.get("bytes") or 0),
        cost_ms=fields.get("transfer_ms", 0.0),
        wait_ms=fields.get("wait_ms", 0.0),
        steps_late=int(fields.get("steps_late", 0)),
        divergence=fields.get("divergence", 0.0),
    )
