"""The background writer: what training waits for, and that a save which fails costs nothing but itself."""

import errno
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.results.checkpoints import make_part, make_whole, write_checkpoint
from uneven.errors import GroupLostError
from uneven.results import saver as module
from uneven.results.checkpoint import RankPart, Whole, read_checkpoint, write_rank_part
from uneven.results.checkpoint_folders import prune
from uneven.results.saver import Saver, Take

MakeSaver = Callable[..., Saver]


@pytest.fixture
def make_saver() -> Iterator[MakeSaver]:
    """Savers that are closed at the end; none may leave its thread behind."""
    made: list[Saver] = []

    def make(rank: int = 0, world_size: int = 1, deadline_s: float = 60.0) -> Saver:
        made.append(Saver(rank, world_size, "word", deadline_s))
        return made[-1]

    yield make
    for saver in made:
        saver.close()
    assert not [thread for thread in threading.enumerate() if thread.name == module.THREAD]


def taking(rank: int, slot: int = 4) -> Take:
    return lambda: (make_part(rank), make_whole(slot) if rank == 0 else None)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_training_waits_for_the_copy_and_not_for_the_writing(
    tmp_path: Path, make_saver: MakeSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make_saver()
    saver.wait_taken()
    taken, written = threading.Event(), threading.Event()
    tensor = torch.zeros(3)

    def take() -> tuple[RankPart, Whole]:
        assert threading.current_thread().name == "uneven-saver"
        assert threading.current_thread().daemon
        taken.wait()
        return RankPart({"x": tensor.clone()}, {}), make_whole()

    def slow(partial: Path, rank: int, part: RankPart) -> None:
        written.wait()
        write_rank_part(partial, rank, part)

    monkeypatch.setattr(module, "write_rank_part", slow)
    saver.start(tmp_path / "step-4", take)
    waiting = threading.Thread(target=saver.wait_taken)
    waiting.start()
    assert waiting.is_alive()
    taken.set()
    waiting.join()
    saver.wait_taken()
    tensor += 1
    assert not (tmp_path / "step-4").exists()
    written.set()
    saver.finish()
    assert saver.saved == [tmp_path / "step-4"]
    assert saver.take_notes() == []
    assert read_checkpoint(tmp_path / "step-4").ranks[0].tensors["x"].tolist() == [0, 0, 0]


def test_two_ranks_write_one_checkpoint_after_another(tmp_path: Path, make_saver: MakeSaver) -> None:
    savers = [make_saver(rank, 2) for rank in range(2)]
    for slot in (4, 8, 12):
        after = (lambda: prune(tmp_path, 2, None, None, "min")) if slot > 4 else None
        for saver, rank in zip(savers, (0, 1), strict=True):
            saver.start(tmp_path / f"step-{slot}", taking(rank, slot), after if rank == 0 else None)  # type: ignore[arg-type]
    for saver in savers:
        saver.finish()
    assert [path.name for path in savers[0].saved] == ["step-4", "step-8", "step-12"]
    assert savers[1].saved == []
    assert names_in(tmp_path) == ["step-12", "step-8"]
    found = read_checkpoint(tmp_path / "step-12")
    assert (found.record["slot"], len(found.ranks)) == (12, 2)


def no_space(path: Path, *_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_costs_the_save_and_says_what_is_needed(
    tmp_path: Path, make_saver: MakeSaver, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    before = write_checkpoint(tmp_path / "step-4")
    content = {path.name: path.read_bytes() for path in before.iterdir()}
    write = module.write_rank_part

    def fail(partial: Path, rank: int, part: RankPart) -> None:
        no_space(partial / f"rank-{rank}.safetensors") if rank == failing else write(partial, rank, part)

    savers = [make_saver(rank, 2) for rank in range(2)]
    monkeypatch.setattr(module, "write_rank_part", fail)
    for folder in ("step-8", "step-4"):  # one that is new, one in the place of a whole one
        for rank, saver in enumerate(savers):
            saver.start(tmp_path / folder, taking(rank, 8))
        for saver in savers:
            saver.finish()
        (line,) = savers[0].take_notes()
        assert line.startswith(
            f"checkpoint {tmp_path / folder} is not saved: no space left (rank-{failing}.safetensors)"
        )
        assert f", on rank {failing}" in line or failing == 0
        assert " MB are free in " in line
        assert line.endswith(f"training is not affected, the last whole checkpoint is {before}")
        assert savers[1].take_notes() == []
        assert [name for name in names_in(tmp_path) if "failed" not in name] == ["step-4"]
    assert {path.name: path.read_bytes() for path in before.iterdir()} == content
    monkeypatch.undo()
    for rank, saver in enumerate(savers):
        saver.start(tmp_path / "step-8", taking(rank, 8))  # there is space again: the same name works
    for saver in savers:
        saver.finish()
        saver.close()
    assert names_in(tmp_path) == ["step-4", "step-8"]
    assert savers[0].take_notes() == []


def test_who_waits_for_a_part_that_will_not_come_is_told_when_its_group_is_lost(
    tmp_path: Path, make_saver: MakeSaver
) -> None:
    saver = make_saver(0, 2)
    saver.start(tmp_path / "step-4", taking(0))

    def check() -> None:
        raise GroupLostError("rank 1 is gone")

    with pytest.raises(GroupLostError, match="rank 1 is gone"):
        saver.finish(check)
    saver.close()
    (line,) = saver.take_notes()
    assert "rank 1 has not written its part" in line
    assert [name for name in names_in(tmp_path) if "failed" not in name] == []


def test_a_file_that_may_not_grow_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """A real failure of a write in its middle, in a child: its limit on the size of files ends with it."""
    child = os.fork()
    if child == 0:
        try:
            saver = Saver(0, 1, "word")
            saver.start(tmp_path / "step-4", taking(0))
            saver.finish()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
            large = RankPart({"x": torch.zeros(1_000_000)}, {})
            saver.start(tmp_path / "step-8", lambda: (large, make_whole(8)))
            saver.finish()
            notes = saver.take_notes()
            good = len(notes) == 1 and "File too large" in notes[0] and "about 4.0 MB" in notes[0]
            sys.stderr.write("\n".join(notes))
            os._exit(0 if good and saver.saved == [tmp_path / "step-4"] else 1)
        finally:
            os._exit(1)  # the rest of pytest is the parent's
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert [name for name in names_in(tmp_path) if "failed" not in name] == ["step-4"]
    read_checkpoint(tmp_path / "step-4")


def test_the_reason_of_a_failed_save_reaches_other_ranks_in_one_piece(
    tmp_path: Path, make_saver: MakeSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 looks for it all the time: an empty one would make it say that another rank failed, and not why."""
    mark = tmp_path / ".step-4.failed-word_0"
    write, seen = Path.write_text, []

    def look_before_the_text_is_in(path: Path, text: str) -> int:
        path.touch()
        seen.append(mark.exists())
        return write(path, text)

    def take() -> tuple[RankPart, None]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", look_before_the_text_is_in)
    saver = make_saver(1, 2)
    saver.start(tmp_path / "step-4", take)
    saver.finish()
    assert seen == [False]
    assert mark.read_text() == "no space left, on rank 1"
    assert names_in(tmp_path) == [mark.name]


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline(tmp_path: Path, make_saver: MakeSaver) -> None:
    saver = make_saver(0, 2, deadline_s=0.0)
    saver.start(tmp_path / "step-4", taking(0))
    saver.finish()
    (line,) = saver.take_notes()
    assert "rank 1 has not written its part" in line
    assert line.endswith("there is no whole checkpoint yet")
    saver.close()
    assert names_in(tmp_path) == []


def test_close_does_not_wait_for_ranks_that_are_gone(tmp_path: Path, make_saver: MakeSaver) -> None:
    saver = make_saver(0, 2, deadline_s=1e9)
    saver.start(tmp_path / "step-4", taking(0))
    saver.close()
    assert names_in(tmp_path) == []


def test_a_folder_that_vanishes_is_noticed(tmp_path: Path, make_saver: MakeSaver) -> None:
    saver = make_saver(0, 2, deadline_s=1e9)
    saver.start(tmp_path / "step-4", taking(0))
    partial = tmp_path / ".step-4.partial-word_0"
    while not (partial / "state.safetensors").exists():
        saver.wait_taken()
    while partial.exists():
        shutil.rmtree(partial, ignore_errors=True)
    saver.finish()
    assert len(saver.take_notes()) == 1
    assert saver.saved == []


def test_whatever_take_or_after_raise_training_goes_on(tmp_path: Path, make_saver: MakeSaver) -> None:
    saver = make_saver()

    def broken() -> tuple[RankPart, Whole]:
        raise RuntimeError("a tensor\nis gone")

    saver.start(tmp_path / "step-4", broken)
    saver.wait_taken()
    saver.finish()
    assert "is not saved: RuntimeError: a tensor; it needs" in saver.take_notes()[0]
    wave = RankPart({"wave": torch.zeros(1, dtype=torch.complex128)}, {})
    saver.start(tmp_path / "step-4", lambda: (wave, make_whole()))
    saver.finish()
    assert "wave is of torch.complex128" in saver.take_notes()[0]

    def unable() -> None:
        no_space(tmp_path)

    saver.start(tmp_path / "step-8", taking(0), unable)
    saver.finish()
    assert saver.take_notes() == [
        f"after saving {tmp_path / 'step-8'}: no space left ({tmp_path.name}); training is not affected"
    ]
    assert saver.saved == [tmp_path / "step-8"]
