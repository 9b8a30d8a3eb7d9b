"""Machines that do not fit together end with exit code 1 on all sides, with the host and the fix, in under ten seconds.

`python -m tests.network.refusals` prints the seconds of each.
"""

from pathlib import Path

import pytest

from tests.network.namespaces import needs_namespaces
from tests.network.refusals import BY_NAME, DOOR, SLURM, UNDER_SLURM, run_case

pytestmark = [needs_namespaces, pytest.mark.soak]
LIMIT_S = 10.0


@pytest.mark.parametrize(
    ("launcher", "name"), [*((DOOR, name) for name in BY_NAME), *((SLURM, name) for name in UNDER_SLURM)]
)
def test_all_machines_refuse_in_time(tmp_path: Path, launcher: str, name: str) -> None:
    case = BY_NAME[name]
    ended = run_case(case, launcher, tmp_path)
    assert ended.codes == [1] * case.machines, ended.outputs
    assert max(ended.seconds) < LIMIT_S, ended.seconds
    assert ended.left == [[]] * case.machines
    for number, output in enumerate(ended.outputs):
        expected = case.leader_words if number == 0 and case.leader_words and launcher == DOOR else case.words
        assert all(word in output for word in expected), output
        assert "Traceback" not in output
        assert "a-token-of-the-tests" not in output
