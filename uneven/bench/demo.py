"""The demo: one small model in every mode on devices that do not match, and what the runs show side by side.

Called by cli/demo.py. Which modes there are, the rows of the table and the sentence are arithmetic on the runs'
summaries; only `train_modes` trains. Invariants: a figure that was not measured, or does not follow from what was, is
None; no sentence is derived from a disturbed run ([Note: disturbed figures] in undisturbed.py); the demo keeps to its
budget by measuring less.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from uneven.bench.single.modes import JOINT, PAIR, resolve_mode
from uneven.bench.undisturbed import is_disturbed, mark
from uneven.errors import InputError, RankError, StoppedError
from uneven.hardware import yardstick
from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import parse_devices
from uneven.hardware.preflight import check_device

MODEL, DATA, METRIC = "lenet", "mnist-mini", "accuracy"
REFERENCE = "torch-ddp"
OURS = tuple(name for name in JOINT if name.startswith("cpu-"))  # every machine has these
EQUAL_BATCHES = (REFERENCE, "cpu-sync")
IMPOSSIBLE = 1.05  # more than devices can do together, and than runs of some seconds differ by chance
FAR_OFF = 1.25  # times the simulated gap: more than sleeping is inexact
BUDGET_S = 240.0
MODE_SHARE = 0.5  # of the time left, that one mode may take: a mode in trouble must not take it all
NEXT = "run 'uneven demo --help'"

Summary = Mapping[str, Any]  # of one run, as single/run.py writes it
Train = Callable[["DemoOrder", str, float], Summary]  # order, mode, time limit in seconds


@dataclass(frozen=True, kw_only=True)
class DemoOrder:
    """What to show. `modes` None means all that these devices allow."""

    devices: str = PAIR
    modes: tuple[str, ...] | None = None
    epochs: int = 3
    samples: int | None = None  # of the digits, for a quick look
    seed: int = 0
    out: Path = Path("runs") / "demo"
    progress: str = "auto"
    budget_s: float = BUDGET_S
    repeats: bool = True  # a disturbed mode, where the budget allows it


@dataclass(frozen=True)
class ModeRow:
    """One mode in the table. `efficiency` is an estimate: its speeds come from runs one after the other."""

    mode: str
    accuracy: float
    seconds: float  # of training, without start-up and evaluation
    samples_per_s: float
    speedup: float | None  # over the fast device alone
    efficiency: float | None  # of the sum of what the devices do alone
    shares: tuple[float, ...]  # of the samples, by device
    is_disturbed: bool = False
    interference: dict[str, Any] | None = None


@dataclass
class Results:
    """What is finished so far. Whatever ends the demo early, this remains."""

    devices: tuple[str, ...]
    modes: tuple[str, ...]
    summaries: dict[str, Summary] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # mode -> why
    skipped: dict[str, str] = field(default_factory=dict)  # mode -> why the budget did not allow it

    @property
    def alone(self) -> tuple[float, ...] | None:
        """Every device's own samples/s; None unless all were run, since any of them may be the fastest."""
        found = [self.summaries.get(f"solo-{place}") for place in range(len(self.devices))]
        speeds = tuple(summary["samples_per_s"] for summary in found if summary is not None)
        return speeds if len(speeds) == len(self.devices) else None

    @property
    def disturbed(self) -> list[str]:
        """Modes whose figures are marked."""
        return [mode for mode, summary in self.summaries.items() if is_disturbed(summary)]

    @property
    def undisturbed_alone(self) -> tuple[float, ...] | None:
        """As `alone`, for what is derived from it; None where the run of a device alone was disturbed."""
        return None if any(mode.startswith("solo-") for mode in self.disturbed) else self.alone

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
        fast, everything = max(alone), sum(alone)
        text = (
            f"Together ({best}) {speeds[best] / fast:.2f}x your fast device, "
            f"~{100 * speeds[best] / everything:.0f} % of what you own; "
            f"ordinary DDP could reach at most {yardstick.ddp_over_fast(alone):.2f}x"
        )
        if REFERENCE in clean:
            text += f" (here it did {clean[REFERENCE] / fast:.2f}x)"
        return text + "."

    @property
    def caution(self) -> str | None:
        """Which figures allow no conclusion, where there are such."""
        if not self.disturbed:
            return None
        reasons = {mode: self.summaries[mode].get("interference", {}) for mode in self.disturbed}
        stolen = max((found.get("stolen_share") or 0.0 for found in reasons.values()), default=0.0)
        foreign = max((found.get("foreign_share") or 0.0 for found in reasons.values()), default=0.0)
        return (
            f"Disturbed: {', '.join(self.disturbed)} (up to {stolen:.0%} of the CPU time stolen, {foreign:.0%} of the "
            "cores used by other programs); nothing is concluded from these. Run it again on an idle machine."
        )

    @property
    def doubt(self) -> str | None:
        """Where undisturbed figures contradict each other all the same: not all interference can be seen."""
        alone = self.undisturbed_alone
        if alone is None:
            return None
        best = {row.mode: row.efficiency or 0.0 for row in self.rows if not row.is_disturbed}
        most, equal = max(best.values()), max(best.get(mode, 0.0) for mode in EQUAL_BATCHES)
        bound = yardstick.ddp_bound(alone)
        found, meant = yardstick.gap(alone), yardstick.gap([device.speed for device in parse_devices(self.devices)])
        if most > IMPOSSIBLE:
            what = f"~{100 * most:.0f} % of what you own cannot be"
        elif equal > IMPOSSIBLE * bound:
            what = f"equal batches reached ~{100 * equal:.0f} % of what you own where {100 * bound:.0f} % is the most"
        elif not 1 / FAR_OFF < found / meant < FAR_OFF:
            what = f"a gap of {found:.2f} was measured where {meant:.2f} is simulated"
        else:
            return None
        return f"Doubtful: {what}. Other programs may have had the cores; run it again when the machine is idle."

    def to_json(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "data": DATA,
            "devices": list(self.devices),
            "modes": [asdict(row) for row in self.rows],
            "measured": _measured(self.undisturbed_alone),
            "sentence": self.sentence,
            "doubt": self.doubt,
            "disturbed": self.disturbed,
            "failures": self.failures,
            "skipped": self.skipped,
            "missing": [mode for mode in self.modes if mode not in self.summaries],
        }


