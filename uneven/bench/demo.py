"""The demo: one small model in every mode on mismatched devices, compared in a table and summed up in a sentence.

Called by cli/demo.py. Only `train_modes` trains; the table and the sentence are computed from the runs' summaries.
Invariants: a figure that was not measured, or cannot be derived from measurements, is None; no conclusion is drawn from
a disturbed run ([Note: disturbed figures] in undisturbed.py); the demo skips modes to stay within its time budget.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from uneven.bench.single.modes import PAIR, resolve_mode, run_folder
from uneven.bench.undisturbed import is_disturbed, mark
from uneven.errors import InputError, RankError, StoppedError
from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import parse_devices
from uneven.hardware.preflight import check_device
from uneven.hardware.yardstick import Yardstick

MODEL = "lenet"
DATA = "mnist-mini"
METRIC = "accuracy"
REFERENCE = "torch-ddp"
# Every machine has these. What the demo is about comes first: where the time ends early, the last ones are missing.
OURS = ("cpu-async", "cpu-balanced", "cpu-cadence", "cpu-sync")
EQUAL_BATCHES = (REFERENCE, "cpu-sync")
IMPOSSIBLE = 1.05  # efficiency above this cannot be real: runs of some seconds differ by less than 5 % by chance
FAR_OFF = 1.25  # ratio of measured to simulated gap: more than the inexactness of sleeping explains
BUDGET_S = 240.0
MODE_SHARE = 0.5  # the fraction of the remaining time that one mode may use, so that a slow one does not use all
MORE = "--minutes gives it more"
NEXT = "run 'uneven demo --help'"

Summary = Mapping[str, Any]  # of one run, as single/run.py writes it
Train = Callable[["DemoOrder", str, float], Summary]  # order, mode, time limit in seconds


@dataclass(frozen=True, kw_only=True)
class DemoOrder:
    """The settings of a demo. `modes` None means all that these devices allow."""

    devices: str = PAIR
    modes: tuple[str, ...] | None = None
    epochs: int = 3
    samples: int | None = None  # train on this many digits only, for a quick look
    seed: int = 0
    out: Path = Path("runs") / "demo"
    progress: str = "auto"
    budget_s: float = BUDGET_S
    repeats: bool = True  # measure a disturbed mode again, if the budget allows it


@dataclass(frozen=True)
class ModeRow:
    """One mode in the table. `efficiency` is an estimate, because its speeds come from runs at different times."""

    mode: str
    accuracy: float
    seconds: float  # of training, without start-up and evaluation
    samples_per_s: float
    speedup: float | None  # over the fast device alone
    efficiency: float | None  # over the sum of the devices' own speeds
    shares: tuple[float, ...]  # of the samples, per device
    is_disturbed: bool = False
    interference: dict[str, Any] | None = None


class Finished(TypedDict):
    """The modes that are finished."""

    model: str
    data: str
    devices: list[str]
    modes: list[ModeRow]
    measured: Yardstick | None  # by the speeds of the devices alone
    sentence: str | None
    doubt: str | None
    disturbed: list[str]
    failures: dict[str, str]  # mode: why
    skipped: dict[str, str]  # mode: why
    missing: list[str]


class DemoDocument(Finished):
    """What --json prints."""

    epochs: int
    samples: int | None
    seed: int
    out: str
    notes: list[str]
    interrupted: bool
    page: str | None


@dataclass
class Results:
    """The modes that are finished so far; complete or not, it can be printed."""

    devices: tuple[str, ...]
    modes: tuple[str, ...]
    summaries: dict[str, Summary] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # mode -> why
    skipped: dict[str, str] = field(default_factory=dict)  # mode -> why the budget did not allow it
    shortened: str | None = None  # why each mode trains fewer digits than were asked for (demo_length.py)

    @property
    def alone(self) -> tuple[float, ...] | None:
        """Each device's samples/s alone; None unless all were run, since any of them may be the fastest."""
        solos = [self.summaries.get(f"solo-{place}") for place in range(len(self.devices))]
        speeds = tuple(summary["samples_per_s"] for summary in solos if summary is not None)
        return speeds if len(speeds) == len(self.devices) else None

    @property
    def disturbed(self) -> list[str]:
        """Modes whose figures are marked."""
        return [mode for mode, summary in self.summaries.items() if is_disturbed(summary)]

    @property
    def undisturbed_alone(self) -> tuple[float, ...] | None:
        """As `alone`, but None if the run of a device alone was disturbed; conclusions use this one."""
        return None if any(mode.startswith("solo-") for mode in self.disturbed) else self.alone

    @property
    def not_run(self) -> dict[str, str]:
        """Every mode without a result, and why."""
        why = {mode: f"failed: {text.splitlines()[0]}" for mode, text in self.failures.items()} | self.skipped
        missing = [mode for mode in self.modes if mode not in self.summaries]
        return {mode: why.get(mode, "the demo was ended before") for mode in missing}

    @property
    def rows(self) -> list[ModeRow]:
        alone = self.alone
        return [_row(summary, len(self.devices), alone) for summary in self.summaries.values()]

    @property
    def sentence(self) -> str | None:
        """The conclusion; needs every device alone and one of our policies, all of them undisturbed."""
        alone = self.undisturbed_alone
        clean = {mode: run["samples_per_s"] for mode, run in self.summaries.items() if not is_disturbed(run)}
        speeds = {mode: clean[mode] for mode in OURS if mode in clean}
        if alone is None or not speeds:
            return None
        best = max(speeds, key=lambda mode: speeds[mode])
        fastest, total = max(alone), sum(alone)
        text = (
            f"Together ({best}) {speeds[best] / fastest:.2f}x your fast device, "
            f"~{100 * speeds[best] / total:.0f} % of what you own; "
            f"ordinary DDP could reach at most {Yardstick.of(alone).ddp_over_fast:.2f}x"
        )
        if REFERENCE in clean:
            text += f" (here it did {clean[REFERENCE] / fastest:.2f}x)"
        return text + "."

    @property
    def caution(self) -> str | None:
        """Names the disturbed modes; None if there are none."""
        if not self.disturbed:
            return None
        reasons = {mode: self.summaries[mode].get("interference", {}) for mode in self.disturbed}
        stolen = max((reason.get("stolen_share") or 0.0 for reason in reasons.values()), default=0.0)
        foreign = max((reason.get("foreign_share") or 0.0 for reason in reasons.values()), default=0.0)
        return (
            f"Disturbed: {', '.join(self.disturbed)} (up to {stolen:.0%} of the CPU time stolen, {foreign:.0%} of the "
            "cores used by other programs); nothing is concluded from these. Run it again on an idle machine."
        )

    @property
    def doubt(self) -> str | None:
        """How undisturbed figures contradict each other, if they do: not all interference can be detected."""
        alone = self.undisturbed_alone
        if alone is None:
            return None
        efficiencies = {row.mode: row.efficiency or 0.0 for row in self.rows if not row.is_disturbed}
        most, equal = max(efficiencies.values()), max(efficiencies.get(mode, 0.0) for mode in EQUAL_BATCHES)
        bound = Yardstick.of(alone).ddp_bound
        measured, simulated = (
            Yardstick.of(alone).gap,
            Yardstick.of([device.speed for device in parse_devices(self.devices)]).gap,
        )
        if most > IMPOSSIBLE:
            what = f"~{100 * most:.0f} % of what you own cannot be"
        elif equal > IMPOSSIBLE * bound:
            what = f"equal batches reached ~{100 * equal:.0f} % of what you own where {100 * bound:.0f} % is the most"
        elif not 1 / FAR_OFF < measured / simulated < FAR_OFF:
            what = f"a gap of {measured:.2f} was measured where {simulated:.2f} is simulated"
        else:
            return None
        return f"Doubtful: {what}. Other programs may have had the cores; run it again when the machine is idle."

    def to_json(self) -> Finished:
        return {
            "model": MODEL,
            "data": DATA,
            "devices": list(self.devices),
            "modes": self.rows,
            "measured": None if self.undisturbed_alone is None else Yardstick.of(self.undisturbed_alone),
            "sentence": self.sentence,
            "doubt": self.doubt,
            "disturbed": self.disturbed,
            "failures": self.failures,
            "skipped": self.skipped,
            "missing": [mode for mode in self.modes if mode not in self.summaries],
        }


