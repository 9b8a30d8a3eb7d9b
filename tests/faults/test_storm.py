"""A storm of ten in the default suite, and the whole one with `-m soak`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.cases import POLICIES, draw_case
from tests.faults.storm import INCOMPLETE, storm

ROOT = Path(__file__).parents[2]


# Each policy and each fault two or three times, shards among them. What happens near the end of a run may come too late
# to be noticed, so none of these does.
NUMBERS = (1, 2, 3, 7, 8, 10, 16, 21, 23, 36)


def test_ten_small_runs_survive_and_nothing_is_lost(tmp_path: Path) -> None:
    """Every policy is hit; all that storm.py checks, but for the times. The soak has every pair many times."""
    cases = [draw_case(0, number, POLICIES, ("kill", "wake", "stop"), is_small=True) for number in NUMBERS]
    assert {(case.policy, case.kind) for case in cases} >= {(policy, "kill") for policy in POLICIES}
    found = storm(cases, tmp_path, jobs=2)
    wrong = [f"run {one.case.number}: {fault} ({one.case})" for one in found.outcomes for fault in one.faults]
    assert not wrong, "\n".join([*wrong, *(one.stacks for one in found.outcomes if one.stacks)])
    assert all(one.happened for one in found.outcomes)
    assert sum(bool(one.settled_s) for one in found.outcomes) >= 7


@pytest.mark.soak
@pytest.mark.timeout(10_000)
def test_soak_storm() -> None:
    command = [sys.executable, "-m", "tests.faults.storm", "--runs", "200", "--seed", "0"]
    command += ["--jobs", str(max(1, (os.cpu_count() or 1) // 2))]
    # Without root it leaves some kinds of faults out.
    assert subprocess.run(command, cwd=ROOT, check=False).returncode in (0, INCOMPLETE)
