"""How many digits each mode of the demo trains: all of them, or on a slow machine fewer, so that no mode is missing.

Called by cli/demo.py before the modes. A few steps on each device alone tell its speed, and so about how long every
mode takes. A demo without ours beside PyTorch's DDP shows nothing, while fewer digits show the same speeds.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from uneven.bench import demo
from uneven.bench.demo import EQUAL_BATCHES, DemoOrder, Results, Train
from uneven.errors import InputError, MachineError, RankError, StoppedError
from uneven.format import format_count

DIGITS = 10_000  # in the package
TRIED = 640  # digits on each device, to see how fast it is
LEAST = 1_280  # in each epoch: before there are fewer, there are fewer epochs
PLANNED = 0.8  # the part of the budget that is planned for: no estimate is exact, and a disturbed mode is repeated
RANKS = 1.3  # times the first try for a start of ranks: like that, they load torch, and also meet
TRIED_SHARE = 0.1  # the part of the budget that one device may be tried for


def fit_length(
    order: DemoOrder,
    results: Results,
    train: Train | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> DemoOrder:
    """The order with as many digits as all modes have time for, and the time left; `results.shortened` says so."""
    train = train or demo._train
    digits = min(order.samples or DIGITS, DIGITS)
    if digits <= LEAST:
        return order
    began_s = clock()
    speeds, around_s = [], []  # samples/s of each device, and the seconds around its training
    with tempfile.TemporaryDirectory(prefix="uneven-demo-") as folder:
        short = replace(order, samples=TRIED, epochs=1, out=Path(folder), progress="off")
        for place in range(len(results.devices)):
            before_s = clock()
            try:
                summary = train(short, f"solo-{place}", TRIED_SHARE * order.budget_s)
                speeds.append(float(summary["samples_per_s"]))
                around_s.append(max(0.0, clock() - before_s - float(summary["train_seconds"])))
            except StoppedError:
                speeds.append(TRIED / (TRIED_SHARE * order.budget_s))
                around_s.append(0.0)
            except (RankError, InputError, MachineError):
                return order  # its mode fails, too, and says why
    left_s = order.budget_s - (clock() - began_s)
    starts_s = sum(around_s[-1] if mode.startswith("solo-") else RANKS * around_s[0] for mode in results.modes)
    per_sample_s = sum(_seconds_per_sample(mode, speeds) for mode in results.modes)
    fitting = max(0, int((PLANNED * left_s - starts_s) / per_sample_s))
    order = replace(order, budget_s=max(0.0, left_s))
    if fitting >= order.epochs * digits:
        return order
    epochs = min(order.epochs, max(1, fitting // LEAST))
    samples = min(digits, max(LEAST, fitting // epochs // TRIED * TRIED))
    results.shortened = (
        f"this machine is slow or busy: {samples:,} of {digits:,} digits and {epochs} of "
        f"{format_count(order.epochs, 'epoch')} in each mode, so that all modes have time; --minutes gives them more"
    )
    return replace(order, samples=samples, epochs=epochs)


def _seconds_per_sample(mode: str, speeds: Sequence[float]) -> float:
    """Of one of all samples of a mode, by the speeds of the devices alone."""
    if mode.startswith("solo-"):
        return 1 / speeds[int(mode.removeprefix("solo-"))]
    if mode in EQUAL_BATCHES:
        return 1 / (len(speeds) * min(speeds))
    return 1 / sum(speeds)
