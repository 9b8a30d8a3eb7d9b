"""The verdict on a run: what its devices could do alone, added up, what it gave of that, and where the rest went.

The page of a run (`run_verdict`, from what the run itself recorded), the report and the demo (`verdict`, from runs of
each device alone) begin with it; document.py draws it. Pure arithmetic in samples/s. Invariant: what the run gave
and its losses add up to what the devices own; a run that gave more has no losses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from uneven.timeline.record import TRAINING, Account, Event
from uneven.timeline.timeline import LOST, Timeline

MEASURED, ESTIMATED = "measured", "estimated"
OTHER, ABSENT = "other", "absent"
UNKNOWN = "not recorded"  # the cause of all losses of a run whose times nobody has
LOSSES = (*(state for state in TRAINING if state not in ("compute", OTHER)), OTHER, ABSENT)
LEAST = 0.001  # of the bar: less is counted as OTHER
NO_COMPARISON = "Do not compare this speed with another."
IMPOSSIBLE = 1.05  # a run that gave more than this of what its devices own: their speeds alone are not right


@dataclass(frozen=True)
class Amount:
    """So many samples/s, and whether they were measured or estimated."""

    name: str
    samples_per_s: float
    source: str


@dataclass(frozen=True)
class Verdict:
    """`owned` and `ddp` are None where the speed of a device alone is not known, `gave` where nothing was trained."""

    sentence: str
    gave: Amount | None = None
    owned: Amount | None = None  # the devices' speeds alone, added up
    ddp: Amount | None = None  # the most that equal batches allow: the slowest device's speed times their number
    losses: tuple[Amount, ...] = ()  # in the order of LOSSES, or UNKNOWN alone
    notes: tuple[str, ...] = ()  # what must be known beside it: devices that are gone, a disturbed speed

    @property
    def rest(self) -> str:
        """Where the rest went, in words; "" if there is none."""
        if self.owned is None or not self.losses:
            return ""
        if self.losses[0].name == UNKNOWN:
            return "Where the rest went was not recorded."
        parts = [f"{loss.name} {_percent(loss.samples_per_s, self.owned.samples_per_s)}" for loss in self.losses]
        return f"The rest went to {', '.join(parts)} ({ESTIMATED})."

    def part(self, amount: Amount) -> float:
        """The fraction of the bar that an amount takes."""
        whole = max(one.samples_per_s for one in (self.owned, self.gave) if one is not None)
        return amount.samples_per_s / whole if whole else 0.0


def verdict(
    alone: Sequence[float], gave: float, lost: Mapping[str, float], source: str, name: str = "This run"
) -> Verdict:
    """`alone` has the samples/s of each device alone, by `source`; `lost` those that each cause took, empty if unknown.

    Only the sizes of `lost` relative to each other are sure where `alone` is from other runs. What they do not explain
    counts as OTHER (steps that were slower than alone); where they explain too much they are reduced in proportion.
    """
    if gave <= 0.0:
        return Verdict(f"{name} trained no samples: there is nothing to compare.")
    run = Amount("this run", gave, MEASURED)
    if not alone or not all(speed > 0.0 for speed in alone):
        return Verdict(f"{name} gave {_speed(gave)} samples/s; how fast each device is alone is not known.", run)
    owned = Amount("what you own", sum(alone), source)
    losses = _losses(owned.samples_per_s, owned.samples_per_s - gave, lost)
    part = _percent(gave, owned.samples_per_s)
    if len(alone) == 1:
        text = f"{name} gave {_speed(gave)} of the {_speed(alone[0])} samples/s at which its device computes ({part})"
        return Verdict(f"{text}; with one device there is nobody to wait for.", run, owned, None, losses)
    ddp = Amount("equal-batch DDP, at most", len(alone) * min(alone), source)
    text = f"{name} gave {_speed(gave)} of the {_speed(owned.samples_per_s)} samples/s that you own ({part})"
    bound = f"{_speed(ddp.samples_per_s)} ({_percent(ddp.samples_per_s, owned.samples_per_s)})"
    text = f"{text}; equal-batch DDP could give at most {bound}."
    if gave > IMPOSSIBLE * owned.samples_per_s:
        text += " More than all cannot be: the devices were slower alone, as when other programs run."
    return Verdict(text, run, owned, ddp, losses)


def run_verdict(timeline: Timeline) -> Verdict:
    """The verdict on one run by its own timeline: a device's speed alone is that of its time in compute, an estimate.

    It is what the devices could do if they computed all the time, so data and other count as lost, too. A rank without
    samples counts with its speed in the warm-up. Of a run that was resumed it is about the part since then.
    """
    accounts, notes = timeline.accounts, _notes(timeline)
    if not any(account.seconds["compute"] for account in accounts):
        return replace(verdict((), 0.0, {}, ESTIMATED), notes=notes)
    if timeline.trained is None:
        return Verdict("No verdict: it is not recorded how many samples each device has trained.", notes=notes)
    warm_up = _warm_up_speeds(timeline.events)
    is_same = len(warm_up) == len(accounts) and not any(lane.ended for lane in timeline.lanes)
    done = [(lane.samples or 0) + lane.redone for lane in timeline.lanes]
    alone = [
        count / account.seconds["compute"] if count and account.seconds["compute"] else speed
        for count, account, speed in zip(done, accounts, warm_up if is_same else [0.0] * len(accounts), strict=True)
    ]
    at = timeline.run.resumed_at
    name = "This run" if at is None else f"Since it was resumed after step {at:,}, this run"
    lost = lost_by_state(accounts, alone, timeline.training_s)
    return replace(verdict(alone, timeline.trained / timeline.training_s, lost, ESTIMATED, name), notes=notes)


def _notes(timeline: Timeline) -> tuple[str, ...]:
    gone = [
        f"{timeline.name(lane)} {'was lost' if lane.ended.how == LOST else 'has left'} after "
        f"{lane.end_ns / 1e9:.1f} s ({lane.ended.why})."
        for lane in timeline.lanes
        if lane.ended is not None
    ]
    measured = timeline.run.interference
    disturbed = [f"{measured.describe()} {NO_COMPARISON}"] if measured is not None and measured.is_disturbed else []
    return (*gone, *disturbed)


def lost_by_state(
    accounts: Sequence[Account], alone: Sequence[float], training_s: float | None = None
) -> dict[str, float]:
    """The samples/s that the devices would have trained in the time they spent in other states than compute.

    ABSENT is the time that a rank did not train while another did: it joined later, ended before, or compiled.
    `training_s`: of the run; without it that of the rank which trained longest.
    """
    if training_s is None:
        training_s = max((account.training_s for account in accounts), default=0.0)
    lost = dict.fromkeys(LOSSES, 0.0)
    for account, speed in zip(accounts, alone, strict=True):
        seconds = {**account.seconds, ABSENT: training_s - account.training_s}
        for cause in LOSSES:
            lost[cause] += speed * seconds.get(cause, 0.0) / training_s if training_s else 0.0
    return lost


def _losses(whole: float, rest: float, lost: Mapping[str, float]) -> tuple[Amount, ...]:
    """The causes, made to add up to `rest`; those that nobody would see in the bar are counted as OTHER."""
    if rest <= 0.0:
        return ()
    if not lost:
        return (Amount(UNKNOWN, rest, ESTIMATED),)
    explained = sum(lost.values())
    scale = min(1.0, rest / explained) if explained > 0.0 else 1.0
    causes = {cause: scale * lost.get(cause, 0.0) for cause in LOSSES}
    small = [cause for cause, speed in causes.items() if speed < LEAST * whole and cause != OTHER]
    causes[OTHER] += sum(causes.pop(cause) for cause in small)
    causes[OTHER] += max(0.0, rest - sum(causes.values()))
    return tuple(Amount(cause, speed, ESTIMATED) for cause, speed in causes.items() if speed > 1e-9 * rest)


def _warm_up_speeds(events: Sequence[Event]) -> list[float]:
    """Each rank's samples/s before the first step, as the ranks told each other; empty where it was not measured."""
    return next((list(event.fields.get("alone", ())) for event in events if event.kind == "shares"), [])


def _speed(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def _percent(part: float, whole: float) -> str:
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 0.95 else f"{percent:.1f} %" if percent >= 0.05 else "under 0.1 %"
