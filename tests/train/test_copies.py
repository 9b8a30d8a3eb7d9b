"""Copies of checkpoints on another machine: whole or not at all, pruned, and apart from those of other runs."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.machines.plain_door import PlainDoor, plain_door
from tests.ranks import on_threads
from tests.results.checkpoints import make_part, make_whole
from uneven.config import resolve
from uneven.errors import InputError
from uneven.files import failure_mark, leave_mark
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.results.checkpoint import read_checkpoint, seal, write_rank_part
from uneven.results.checkpoint_folders import find_checkpoints
from uneven.train.rank_info import RankInfo
from uneven.train.saves import Copies, Saves

HOSTS = ("lab-a", "lab-b")


@pytest.fixture
def door(tmp_path: Path) -> Iterator[PlainDoor]:
    with plain_door() as door:
        (tmp_path / "a").mkdir()
        door.reach(tmp_path / "a0").share("word", tmp_path / "a", places=("rank 0 on lab-a", "rank 1 on lab-b"))
        yield door


def settings(out: Path, **more: Any) -> Any:
    given = {"batch_size": 4, "epochs": 1, "save_every": "1 steps", "checkpoint_copies": 2, "out": out}
    return resolve({**given, **more})


def connect(
    door: PlainDoor,
    home: Path,
    copies: tuple[Copies, Copies],
    keeper: str = "b",
    machines: tuple[int, ...] = (0, 1),
    **more: Any,
) -> list[str]:
    """Both ranks; what rank 0 would say."""
    roster = Roster(parse_devices(["cpu", "cpu"]), machines, HOSTS[: len({*machines})])

    def run(group: Any) -> list[str]:
        info = RankInfo(group.rank, roster.devices, roster=roster, leader=door.reach(home / f"rank {group.rank}"))
        info.join(group)
        config = settings(home / (keeper if group.rank else "a"), **more)
        return copies[group.rank].connect(info, config, home / "a", "word", "run")

    return on_threads(2, run)[0]


def write(folder: Path, partial: Path, slot: int) -> None:
    for rank in (0, 1):
        write_rank_part(partial, rank, make_part(rank))
    seal(partial, folder, 2, make_whole(slot))


def save(door: PlainDoor, home: Path, copies: tuple[Copies, Copies], slot: int, *, fails: bool = False) -> bool:
    """As the two savers' threads do it, the keeper first: it waits for rank 0."""
    name, partial = f"step-{slot}", home / f"a/.step-{slot}.partial-word_{slot}"

    def run(group: Any) -> bool:
        leader = door.reach(home / f"rank {group.rank}")
        if group.rank:
            return copies[1].fetch(leader, name, partial, lambda: False)
        if fails:
            leave_mark(failure_mark(partial), "no space left", "0")
        else:
            write(home / "a" / name, partial, slot)
            copies[0].give_out(leader, home / "a" / name, partial)
        return True

    return on_threads(2, run)[1]


def test_a_whole_checkpoint_is_copied_and_a_failed_one_is_not(door: PlainDoor, tmp_path: Path) -> None:
    copies = Copies(), Copies()
    (line,) = connect(door, tmp_path, copies)
    assert line == f"  checkpoint_copies=2: each checkpoint is copied to {tmp_path / 'b'} on lab-b"
    assert connect(door, tmp_path, copies) == []  # in the next generation
    assert save(door, tmp_path, copies, 4)
    assert not save(door, tmp_path, copies, 5, fails=True)
    assert save(door, tmp_path, copies, 6)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [".uneven", "step-4", "step-6"]
    for name in ("step-4", "step-6"):
        read_checkpoint(tmp_path / "b" / name)
        for file in (tmp_path / "a" / name).iterdir():
            assert (tmp_path / "b" / name / file.name).read_bytes() == file.read_bytes()
    # Another rank of that machine is the keeper from now on, and finds what the one before has copied.
    connect(door, tmp_path, (copies[0], Copies()))
    assert [folder.name for folder in find_checkpoints(tmp_path / "b")] == ["step-6", "step-4"]