def check(order: DemoOrder) -> Results:
    """InputError for devices or modes that the demo cannot use; otherwise empty results to be filled."""
    devices = parse_devices(order.devices)
    if len(devices) < 2:
        raise InputError(
            f"--devices {order.devices!r}: the demo needs at least two devices, as in {PAIR}; for one run "
            f"'uneven bench run --model {MODEL} --data {DATA} --devices {order.devices}'"
        )
    for device in dict.fromkeys(devices):
        check_device(device)
        if device.percent is not None:
            raise InputError(
                f"--devices {order.devices!r}: the demo takes whole devices, as in {PAIR} or cuda:0,cpu; on slices run "
                "'uneven bench efficiency'"
            )
    return Results(tuple(map(str, devices)), _chosen(order.modes, len(devices), order.devices))


def notes(order: DemoOrder) -> list[str]:
    """Lines to print before the figures: what limits their meaning on this machine."""
    devices = parse_devices(order.devices)
    plan = assign_cores(devices, available_cores())
    lines = [f"{plan.note}; the figures below mean little"] if plan.note else []
    if any(device.speed < 1 for device in devices):
        lines.append("a device with @ is simulated: it sleeps after each step, so its speed is not exact")
    return lines


def threads(order: DemoOrder) -> int:
    """How many threads each device has when it runs alone, for `limit_threads`; 0 if ranks are not pinned."""
    plan = assign_cores(parse_devices(order.devices), available_cores())
    return min(plan.threads) if plan.pinned else 0


