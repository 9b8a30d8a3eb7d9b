import os

import pytest

from uneven.bench.process import Ended, flags, run_uneven


def test_settings_become_options() -> None:
    assert flags({"batch_size": 8, "data": None, "out": "runs"}) == ["--batch-size", "8", "--out", "runs"]


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("Traceback ...\nuneven: rank 1 was killed\nsome library's farewell\n", "rank 1 was killed"),
        ("Traceback ...\nKeyError: 'x'\n\n", "KeyError: 'x'"),
        ("", "ended with exit code 9 and no word"),
    ],
)
def test_the_last_words_are_our_own_if_there_are_any(stderr: str, words: str) -> None:
    assert Ended(9, "", stderr).last_words == words


def test_a_command_runs_in_a_process_of_its_own_on_the_cores_given() -> None:
    ended = run_uneven(["--version"], sorted(os.sched_getaffinity(0))[:1])
    assert ended.code == 0
    assert ended.stdout.startswith("uneven ")
    assert run_uneven(["bench", "report", "nowhere"]).last_words.startswith("there is no folder nowhere")
