"""Runs that are stopped by Ctrl-C and SIGTERM, and resumed: a whole checkpoint with every rank's part, exactly once."""

import json
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults import REHEARSED, STARTS
from tests.resumable import LOCAL, POLICIES, Session, finished_once, newest_slot
from uneven.results.checkpoint import Checkpoint, read_checkpoint
from uneven.results.checkpoint_folders import find_checkpoints

SLOW = {"pause": 0.01, "crawl": 30}


def stopped_at(session: Session, ranks: int = 2) -> Checkpoint:
    """The checkpoint that a stopped run has written, with every rank's part."""
    found = re.search(r"stopped after ([\d,]+) steps?", session.said())
    assert found is not None, session.said()
    checkpoint = read_checkpoint(find_checkpoints(session.out)[0])
    record = checkpoint.record
    assert record["ledger"]["trained"] == int(found[1].replace(",", "")) == newest_slot(session.out)
    assert checkpoint.folder.name == f"step-{record['ledger']['trained']}"
    assert (record["world_size"], len(checkpoint.ranks)) == (ranks, ranks)
    assert not list(session.out.glob(".step-*"))
    return checkpoint


@pytest.mark.parametrize(
    ("number", "command", "options"),
    [
        (signal.SIGINT, STARTS["plain"], {"devices": "cpu,cpu", **LOCAL, "policy": "async"}),
        (signal.SIGTERM, STARTS["uneven run"], {"how": "loop", **LOCAL, "policy": "cadence"}),
    ],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_stopped_run_leaves_gaps_and_finishes_exactly_once(
    tmp_path: Path, number: int, command: Any, options: dict[str, Any]
) -> None:
    session = Session(tmp_path, command, **SLOW, **options)
    assert session.wait_for(lambda: session.steps() > 2 * REHEARSED + 9)
    code = session.signal(number)
    assert code in ((130, -2) if number == signal.SIGINT else (143,)), session.said()
    assert "Traceback" not in session.said() or number == signal.SIGINT
    checkpoint = stopped_at(session)
    assert checkpoint.record["cause"] == "stop"
    session = Session(tmp_path, command, **options)
    session.finish()
    assert session.resumed_at() == checkpoint.record["ledger"]["trained"]
    finished_once(session.out)
    log = json.loads((session.out / "log.json").read_text())
    assert [segment["slot"] for segment in log["segments"]] == [0, session.resumed_at()]


GRACE_S = 20.0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", STARTS)
def test_soak_sigterm_at_random_moments_and_resumed_every_time(tmp_path: Path, name: str) -> None:
    """A run that is stopped 20 times: what it had trained at each stop is in the next one's checkpoint."""
    moments, stops, times, newest = random.Random(name), 0, [], 0
    policy = moments.choice(["sync", "balanced by speed", "cadence by speed", "async"])
    options = {**POLICIES[policy], "epochs": 400, "grace": GRACE_S, "save_every": "40 steps", "keep_last": 2}
    options |= {"how": "fit", "devices": "cpu,cpu"} if name == "plain" else {"how": moments.choice(["fit", "loop"])}
    for _ in range(20):
        session = Session(tmp_path, STARTS[name], **SLOW, **options)
        wanted, delay_s = moments.choice([0, 1, 20, 40, 60]), moments.uniform(0.0, 1.0)
        assert session.wait_for(lambda: session.steps() >= wanted), session.said()  # noqa: B023
        time.sleep(delay_s)  # a moment of the scheduler's choice
        began = time.monotonic()
        code = session.signal(signal.SIGTERM, to_all=moments.random() < 0.5)
        times.append(time.monotonic() - began)
        codes = (130, 143, -signal.SIGTERM, *((1,) if name == "torchrun" else ()))  # 1 is the agent's own
        assert code in codes, session.said()
        assert (resumed := session.resumed_at()) in (None, newest), session.said()
        if "stopped after" in session.said():
            stops += 1
            newest = stopped_at(session).record["ledger"]["trained"]
            assert newest >= (resumed or 0)
        else:
            assert newest_slot(session.out) == newest, f"{code} {session.said()}"
    session = Session(tmp_path, STARTS[name], **options)
    session.finish()
    assert session.resumed_at() == newest
    finished_once(session.out, epochs=400)
    print(f"\n{name}, {policy}: {stops} of 20 had begun and saved; {' '.join(f'{one:.1f}' for one in times)} s")
    assert max(times) <= GRACE_S + 5.0
    assert stops > 0


@pytest.mark.soak
def test_workers_that_torchrun_restarts_go_on_where_they_were(tmp_path: Path) -> None:
    torchrun, *rest = STARTS["torchrun"]
    command = (torchrun, "--max-restarts", "2", *rest)
    options = {**POLICIES["sync"], "save_every": "4 steps", "pause": 0.01}
    session = Session(tmp_path, command, **options, epochs=20)
    assert session.wait_for(lambda: newest_slot(session.out) >= 8), session.said()
    session.family()[-1].kill()
    session.finish()
    assert (session.resumed_at() or 0) >= 8
    finished_once(session.out, epochs=20)
