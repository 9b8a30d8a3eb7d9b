"""What faults cost a run, in speed and in quality, on CPU ranks of this machine.

`python tools/fault_cost.py speed --minutes 3 --every 30`: three ranks, one of them killed every 30 s and started again.
Prints the run's samples/s over what those ranks that are there would train alone, summed over time; and the same of a
run without kills. The speed of one alone is measured before and after, on as many cores as one of the three has.

`python tools/fault_cost.py quality --seeds 0,1,2,3,4`: LeNet on MNIST, each seed undisturbed and with five kills, each
followed by a join. Prints the test accuracy of each run.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from uneven import Callback, CallbackInfo, TrainedState, fit
from uneven.bench.chaos.inject import Injector, rank_processes
from uneven.bench.models.mnist import LENET as RECIPE
from uneven.bench.models.sets import load_set
from uneven.timeline.timeline import Lane

POLL_S = 0.05
RANKS, KILLS = 3, 5


class Mark(Callback):
    """A rank says that it trains, by a file with the name of its process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_marked = folder, False

    def on_step(self, _: CallbackInfo) -> None:
        if not self._is_marked:
            (self._folder / str(os.getpid())).touch()
            self._is_marked = True


class Killer(threading.Thread):
    """Kills a rank that trains whenever `every_s` have passed and all of them are there; `most` times."""

    def __init__(self, folder: Path, every_s: float, most: int, spared: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._every_s, self._most, self._spared = folder, every_s, most, spared
        self._random = random.Random(seed)
        self._is_over = threading.Event()
        self.kills = 0

    def run(self) -> None:
        since, first = None, None
        while not self._is_over.wait(POLL_S):
            ranks = self._ranks()
            there = [pid for pid in ranks if (self._folder / str(pid)).exists()]
            if len(there) < RANKS:
                continue
            first = first or sorted(there)[: self._spared]
            since = since or time.monotonic()
            if self.kills < self._most and time.monotonic() - since >= self._every_s:
                victim = self._random.choice([pid for pid in there if pid not in first])
                self.kills += Injector().do("kill", ranks[victim])
                since += self._every_s

    def _ranks(self) -> dict[int, psutil.Process]:
        """Rank processes that this process has started, by pid."""
        return {process.pid: process for process, _ in rank_processes(os.getpid(), recursive=True).values()}

    def end(self) -> None:
        self._is_over.set()
        self.join()


@contextmanager
def cores(count: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def train(data: str, policy: str, epochs: int, seed: int, mark: Mark | None = None, **settings: Any) -> TrainedState:
    sets = load_set(data)
    return fit(
        model=RECIPE.make_model,
        optimizer=RECIPE.make_optimizer,
        step=RECIPE.train_step,
        dataset=sets.train,
        evaluate=(sets.test, RECIPE.eval_step),
        eval_every=epochs,
        batch_size=RECIPE.batch_size,
        epochs=epochs,
        seed=seed,
        policy=policy,  # type: ignore[arg-type]
        progress="off",
        callbacks=[mark] if mark else [],
        **settings,
    )


def disturbed(data: str, policy: str, epochs: int, seed: int, every_s: float, most: int, spared: int) -> TrainedState:
    """With kills, each of which is followed by a join before the next."""
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(Path(folder), every_s, most, spared, seed)
        killer.start()
        try:
            state = train(
                data, policy, epochs, seed, Mark(Path(folder)), devices=",".join(["cpu"] * RANKS), restarts=most
            )
        finally:
            killer.end()
    print(f"  {killer.kills} kills, {len(state.segments) - 1} changes of ranks", file=sys.stderr, flush=True)
    return state


def longest_lane(state: TrainedState) -> Lane:
    assert state.timeline is not None
    return max(state.timeline.lanes, key=lambda lane: lane.spans[-1][2] - lane.spans[0][1])


def generations(state: TrainedState) -> list[tuple[float, int]]:
    """(when it began to settle in s, its ranks), as the rank that was there longest has recorded them."""
    lane = longest_lane(state)
    assert state.timeline is not None
    events = [event for event in state.timeline.events if event.kind == "generation" and event.rank == lane.rank]
    return [((event.t_ns / 1e6 - event.fields["ms"]) / 1e3, event.fields["ranks"]) for event in events]


def speed_of(state: TrainedState) -> tuple[float, float]:
    """(samples/s, ranks that were there on average) from the first step to the last."""
    computing = [(a, b) for name, a, b in longest_lane(state).spans if name == "compute"]
    begin, end = computing[0][0] / 1e9, computing[-1][1] / 1e9
    changes = [(begin, len(state.config["devices"].split(","))), *generations(state)]
    bounds = [*changes, (end, 0)]
    there = sum((after - when) * ranks for (when, ranks), (after, _) in pairwise(bounds))
    return state.samples / (end - begin), there / (end - begin)


def speed(given: argparse.Namespace) -> None:
    def alone() -> float:
        torch.set_num_threads(given.cores)  # one rank is this process, whose threads torch has chosen by then
        with cores(given.cores):
            return speed_of(train(given.data, "sync", 1, 0, devices="cpu"))[0]

    samples = len(load_set(given.data).train)
    rough = alone()
    for policy in given.policies.split(","):
        with cores(RANKS * given.cores):
            epochs = max(1, round(rough * (RANKS - 0.3) * given.minutes * 60 / samples))
            before = alone()
            joint, there = speed_of(disturbed(given.data, policy, epochs, 0, given.every, 1000, spared=1))
            after = alone()
            calm, _ = speed_of(train(given.data, policy, max(1, epochs // 3), 0, devices=",".join(["cpu"] * RANKS)))
        solo = (before + after) / 2
        row = {"policy": policy, "solo": [before, after], "joint": joint, "ranks": there}
        row |= {"efficiency": joint / (solo * there), "undisturbed": calm / (solo * RANKS)}
        print(json.dumps(row), flush=True)


def quality(given: argparse.Namespace) -> None:
    rows = []
    for seed in (int(seed) for seed in given.seeds.split(",")):
        for policy in given.policies.split(","):
            with cores(RANKS * given.cores):
                calm = train(given.data, policy, given.epochs, seed, devices=",".join(["cpu"] * RANKS))
                faulty = disturbed(given.data, policy, given.epochs, seed, given.every, KILLS, spared=0)
            ranks = [len(segment["devices"]) for segment in faulty.segments]
            if ranks != [RANKS, *[RANKS - 1, RANKS] * KILLS]:
                raise SystemExit(
                    f"the run was too short for {KILLS} kills and joins ({ranks}); --epochs makes it longer"
                )
            undisturbed, with_faults = (state.history[-1]["accuracy"] for state in (calm, faulty))
            row = {"policy": policy, "seed": seed, "undisturbed": undisturbed, "with_faults": with_faults}
            rows.append(row)
            print(json.dumps(row), flush=True)
    for policy in given.policies.split(","):
        own = [row for row in rows if row["policy"] == policy]
        means = {name: statistics.mean(row[name] for row in own) for name in ("undisturbed", "with_faults")}
        print(f"{policy}: undisturbed {means['undisturbed']:.4f}, with faults {means['with_faults']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "quality"])
    parser.add_argument("--policies", default="balanced,cadence,async")
    parser.add_argument("--data", default="mnist", help="a set of 28x28 images (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each disturbed run (speed)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between kills")
    parser.add_argument("--cores", type=int, default=1, help="of each rank (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="(quality)")
    parser.add_argument("--epochs", type=int, default=10, help="(quality)")
    given = parser.parse_args()
    speed(given) if given.what == "speed" else quality(given)


if __name__ == "__main__":
    main()
