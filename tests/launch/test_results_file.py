"""The file by which `uneven run --json` learns what was trained."""

import json
import os
from pathlib import Path

from uneven.launch.cleanup import end_all_runs
from uneven.launch.results_file import VARIABLE, collected_results


def test_results_are_read_at_the_end_and_the_folder_goes() -> None:
    with collected_results() as results:
        path = Path(os.environ[VARIABLE])
        path.write_text(json.dumps({"steps": 3}) + "\n")
        assert results == []
    assert results == [{"steps": 3}]
    assert VARIABLE not in os.environ
    assert not path.parent.exists()


def test_a_second_signal_leaves_no_folder() -> None:
    """It ends the process after `end_all_runs`; the folder of results stayed."""
    with collected_results() as results:
        path = Path(os.environ[VARIABLE])
        path.write_text("{}\n")
        end_all_runs()
        assert not path.parent.exists()
    assert results == []