def test_a_checkpoint_that_is_damaged_where_it_is_is_not_kept(door: PlainDoor, tmp_path: Path) -> None:
    copies = Copies(), Copies()
    connect(door, tmp_path, copies)
    partial = tmp_path / "a/.step-4.partial-word_4"
    write(tmp_path / "a/step-4", partial, 4)
    (tmp_path / "a/step-4/state.safetensors").write_bytes(b"nothing")
    copies[0].give_out(door.reach(tmp_path / "rank 0"), tmp_path / "a/step-4", partial)
    with pytest.raises(InputError, match=r"state\.safetensors is damaged"):
        copies[1].fetch(door.reach(tmp_path / "rank 1"), "step-4", partial, lambda: False)
    assert [path.name for path in (tmp_path / "b").iterdir()] == [".uneven"]


def test_other_runs_in_the_folder_are_moved_aside(door: PlainDoor, tmp_path: Path) -> None:
    for slot in (4, 8):
        write(tmp_path / f"b/step-{slot}", tmp_path / f"b/.step-{slot}.partial-other_0", slot)
    (tmp_path / "b/.uneven").write_text("{}")
    resumed = tmp_path / "a/step-4"
    write(resumed, tmp_path / "a/.step-4.partial-other_1", 4)
    connect(door, tmp_path, (Copies(), Copies()), resume=resumed)
    assert [folder.name for folder in find_checkpoints(tmp_path / "b")] == ["step-4"]
    assert (tmp_path / "b/superseded-1/step-8").is_dir()
    (tmp_path / "b/.uneven").write_text("{}")
    connect(door, tmp_path, (Copies(), Copies()))
    assert find_checkpoints(tmp_path / "b") == []
    assert (tmp_path / "b.1/step-4").is_dir()


def test_without_another_machine_or_another_folder_it_says_so(door: PlainDoor, tmp_path: Path) -> None:
    (line,) = connect(door, tmp_path, (Copies(), Copies()), machines=(0, 0))
    assert line == "  checkpoint_copies=2: there is no other machine, so each checkpoint is on this one alone"
    copies = Copies(), Copies()
    (line,) = connect(door, tmp_path, copies, keeper="a")
    assert line == f"  checkpoint_copies=2: lab-b sees {tmp_path / 'a'}, too, so there is no copy beside it"
    assert copies[1].folder is None
    assert list((tmp_path / "a").iterdir()) == []


def test_a_folder_of_the_user_is_refused(door: PlainDoor, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"checkpoint_copies=2: lab-b cannot keep copies: .*thesis\.txt"):
        connect(door, tmp_path, (Copies(), Copies()))
    with pytest.raises(InputError, match="checkpoint_copies=2 without checkpoints: add save_every='1 epoch'"):
        settings(tmp_path, save_every=None)


def saves_of(out: Path, **more: Any) -> tuple[Any, Saves]:
    """Of a rank process, with the engine that it asks for its place in each group."""
    config = settings(out, **more)
    engine: Any = SimpleNamespace(config=config, device=torch.device("cpu"), full_state=None, is_own_loop=True)
    return engine, Saves(engine)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_machine_that_has_left_finds_the_copies_of_the_run_when_it_comes_back(
    door: PlainDoor, tmp_path: Path, overwrite: bool
) -> None:
    """Its new process drew another id than the run's: it moved the copies away, or removed them."""
    roster = Roster(parse_devices(["cpu", "cpu"]), (0, 1), HOSTS)

    def connect_saves(ranks: list[tuple[Any, Saves]]) -> None:
        def run(group: Any) -> None:
            engine, saves = ranks[group.rank]
            leader = door.reach(tmp_path / f"rank {group.rank}")
            engine.rank_info = RankInfo(group.rank, roster.devices, roster=roster, leader=leader)
            engine.rank_info.join(group)
            saves.connect()

        on_threads(2, run)

    write(tmp_path / "b/step-2", tmp_path / "b/.step-2.partial-other_0", 2)
    (tmp_path / "b/.uneven").write_text("{}")
    first = saves_of(tmp_path / "a", overwrite=overwrite)
    connect_saves([first, saves_of(tmp_path / "b", overwrite=overwrite)])
    assert find_checkpoints(tmp_path / "b") == []  # it was another run's
    write(tmp_path / "b/step-4", tmp_path / "b/.step-4.partial-own_0", 4)
    connect_saves([first, saves_of(tmp_path / "b", overwrite=overwrite)])
    assert [folder.name for folder in find_checkpoints(tmp_path / "b")] == ["step-4"]
    assert (tmp_path / "b.1/step-2").exists() != overwrite
