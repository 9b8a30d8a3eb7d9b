"""Randomized fault runs: `python -m tests.faults.storm --runs 200 --seed 0`. Exit code 0 only if all of them are right.

Each run is a real training in rank processes, to which faults happen at random moments of its progress (cases.py);
afterwards what it left is judged (checks.py). A run is repeated by its seed and number: `--seed 0 --only 17`. Runs on
several machines need network namespaces, a full disk needs a mount: where the system permits neither (no root), the
storm says what it leaves out, and draws other cases. Exit codes: 0 all right, 1 not, 4 right as far as it was made.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many runs as cores: threads of torch would wait for each other

from tests import forked
from tests.faults.cases import FAULTS, NEEDS_MACHINES, NEEDS_MOUNT, POLICIES, Case, draw_case
from tests.faults.checks import Outcome, judge
from tests.faults.one_run import run_case
from tests.faults.places import why_left_out

INCOMPLETE = 4  # the exit code of a storm without a fault that was not made as a whole
LIMIT_MEDIAN_S, LIMIT_S = 1.0, 5.0  # settled, from detection


@dataclass(frozen=True)
class Storm:
    """The outcomes of all runs."""

    outcomes: Sequence[Outcome]

    @property
    def faults(self) -> list[str]:
        """What is wrong with the runs, and with their times as a whole."""
        found = [
            f"seed {one.case.seed} run {one.case.number}: {fault} ({one.case})"
            for one in self.outcomes
            for fault in one.faults
        ]
        times = [time for one in self.outcomes for time in one.settled_s]
        if times and max(times) > LIMIT_S:
            found.append(f"one run settled in {max(times):.1f} s, more than {LIMIT_S:g} s")
        if len(times) > 9 and median(times) > LIMIT_MEDIAN_S:
            found.append(
                f"half of the runs settled in more than {median(times):.1f} s, the limit is {LIMIT_MEDIAN_S:g} s"
            )
        return found

    def table(self) -> str:
        heads = (
            "policy",
            "fault",
            "runs",
            "faults",
            "ended",
            "in words",
            "hangs",
            "lost",
            "doubled",
            "unequal",
            "distance",
            "settle s",
            "again",
            "joins",
            "s",
        )
        rows = [heads, *(self._row(policy, kind) for policy in POLICIES for kind in FAULTS if self._of(policy, kind))]
        rows.append(self._row(None, None))
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def _of(self, policy: str | None, kind: str | None) -> list[Outcome]:
        return [
            one
            for one in self.outcomes
            if (policy is None or one.case.policy == policy) and (kind is None or one.case.kind == kind)
        ]

    def _row(self, policy: str | None, kind: str | None) -> tuple[str, ...]:
        found = self._of(policy, kind)
        times = [time for one in found for time in one.settled_s]
        distances = [one.distance for one in found if one.distance is not None]
        return (
            policy or "all",
            kind or "",
            str(len(found)),
            str(sum(one.happened for one in found)),
            str(sum(one.ended for one in found)),
            str(sum(one.in_words for one in found)),
            str(sum(one.hung for one in found)),
            str(sum(one.lost for one in found)),
            str(sum(one.doubled for one in found)),
            str(sum(one.unequal for one in found)),
            f"{max(distances):.0e}" if distances else "",
            f"{median(times):.2f}/{max(times):.2f}" if times else "",
            str(sum(one.again for one in found if one.ended)),
            str(sum(one.joined for one in found)),
            f"{sum(one.seconds for one in found):.0f}",
        )

    def to_json(self) -> dict[str, object]:
        return {"runs": [one.to_json() for one in self.outcomes], "faults": self.faults}


def storm(
    cases: Sequence[Case],
    home: Path,
    jobs: int = 1,
    show: Callable[[Outcome], None] = lambda _: None,
    end_s: float | None = None,
) -> Storm:
    """Run all cases, so many at once; the folders of those that went wrong stay in `home`.

    After `end_s` (of time.monotonic) no further one is started.
    """

    def one(case: Case) -> Outcome | None:
        if end_s is not None and time.monotonic() > end_s:
            return None
        folder = home / f"run-{case.number}"
        try:
            outcome = judge(run_case(case, folder))
        except Exception:  # of the storm itself: the other runs count
            outcome = Outcome(case, faults=[f"the storm failed: {traceback.format_exc()}"])
        if outcome.is_right:
            rmtree(folder, ignore_errors=True)
        show(outcome)
        return outcome

    made: list[Outcome | None] = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, case) for case in cases]
        try:
            made.extend(future.result() for future in as_completed(futures))
        except KeyboardInterrupt:  # those that are on are waited for, and what is known is told
            pool.shutdown(wait=False, cancel_futures=True)
            made = [future.result() for future in futures if not future.cancelled()]
    return Storm(sorted((one for one in made if one is not None), key=lambda one: one.case.number))


def _names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or set(names) - set(known):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are {', '.join(known)}")
    return names


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.storm", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run: for a storm in pieces")
    parser.add_argument("--only", type=int, action="append", help="only the run of this number; may be repeated")
    parser.add_argument("--minutes", type=float, help="start no further run after this time")
    parser.add_argument("--policies", type=lambda text: _names(text, POLICIES), default=POLICIES)
    parser.add_argument("--faults", type=lambda text: _names(text, FAULTS), default=FAULTS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument(
        "--small", action="store_true", help="as in the default suite: 2 or 3 ranks, one fault, a second"
    )
    parser.add_argument("--keep", type=Path, help="folder for the runs that went wrong; otherwise a temporary one")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = parser.parse_args(words)
    if given.runs < 1 or given.jobs < 1 or given.seed < 0:
        parser.error("--runs and --jobs are at least 1, --seed at least 0")
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = _parse(words)
    subprocess.Popen = forked.PackagePopen  # type: ignore[misc]  # ranks are forked, as in the tests
    home = (given.keep or Path(tempfile.mkdtemp(prefix="storm-"))).resolve()
    numbers = given.only or range(given.first, given.first + given.runs)
    left_out = why_left_out()
    missing = (NEEDS_MACHINES if "machines" in left_out else ()) + (NEEDS_MOUNT if "full" in left_out else ())
    kinds = [kind for kind in given.faults if kind not in missing]
    for what, why in left_out.items():
        print(f"left out here: {what} ({why})", file=sys.stderr, flush=True)
    draw = partial(draw_case, is_small=given.small, has_machines="machines" not in left_out)
    cases = [draw(given.seed, number, given.policies, kinds) for number in numbers]
    count = itertools.count(1)

    def show(one: Outcome) -> None:
        verdict = "right" if one.is_right else "; ".join(one.faults)
        settled = " ".join(f"{time:.2f}" for time in one.settled_s)
        place = f"[{next(count)}/{len(cases)}] {one.case.number}: {one.case.kind}: {one.case}"
        print(f"{place}: {verdict} [{settled}] {one.seconds:.1f} s", file=sys.stderr, flush=True)
        if one.stacks:
            print(one.stacks, file=sys.stderr, flush=True)

    end_s = None if given.minutes is None else time.monotonic() + 60.0 * given.minutes
    try:
        found = storm(cases, home, given.jobs, show, end_s)
    finally:
        forked.close_server()
    made = len(found.outcomes)
    summary = [*found.faults, *(f"left out here: {what} ({why})" for what, why in left_out.items())]
    if made < len(cases):
        summary.append(f"{made} of {len(cases)} runs were made")
    if given.json:
        more = {"left_out": left_out, "asked": len(cases), "made": made}
        print(json.dumps({**found.to_json(), **more}))
    else:
        print(found.table())
        print("\n".join(summary) or f"all {made} runs are right")
    if found.faults:
        print(f"the folders of those that went wrong are in {home}", file=sys.stderr)
        return 1
    if given.keep is None:
        rmtree(home, ignore_errors=True)
    return INCOMPLETE if summary else 0


if __name__ == "__main__":
    sys.exit(main())