def check(order: DemoOrder) -> Results:
    """Refuse what cannot work before anything is trained; else empty results."""
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
    """What should be known before the figures are."""
    devices = parse_devices(order.devices)
    plan = assign_cores(devices, available_cores())
    lines = [f"{plan.note}; the figures below mean little"] if plan.note else []
    if any(device.speed < 1 for device in devices):
        lines.append("a device with @ is simulated: it sleeps after each step, so its speed is not exact")
    return lines


def threads(order: DemoOrder) -> int:
    """Of each device alone, as in `limit_threads`."""
    plan = assign_cores(parse_devices(order.devices), available_cores())
    return min(plan.threads) if plan.pinned else 0


def train_modes(
    order: DemoOrder,
    results: Results,
    tell: Callable[[str], None],
    train: Train | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Every mode in turn, into `results`, within the budget.

    A mode whose ranks fail is noted and passed over, as is one that the time left does not allow; any other error ends
    the demo.
    """
    train = train or _train
    end_s, shortest_s = clock() + order.budget_s, 0.0
    for number, mode in enumerate(results.modes, 1):
        place, modes_left = f"{number}/{len(results.modes)} {mode}", len(results.modes) - number
        began_s = clock()
        left_s = end_s - began_s
        # Twice the shortest mode so far is no sign of trouble.
        limit_s = max(MODE_SHARE * left_s, min(left_s, 2 * shortest_s)) if modes_left else left_s
        if left_s < shortest_s or left_s <= 0:
            results.skipped[mode] = f"the {order.budget_s:.0f} s of the demo are nearly spent"
            tell(f"{place} skipped: {results.skipped[mode]}")
            continue
        try:
            summary = results.summaries[mode] = train(order, mode, limit_s)
            took_s = clock() - began_s
            if order.repeats and is_disturbed(summary) and end_s - clock() >= (modes_left + 1) * took_s:
                tell(f"{place} was disturbed by other programs: measured again")
                summary = results.summaries[mode] = train(order, mode, limit_s)
        except StoppedError:
            if mode not in results.summaries:
                results.skipped[mode] = f"not finished after {limit_s:.0f} s, its part of the demo's time"
                tell(f"{place} given up: {results.skipped[mode]}")
                continue
        except RankError as error:
            results.failures[mode] = str(error)
            tell(f"{place} failed: {str(error).splitlines()[0]}")
            continue
        shortest_s = min(shortest_s or took_s, took_s)
        accuracy, seconds = 100 * summary["quality"][METRIC], summary["train_seconds"]
        tell(f"{place}: {accuracy:.2f} % right, {mark(f'{seconds:.1f} s', is_disturbed(summary))} of training")


def folder_of(order: DemoOrder, mode: str) -> Path:
    return order.out / MODEL / mode / f"seed-{order.seed}"


def _train(order: DemoOrder, mode: str, time_limit_s: float) -> Summary:
    from uneven.bench.single.run import Order, run_single
    from uneven.results.progress import bars_only

    # The lines of seven runs would bury the table.
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


def _chosen(asked: Sequence[str] | None, num_devices: int, devices: str) -> tuple[str, ...]:
    """In the order asked for, each once; by default what they are compared with comes first."""
    allowed = (*(f"solo-{place}" for place in range(num_devices)), REFERENCE, *OURS)
    if asked is None:
        return allowed
    for mode in asked:
        if mode not in allowed:
            raise InputError(f"--modes: {mode!r} is none of {', '.join(allowed)} (on {devices}); {NEXT}")
        resolve_mode(mode, devices)
    return tuple(dict.fromkeys(asked))


def _row(summary: Summary, num_devices: int, alone: Sequence[float] | None) -> ModeRow:
    mode, speed = summary["mode"], summary["samples_per_s"]
    shares = tuple(summary["sample_shares"])
    if mode.startswith("solo-"):
        shares = tuple(float(mode == f"solo-{place}") for place in range(num_devices))
    return ModeRow(
        mode,
        summary["quality"][METRIC],
        summary["train_seconds"],
        speed,
        speed / max(alone) if alone else None,
        speed / sum(alone) if alone else None,
        shares,
        is_disturbed(summary),
        summary.get("interference"),
    )


def _measured(alone: Sequence[float] | None) -> dict[str, float] | None:
    if alone is None:
        return None
    return {
        "gap": yardstick.gap(alone),
        "ddp_bound": yardstick.ddp_bound(alone),
        "ddp_over_fast": yardstick.ddp_over_fast(alone),
        "joint_over_fast": yardstick.joint_over_fast(alone),
    }
