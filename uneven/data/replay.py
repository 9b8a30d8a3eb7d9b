"""log.json, the record of which rank trained which samples of which slot; a run with `replay=` repeats it bit by bit.

Written through results/state.py, read by launch/checks/preflight.py and the synchronizers in train/. The file also
holds every setting that must be equal for the recorded parts to describe the same computation.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from uneven.data.sample_order import prove_exactly_once
from uneven.errors import InputError
from uneven.policy.axis import Axis
from uneven.policy.recorded import RecordedShares, Round

LOG = "log.json"
# Settings that determine the slots and the arithmetic; with another value the replay would be a different run.
_FIXED_SETTINGS = """
batch_size accumulate global_batch_size memory_cap epochs max_steps seed shuffle drop_last max_grad_norm max_grad_value
precision compile sync_batchnorm optimizer_state strategy bucket_mb backend
machines
"""  # the last are those of the ranks, where sums are made machine by machine


@dataclass(frozen=True)
class Log:
    """Per rank, in order: (slot, first, samples) of the parts it trained, and its rounds where it had any."""

    parts: list[list[tuple[int, int, int]]]
    rounds: list[list[Round]]
    stop_rounds: frozenset[int] = frozenset()  # after which the run was stopped, saved and resumed

    def shares(self, slots: int) -> RecordedShares:
        """The policy that repeats the shares of an exact run."""
        plan = [[0] * len(self.parts) for _ in range(slots)]
        for rank, log in enumerate(self.parts):
            for slot, _, count in log:
                plan[slot][rank] = count
        return RecordedShares(tuple(tuple(shares) for shares in plan))


def log_record(
    log: Any,
    rounds: Any,
    dropped: Any,
    axis_samples: int,
    slots: int,
    config: Mapping[str, Any],
    skipped: Any = (),
    resumed: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The content of log.json. Parts that were dropped are among those of their rank: a replay skips them again.

    `resumed` has the slots at which checkpoints were taken ("saves"), the rounds after which a local policy was stopped
    ("stop_rounds") and where the run began and went on ("segments"): the log is that of all segments together. Of a run
    in which ranks were lost or joined the segments are generations, and the log has the parts of all "members".
    """
    settings = {name: config[name] for name in _FIXED_SETTINGS.split() if name in config}
    head = {"version": 1, "dataset_samples": axis_samples, "slots": slots, "config": settings}
    return {**head, "ranks": log, "rounds": rounds, "dropped": dropped, "skipped": list(skipped), **resumed}


def read_parts(rows: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """A rank's (slot, first, samples), as JSON has them."""
    return [(int(slot), int(first), int(samples)) for slot, first, samples in rows]


def read_rounds(rows: Sequence[Sequence[float]]) -> list[tuple[int, int, int, float]]:
    """A rank's rounds, as JSON has them."""
    return [(int(due), int(entered), int(merged), scale) for due, entered, merged, scale in rows]


def read_global_batch(folder: Path) -> tuple[int | None, int]:
    """`global_batch_size` and `accumulate` of the recorded run, which may have chosen them by itself."""
    config = _read(folder)["config"]
    return config["global_batch_size"], config["accumulate"]


def read_saves(folder: Path) -> list[int]:
    """The slots at which the recorded run took its checkpoints: a replay averages buffers there, too."""
    return [int(slot) for slot in _read(folder).get("saves", [])]


def read_log(
    folder: Path, axis: Axis, ranks: int, config: Mapping[str, Any], is_local: bool, machines: Sequence[int] = ()
) -> Log:
    """Read the log of the run in `folder`; InputError if its settings, devices or data set differ from this run's.

    `machines` has each rank's machine, where there are several.
    """
    record = _read(folder)
    if any("generation" in segment for segment in record.get("segments", [])):
        raise InputError(
            f"replay={str(folder)!r}: ranks of that run were lost or joined, and only a run in which the same ranks "
            "trained from its start to its end is repeated"
        )
    if len({len(segment["devices"]) for segment in record.get("segments", [])}) > 1:
        raise InputError(
            f"replay={str(folder)!r}: that run was resumed on another number of devices, and only a run of one number "
            "of them is repeated"
        )
    _compare(folder, "devices", len(record["ranks"]), ranks, f"name {len(record['ranks'])} devices")
    rounds = [
        [Round(due, entered, merged, scale) for due, entered, merged, scale in log] for log in record.get("rounds", [])
    ]
    was_local = any(rounds)
    kinds = ("an exact policy", "a local policy")
    fix = "pass policy='cadence' or 'async'" if was_local else "pass policy='balanced' or 'sync'"
    _compare(folder, "as policy", kinds[was_local], kinds[is_local], fix)
    for name, value in record["config"].items():
        if name == "backend" and ranks <= 2:
            continue  # a sum of two numbers has the same bits in any order; with more, each transport has its own
        if name == "machines":
            _compare(folder, "ranks on machines", value, list(machines), "start as many ranks on each machine")
            continue
        _compare(folder, name, value, config[name], f"pass {name}={value!r}")
    samples = record["dataset_samples"]
    _compare(folder, "samples in the data set", samples, axis.samples, "train on the same data set")
    if record.get("skipped"):
        raise InputError(f"replay={str(folder)!r}: that run left out parts of epochs, and only a whole run is repeated")
    if record["slots"] != axis.total:
        raise InputError(
            f"replay={str(folder)!r}: that run was stopped after {record['slots']} of {axis.total} slots, "
            "and only a finished run can be replayed"
        )
    parts = [read_parts(rows) for rows in record["ranks"]]
    try:
        prove_exactly_once(axis, parts, axis.total)
        if was_local:
            _check_rounds(rounds, parts)
    except RuntimeError as error:
        raise InputError(f"replay={str(folder)!r}: log.json is damaged: {error}") from error
    return Log(parts, rounds, frozenset(record.get("stop_rounds", ())))


def _check_rounds(rounds: list[list[Round]], parts: list[list[tuple[int, int, int]]]) -> None:
    """RuntimeError unless all ranks have the same rounds in order; otherwise the replay would deadlock."""
    if len(rounds) != len(parts):
        raise RuntimeError(f"{len(rounds)} ranks have rounds and {len(parts)} have slots")
    for rank, (log, trained) in enumerate(zip(rounds, parts, strict=True)):
        if [(entry.due, entry.scale) for entry in log] != [(entry.due, entry.scale) for entry in rounds[0]]:
            raise RuntimeError(f"rank {rank} has other rounds than rank 0")
        positions = [position for entry in log for position in (entry.entered, entry.merged)]
        if positions != sorted(positions) or positions[-1] != len(trained):
            raise RuntimeError(f"rank {rank}'s rounds do not lie between its {len(trained)} slots")


def _read(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / LOG).read_text())
        if record["version"] != 1:
            raise ValueError(f"version {record['version']}")
        if missing := {"ranks", "config", "dataset_samples", "slots"} - record.keys():
            raise ValueError(f"without {', '.join(sorted(missing))}")
    except OSError as error:
        raise InputError(
            f"replay={str(folder)!r}: there is no log.json in it; pass the folder a finished run was given as out=..."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"replay={str(folder)!r}: log.json is not the log of a run ({error})") from error
    return record


def _compare(folder: Path, what: str, recorded: Any, current: Any, fix: str) -> None:
    if recorded != current:
        raise InputError(f"replay={str(folder)!r}: that run had {what} {recorded}, this one {current}; {fix}")
