"""Runs that are killed over and over, and always go on from a whole checkpoint: exactly once, and bit by bit."""

import json
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults import REHEARSED
from tests.resumable import (
    BIT_EQUAL,
    EPOCHS,
    MEASURED,
    POLICIES,
    Session,
    assert_equal,
    finished_once,
    newest_slot,
    shared_folders,
)
from uneven import TrainedState

EVERY = 4  # slots from one checkpoint to the next
KEPT = {"save_every": f"{EVERY} steps", "keep_last": 3}


def hold(ranks: int) -> int:
    """A rank's step, far enough for two checkpoints; several ranks may measure beforehand."""
    return 9 if ranks == 1 else 9 + REHEARSED


def has_files(folder: Path, wanted: int) -> bool:
    """Whether a checkpoint that is being written has that many; not where it was renamed meanwhile."""
    with suppress(FileNotFoundError):
        return len(os.listdir(folder)) >= wanted
    return False


def kill_at_some_moment(session: Session, moments: random.Random, ranks: int) -> bool:
    """Wait for a moment and kill the whole run; whether it still ran."""
    kind = moments.choice(["starting", "training", "training", "saving", "saving", "saved"])
    before = {path.name for path in session.out.glob("step-*")}

    def saved() -> int:
        return sum(path.name not in before for path in session.out.glob("step-*"))

    if kind == "starting":
        wanted = moments.randrange(3)  # processes
        runs = session.wait_for(lambda: len(session.family()) > 1 + wanted or session.steps() > 0)
    elif kind == "training":
        wanted = moments.randrange(1, ranks * hold(ranks))
        runs = session.wait_for(lambda: session.steps() >= wanted)
    elif kind == "saving":
        first, wanted = moments.randrange(2), moments.randrange(6)  # checkpoints before it, and files in it
        runs = session.wait_for(
            lambda: saved() >= first and any(has_files(path, wanted) for path in session.out.glob(".step-*.partial-*"))
        )
    else:
        wanted = moments.randrange(1, 3)
        runs = session.wait_for(lambda: saved() >= wanted)
    if runs:
        session.kill(moments)
    return runs


def train_and_kill(folder: Path, kills: int, moments: random.Random, **options: Any) -> list[int]:
    """Kill a run so many times and let it finish; returns the slots at which its sessions went on."""
    folder.mkdir()
    pids, resumed, newest, ranks = [], [], 0, len(options["devices"].split(","))
    for _ in range(kills):
        session = Session(folder, **KEPT, pause=0.004, hold=hold(ranks), **options)
        pids.append(session.pid)
        assert kill_at_some_moment(session, moments, ranks), session.said()
        if (slot := session.resumed_at()) is not None:  # it had come so far
            resumed.append(slot)
            assert slot == newest, session.said()
        before, newest = newest, newest_slot(session.out)
        assert before <= newest <= before + session.steps()
    session = Session(folder, **KEPT, **options)
    session.finish()
    assert session.resumed_at() == newest, session.said()
    assert not shared_folders(pids)
    return [*resumed, newest]


def check(folder: Path, kills: int, seed: int, wanted: TrainedState | None = None, **options: Any) -> None:
    """The run that is killed is trained exactly once and, where it can be compared, bit by bit as one that is not."""
    epochs = options.get("epochs", EPOCHS)
    resumed = train_and_kill(folder, kills, random.Random(seed), **options)
    state = finished_once(folder / "run", epochs=epochs)
    log = json.loads((folder / "run" / "log.json").read_text())
    slots = [segment["slot"] for segment in log["segments"]]
    assert slots == sorted(slots)
    assert set(slots) <= {0, *resumed}
    assert slots[-1] == resumed[-1]
    if wanted is not None:
        assert_equal(state, wanted)
        assert log["saves"] == sorted({*range(EVERY, state.slot, EVERY), state.slot})
    print(f"\n{options.get('policy', 'one device')}: went on at {resumed}")


def whole_run(folder: Path, **options: Any) -> TrainedState:
    folder.mkdir()
    Session(folder, **KEPT, **options).finish()
    return finished_once(folder / "run", epochs=options.get("epochs", EPOCHS))


ONE = {"devices": "cpu", "batch_size": 8}


@pytest.mark.parametrize(
    ("seed", "options"),  # the first of two kills comes while it starts, saves, trains
    [
        (2, ONE),
        (0, {"devices": "cpu,cpu", **BIT_EQUAL["sync"]}),
        (1, {"devices": "cpu,cpu", **BIT_EQUAL["cadence"]}),
    ],
    ids=["one device", "sync", "cadence"],
)
def test_a_killed_run_goes_on_from_its_newest_checkpoint_bit_by_bit(
    tmp_path: Path, seed: int, options: dict[str, Any]
) -> None:
    check(tmp_path / "killed", 2, seed, whole_run(tmp_path / "whole", **options), **options)


SOAK = [("one device", 10), *((name, 10) for name in BIT_EQUAL), *((name, 20) for name in MEASURED)]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "kills"), SOAK)
def test_soak_killed_at_random_moments(tmp_path: Path, name: str, kills: int) -> None:
    """100 kills in all, 40 of them in runs that are compared with one that was not killed."""
    options = {**({"devices": "cpu,cpu", **POLICIES[name]} if name in POLICIES else ONE), "epochs": 4 * kills}
    wanted = None if name in MEASURED else whole_run(tmp_path / "whole", **options)
    check(tmp_path / "killed", kills, 1, wanted, **options)