def train_modes(
    order: DemoOrder,
    results: Results,
    report: Callable[[str], None],
    train: Train | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train the modes in turn within the budget, and add them to `results`; `report` gets lines of progress.

    A mode whose ranks fail goes to `results.failures`, one that does not fit the remaining time to `results.skipped`;
    any other error ends the demo.
    """
    train = train or _train
    end_s = clock() + order.budget_s
    shortest_s = longest_s = 0.0
    for number, mode in enumerate(results.modes, 1):
        place, modes_left = f"{number}/{len(results.modes)} {mode}", len(results.modes) - number
        began_s = clock()
        left_s = end_s - began_s
        # A mode that takes up to twice as long as the longest so far may be merely slow: let it finish.
        limit_s = max(MODE_SHARE * left_s, min(left_s, 2 * longest_s)) if modes_left else left_s
        if left_s < shortest_s or left_s <= 0:
            results.skipped[mode] = f"the time of the demo is nearly spent; {MORE}"
            report(f"{place} skipped: {results.skipped[mode]}")
            continue
        try:
            summary = results.summaries[mode] = train(order, mode, limit_s)
            took_s = clock() - began_s
            if order.repeats and is_disturbed(summary) and end_s - clock() >= (modes_left + 1) * took_s:
                report(f"{place} was disturbed by other programs: measured again")
                summary = results.summaries[mode] = train(order, mode, limit_s)
        except StoppedError:
            if mode not in results.summaries:
                results.skipped[mode] = f"not finished after {limit_s:.0f} s, its part of the demo's time; {MORE}"
                report(f"{place} given up: {results.skipped[mode]}")
                continue
        except RankError as error:
            results.failures[mode] = str(error)
            report(f"{place} failed: {str(error).splitlines()[0]}")
            continue
        shortest_s, longest_s = min(shortest_s or took_s, took_s), max(longest_s, took_s)
        accuracy, seconds = 100 * summary["quality"][METRIC], summary["train_seconds"]
        report(f"{place}: {accuracy:.2f} % right, {mark(f'{seconds:.1f} s', is_disturbed(summary))} of training")


def folder_of(order: DemoOrder, mode: str) -> Path:
    return run_folder(order.out, MODEL, mode, order.seed)


def _train(order: DemoOrder, mode: str, time_limit_s: float) -> Summary:
    from uneven.bench.single.run import Order, run_single
    from uneven.results.progress import bars_only

    # The progress lines of seven runs would hide the table.
    with bars_only():
        return run_single(
            Order(
                model=MODEL,
                mode=mode,
                devices=order.devices,
                data=DATA,
                epochs=order.epochs,
                samples=order.samples,
                seed=order.seed,
                eval_every=order.epochs,
                out=order.out,
                progress=order.progress,
                time_limit_s=time_limit_s,
            )
        )


def _chosen(wanted: Sequence[str] | None, num_devices: int, devices: str) -> tuple[str, ...]:
    """The modes in the order asked for, each once; by default solo runs and PyTorch's DDP first, then ours."""
    allowed = (*(f"solo-{place}" for place in range(num_devices)), REFERENCE, *OURS)
    if wanted is None:
        return allowed
    for mode in wanted:
        if mode not in allowed:
            raise InputError(f"--modes: {mode!r} is none of {', '.join(allowed)} (on {devices}); {NEXT}")
        resolve_mode(mode, devices)
    return tuple(dict.fromkeys(wanted))


def _row(summary: Summary, num_devices: int, alone: Sequence[float] | None) -> ModeRow:
    mode, speed = summary["mode"], summary["samples_per_s"]
    shares = tuple(summary["sample_shares"])
    if mode.startswith("solo-"):
        shares = tuple(float(mode == f"solo-{place}") for place in range(num_devices))
    return ModeRow(
        mode=mode,
        accuracy=summary["quality"][METRIC],
        seconds=summary["train_seconds"],
        samples_per_s=speed,
        speedup=speed / max(alone) if alone else None,
        efficiency=speed / sum(alone) if alone else None,
        shares=shares,
        is_disturbed=is_disturbed(summary),
        interference=summary.get("interference"),
    )
