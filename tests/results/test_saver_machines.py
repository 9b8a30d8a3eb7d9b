"""Savers of ranks on another machine: their parts come through the leader, and their failures are told to rank 0."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines.plain_door import PlainDoor, plain_door
from tests.results.checkpoints import make_part, make_whole
from uneven.machines.file_service import FileService
from uneven.machines.transfer import LeaderFiles
from uneven.results import saver as module
from uneven.results.checkpoint import RankPart, read_checkpoint
from uneven.results.saver import Saver, Take

PLACES = ("rank 0 on lab-a", "rank 1 on lab-b")


@pytest.fixture
def door(tmp_path: Path) -> Iterator[PlainDoor]:
    with plain_door() as door:
        (tmp_path / "a").mkdir()
        door.reach(tmp_path / "a0").share("word", tmp_path / "a", places=PLACES)
        yield door


def make_savers(door: PlainDoor, home: Path, deadline_s: float = 60.0) -> tuple[Saver, Saver]:
    leader: LeaderFiles = door.reach(home / "b")
    return (
        Saver(0, 2, "word", deadline_s, places=PLACES),
        Saver(1, 2, "word", places=PLACES, leader=leader),
    )


def taking(rank: int) -> Take:
    return lambda: (make_part(rank), make_whole(4) if rank == 0 else None)


def save(savers: tuple[Saver, Saver], folder: Path, elsewhere: Path) -> None:
    """Rank 1 has another path, of which only the name counts."""
    for rank, saver in enumerate(savers):
        saver.start((folder if rank == 0 else elsewhere) / "step-4", taking(rank))
    for saver in savers:
        saver.finish()


def close(savers: tuple[Saver, Saver], home: Path) -> None:
    """Nothing half-written stays on either side."""
    for saver in savers:
        saver.close()
    (scratch,) = (home / "b").iterdir()
    assert list(scratch.iterdir()) == []
    assert not (home / "not here").exists()


def test_a_part_from_another_machine_is_in_the_checkpoint(door: PlainDoor, tmp_path: Path) -> None:
    savers = make_savers(door, tmp_path)
    save(savers, tmp_path / "a", tmp_path / "not here")
    close(savers, tmp_path)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["step-4"]
    found = read_checkpoint(tmp_path / "a/step-4")
    for name, tensor in make_part(1).tensors.items():
        assert found.ranks[1].tensors[name].equal(tensor)
    assert [saver.take_notes() for saver in savers] == [[], []]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_either_side_is_told_by_rank_0_with_the_host(
    failing: int, door: PlainDoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, savers = module.write_rank_part, make_savers(door, tmp_path)

    def fail(partial: Path, rank: int, part: RankPart) -> None:
        if rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial / f"rank-{rank}.safetensors"))
        write(partial, rank, part)

    monkeypatch.setattr(module, "write_rank_part", fail)
    save(savers, tmp_path / "a", tmp_path / "not here")
    (line,) = savers[0].take_notes()
    assert line.startswith(
        f"checkpoint {tmp_path / 'a/step-4'} is not saved: no space left (rank-{failing}.safetensors)"
    )
    assert (f", on {PLACES[1]};" in line) == (failing == 1)
    assert savers[1].take_notes() == []
    monkeypatch.undo()
    save(savers, tmp_path / "a", tmp_path / "not here")  # the next one works
    close(savers, tmp_path)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["step-4"]


def test_close_ends_a_part_that_is_under_way(door: PlainDoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, released = threading.Event(), threading.Event()

    def never_answer(*_: object) -> None:
        asked.set()
        released.wait()

    monkeypatch.setattr(FileService, "_put", never_answer)
    savers = make_savers(door, tmp_path)
    for rank, saver in enumerate(savers):
        saver.start(tmp_path / "a/step-4", taking(rank))
    asked.wait()
    close(savers, tmp_path)
    released.set()
    assert list((tmp_path / "a").iterdir()) == []


def test_a_part_that_grows_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[-1])
    is_over = Saver(0, 2, "word", deadline_s=10.0)._patience(tmp_path)
    found = []
    for now_s, content in ((9.0, b""), (11.0, b"a"), (20.0, b"a"), (22.0, b"ab"), (31.0, b"ab"), (33.0, b"ab")):
        clock.append(now_s)
        (tmp_path / ".rank-1.safetensors.draft").write_bytes(content)
        found.append(is_over())
    assert found == [False, False, False, False, False, True]


def test_a_rank_that_cannot_reach_the_leader_says_so_itself(door: PlainDoor, tmp_path: Path) -> None:
    savers = make_savers(door, tmp_path, deadline_s=0.0)
    door.close()
    save(savers, tmp_path / "a", tmp_path / "not here")
    (line,) = savers[1].take_notes()
    assert "the leader at 127.0.0.1 port" in line
    assert line.endswith("on rank 1 on lab-b; training is not affected")
    (line,) = savers[0].take_notes()
    assert "rank 1 on lab-b has not written its part" in line
    close(savers, tmp_path)
    assert list((tmp_path / "a").iterdir()) == []
