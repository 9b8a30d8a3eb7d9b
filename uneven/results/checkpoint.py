"""A checkpoint: a folder from which a run goes on, written beside its place and renamed when it is whole.

`state.safetensors` holds params and buffers by their plain names, `rank-N.safetensors` and `rank-N.json` what rank N
alone knows (its optimizer state, random states, log), `best.safetensors` the params that a callback has kept, and
`state.json` the record (results/record.py). Nothing is pickled.

All ranks write into `.NAME.partial-TOKEN`; rank 0 waits for their parts, writes the rest and renames the folder to
NAME. Invariant: under its final name a checkpoint is whole, whenever the machine dies; one that is replaced stays
findable until the new one is in its place (results/checkpoint_folders.py finds it). Written by results/saver.py.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from uneven.errors import InputError
from uneven.files import failure_mark, sync_folder, write_atomically
from uneven.results.record import RECORD, check_files, describe, encode, listed_files, read_record, record_head
from uneven.results.tensor_file import FileSum, open_tensors, write_file, write_tensors

STATE, BEST = "state.safetensors", "best.safetensors"
OTHER_RANK = "another rank could not write its part"
_PART = re.compile(r"rank-(\d+)\.safetensors")
POLL_S = 0.01  # how often rank 0 looks for the other ranks' parts


class SaveGivenUpError(RuntimeError):
    """A save that cannot become whole, because of another rank or because the run ends."""


@dataclass(frozen=True)
class RankPart:
    """What one rank alone knows: tensors in host memory, and what JSON holds."""

    tensors: Mapping[str, Tensor]
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Whole:
    """What rank 0 adds for all ranks: agreed params and buffers, the record, and the params that a callback kept."""

    tensors: Mapping[str, Tensor]
    record: Mapping[str, Any]
    best: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. Tensors are read when they are asked for, also after the folder was removed."""

    folder: Path
    record: dict[str, Any]
    tensors: Mapping[str, Tensor]
    ranks: list[RankPart]
    best: Mapping[str, Tensor] | None = None


def write_rank_part(partial: Path, rank: int, part: RankPart) -> None:
    """Write this rank's files; its JSON comes last and in one piece, so rank 0 may rely on what it sees."""
    partial.mkdir(parents=True, exist_ok=True)
    sums = write_tensors(partial / f"rank-{rank}.safetensors", part.tensors)
    content = encode({**part.record, "file": sums.to_json()})
    write_atomically(partial / f"rank-{rank}.json", content)


def part_files(folder: Path, rank: int) -> list[Path]:
    """What `write_rank_part` wrote, the JSON last: where it is, the part is whole."""
    return [folder / f"rank-{rank}.safetensors", folder / f"rank-{rank}.json"]


def files_of_ranks(names: Iterable[str], ranks: Collection[int]) -> list[str]:
    """Of a checkpoint's files those that these ranks read: all but the tensors of others than rank 0 and themselves.

    >>> files_of_ranks(["state.json", "rank-1.json", "rank-1.safetensors", "rank-2.safetensors"], [2])
    ['state.json', 'rank-1.json', 'rank-2.safetensors']
    """
    kept = {0, *ranks}
    return [name for name in names if not (part := _PART.fullmatch(name)) or int(part[1]) in kept]


def seal(
    partial: Path,
    folder: Path,
    world_size: int,
    whole: Whole,
    is_cancelled: Callable[[], bool] = lambda: False,
    places: Sequence[str] = (),
) -> None:
    """Rank 0: add what is everybody's, wait for the other ranks' parts, and give the folder its name.

    SaveGivenUpError where a part is still missing when `is_cancelled`, or where another rank has removed the folder.
    `places` is how messages name each rank.
    """
    partial.mkdir(parents=True, exist_ok=True)
    files = {STATE: write_tensors(partial / STATE, whole.tensors)}
    if whole.best is not None:
        files[BEST] = write_tensors(partial / BEST, whole.best)
    for rank in range(world_size):
        files.update(_wait_for_part(partial, rank, is_cancelled, places[rank] if places else f"rank {rank}"))
    record = {**record_head("checkpoint", files), "world_size": world_size}
    content = encode({**record, **{key: value for key, value in whole.record.items() if key not in record}})
    write_file(partial / RECORD, content)
    sync_folder(partial)
    put_in_place(partial, folder)


def _wait_for_part(partial: Path, rank: int, is_cancelled: Callable[[], bool], place: str) -> dict[str, FileSum]:
    path = partial / f"rank-{rank}.json"
    while not path.exists():
        if not partial.exists() or failure_mark(partial).exists():
            raise SaveGivenUpError(OTHER_RANK)
        if is_cancelled():
            raise SaveGivenUpError(f"{place} has not written its part")
        time.sleep(POLL_S)
    content = path.read_bytes()
    return {f"rank-{rank}.safetensors": FileSum.from_json(json.loads(content)["file"]), path.name: FileSum.of(content)}


def put_in_place(partial: Path, folder: Path) -> None:
    """Rename; one that is replaced keeps a hidden name until the new one stands, and `find_checkpoints` knows it."""
    old = folder.with_name(f".{folder.name}.old-{partial.name.rpartition('-')[2]}")
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_checkpoint(folder: Path, rank: int | None = None) -> Checkpoint:
    """A checkpoint, all of whose files are verified; InputError in one line that names the file and what is wrong.

    For one `rank` of a run that goes on from it the tensors of other ranks than rank 0 and itself are neither verified
    nor given: whoever chose the checkpoint (launch/checks/resume.py) has verified all, and every rank would read all of
    them.
    """
    folder = Path(folder)
    what, record = describe(folder), read_record(folder)
    if record.get("kind") != "checkpoint":
        raise InputError(f"{what}: it is the {record.get('kind')} of a run, not a checkpoint")
    ranks = record.get("world_size", 0)
    expected = {STATE, *(f"rank-{number}.{kind}" for number in range(ranks) for kind in ("json", "safetensors"))}
    if missing := sorted(expected - listed_files(record).keys()):
        raise InputError(f"{what}: {RECORD} does not list {missing[0]}")
    others = range(0) if rank is None else [other for other in range(1, ranks) if other != rank]
    check_files(folder, record, left_out=[f"rank-{other}.safetensors" for other in others])
    return Checkpoint(
        folder,
        record,
        open_tensors(folder / STATE, what),
        [_read_part(folder, number, what, has_tensors=number not in others) for number in range(ranks)],
        open_tensors(folder / BEST, what) if BEST in record["files"] else None,
    )


def _read_part(folder: Path, rank: int, what: str, has_tensors: bool) -> RankPart:
    record = json.loads((folder / f"rank-{rank}.json").read_bytes())
    del record["file"], record["crc32"]
    return RankPart(open_tensors(folder / f"rank-{rank}.safetensors", what) if has_tensors else {}, record)
