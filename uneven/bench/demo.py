"""The demo: one small model in every mode on devices that do not match, and what the runs say when put side by side.

Which modes there are, the rows of the table and the sentence are arithmetic on the runs' summaries. Only
`train_modes` trains. Invariant: a figure that was not measured, or does not follow from what was, is None.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from uneven.bench.single.modes import PAIR, TOGETHER, resolve_mode
from uneven.errors import InputError, RankError
from uneven.hardware import yardstick
from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import parse_devices
from uneven.hardware.preflight import check_device

MODEL, DATA, METRIC = "lenet", "mnist-mini", "accuracy"
REFERENCE = "torch-ddp"
OURS = tuple(name for name in TOGETHER if name.startswith("cpu-"))  # every machine has these
EQUAL_BATCHES = (REFERENCE, "cpu-sync")
IMPOSSIBLE = 1.05  # more than devices can do together, and than runs of some seconds differ by chance
FAR_OFF = 1.25  # times the simulated gap: more than sleeping is inexact
NEXT = "run 'uneven demo --help'"

Summary = Mapping[str, Any]  # of one run, as bench/single.py writes it


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


@dataclass(frozen=True)
class Row:
    """One mode in the table. `efficiency` is an estimate: its speeds come from runs one after the other."""

    mode: str
    accuracy: float
    seconds: float  # of training, without start-up and evaluation
    samples_per_s: float
    speedup: float | None  # over the fast device alone
    efficiency: float | None  # of the sum of what the devices do alone
    shares: tuple[float, ...]  # of the samples, by device


@dataclass
class Results:
    """What is finished so far. Whatever ends the demo early, this stays."""

    devices: tuple[str, ...]
    modes: tuple[str, ...]
    summaries: dict[str, Summary] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # mode -> why

    @property
    def alone(self) -> tuple[float, ...] | None:
        """Every device's own samples/s; None unless all were run, since any of them may be the fastest."""
        found = [self.summaries.get(f"solo-{place}") for place in range(len(self.devices))]
        speeds = tuple(one["samples_per_s"] for one in found if one is not None)
        return speeds if len(speeds) == len(self.devices) else None

    @property
    def rows(self) -> list[Row]:
        alone = self.alone
        return [_row(summary, len(self.devices), alone) for summary in self.summaries.values()]

    @property
    def sentence(self) -> str | None:
        """What it all comes to; needs every device alone and one of our policies."""
        speeds = {mode: self.summaries[mode]["samples_per_s"] for mode in OURS if mode in self.summaries}
        if self.alone is None or not speeds:
            return None
        best = max(speeds, key=lambda mode: speeds[mode])
        fast, everything = max(self.alone), sum(self.alone)
        words = (
            f"Together ({best}) {speeds[best] / fast:.2f}x your fast device, "
            f"~{100 * speeds[best] / everything:.0f} % of what you own; "
            f"ordinary DDP could reach at most {yardstick.ddp_over_fast(self.alone):.2f}x"
        )
        if REFERENCE in self.summaries:
            words += f" (here it did {self.summaries[REFERENCE]['samples_per_s'] / fast:.2f}x)"
        return words + "."

    @property
    def doubt(self) -> str | None:
        """Said where the figures contradict themselves: a demo on a busy machine shows the other programs."""
        if self.alone is None:
            return None
        best = {row.mode: row.efficiency or 0.0 for row in self.rows}
        most, equal = max(best.values()), max(best.get(mode, 0.0) for mode in EQUAL_BATCHES)
        bound = yardstick.ddp_bound(self.alone)
        found, meant = yardstick.gap(self.alone), yardstick.gap([one.speed for one in parse_devices(self.devices)])
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
            "measured": _measured(self.alone),
            "sentence": self.sentence,
            "doubt": self.doubt,
            "failures": self.failures,
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
    said = [f"{plan.note}; the figures below mean little"] if plan.note else []
    if any(device.speed < 1 for device in devices):
        said.append("a device with @ is simulated: it sleeps after each step, so its speed is not exact")
    return said


def threads(order: DemoOrder) -> int:
    """Of each device alone, as in `tell_threads`."""
    plan = assign_cores(parse_devices(order.devices), available_cores())
    return min(plan.threads) if plan.pinned else 0


def train_modes(
    order: DemoOrder, results: Results, tell: Callable[[str], None], train: Callable[..., Summary] | None = None
) -> None:
    """Every mode in turn, into `results`. A mode whose ranks fail is noted and passed over; anything else ends it."""
    train = train or _train
    for number, mode in enumerate(results.modes, 1):
        place = f"{number}/{len(results.modes)} {mode}"
        try:
            summary = results.summaries[mode] = train(order, mode)
        except RankError as error:
            results.failures[mode] = str(error)
            tell(f"{place} failed: {str(error).splitlines()[0]}")
            continue
        tell(f"{place}: {100 * summary['quality'][METRIC]:.2f} % right, {summary['train_seconds']:.1f} s of training")


def folder_of(order: DemoOrder, mode: str) -> Path:
    return order.out / MODEL / mode / f"seed-{order.seed}"


def _train(order: DemoOrder, mode: str) -> Summary:
    from uneven.bench.single.run import Order, run_single
    from uneven.results.progress import bars_only

    # Seven resolved configurations and twenty epochs in words would bury the table.
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


def _row(summary: Summary, num_devices: int, alone: Sequence[float] | None) -> Row:
    mode, speed = summary["mode"], summary["samples_per_s"]
    shares = tuple(summary["sample_shares"])
    if mode.startswith("solo-"):
        shares = tuple(float(mode == f"solo-{place}") for place in range(num_devices))
    return Row(
        mode,
        summary["quality"][METRIC],
        summary["train_seconds"],
        speed,
        speed / max(alone) if alone else None,
        speed / sum(alone) if alone else None,
        shares,
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
