"""What a checkpoint holds of a rank beside params and RunState, and how a rank goes on from a checkpoint.

The first is an optimizer's state by param name, and random generators: train/saves.py writes them, and
launch/checks/resume.py compares the optimizer before a rank starts. Checkpoints of earlier versions have neither the
class of the optimizer nor entries of its own. Each rank has its own random states: dropout masks differ.

Resuming happens in two steps. `Resumed.restore`, before anything is compiled or measured: params, buffers, position on
the axis, ledger, the run's past, and optimizer state where this rank holds all of it (a captured step keeps the
tensors' addresses). `restore_rest`, when the group has formed and the strategy is applied: sharded state, schedule,
random states. On other devices, or another number of them, the data order and every slot's samples stay the same: a
rank that the checkpoint does not have takes rank 0's optimizer state and random numbers of its own.

In the middle of a run, where a shard is lost for good, all ranks read the newest whole checkpoint (`read_newest`, a
collective), and nothing has changed yet where another rank is lost meanwhile. Then each goes back by itself.
"""

import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from uneven.comm.gather import broadcast_json, gather_json
from uneven.comm.group import Group
from uneven.errors import InputError, RefusedError
from uneven.files import why_not_written
from uneven.machines.transfer import LeaderFiles
from uneven.parallel.muon_adamw import MuonAdamW
from uneven.parallel.strategy import FullState
from uneven.policy.ledger import Ledger
from uneven.results.checkpoint import Checkpoint, RankPart, files_of_ranks, read_checkpoint
from uneven.results.checkpoint_folders import find_checkpoints, first_whole, slot_of
from uneven.results.record import RECORD, crc32_of, listed_files
from uneven.results.state_tree import join_tree, split_tree
from uneven.train.callbacks import CallbackRunner
from uneven.train.engine import DEVICE_KEYS, Engine, describe_made, kind_of
from uneven.train.rank_info import RankInfo
from uneven.train.synchronizer import Synchronizer

STANDARD = ("state", "param_groups")


def kept_settings(saved: Mapping[str, Any], optimizer: Optimizer) -> list[str]:
    """A line for each setting of this run's optimizer that has no effect, because the checkpoint's is kept."""
    own, lines = describe_made(optimizer)["settings"], []
    for number, (theirs, ours) in enumerate(zip(saved.get("settings", ()), own, strict=False)):
        place = f" in param group {number}" if len(own) > 1 else ""
        lines += [
            f"  the optimizer's {key}={theirs[key]!r}{place} is kept from the checkpoint; {value!r} has no effect"
            for key, value in ours.items()
            if key in theirs and theirs[key] != value
        ]
    return lines


def split_optimizer(
    state: Mapping[str, Any], names: Sequence[str], made: Mapping[str, Any]
) -> tuple[Any, dict[str, Tensor]]:
    """(what JSON holds, tensors) of a `state_dict`; InputError names what cannot be kept. `made`: `describe_made`.

    Of a param group's settings, functions and other objects are left out: the script makes them anew.
    """
    by_name = {names[place]: values for place, values in state["state"].items() if isinstance(place, int)}
    groups = [
        {**{key: value for key, value in group.items() if _is_kept(value)}, "params": [names[p] for p in places]}
        for group in state["param_groups"]
        for places in [group["params"]]
    ]
    # An optimizer may keep state that is no param's, in `optimizer.state` or beside it.
    own = {key: value for key, value in state.items() if key not in STANDARD}
    own_state = {key: values for key, values in state["state"].items() if not isinstance(key, int)}
    parts = {"state": (by_name, "optimizer"), "param_groups": (groups, "param_groups")}
    parts |= {"own": (own, "optimizer_own"), "own_state": (own_state, "optimizer_own_state")}
    skeletons = dict(made)
    tensors: dict[str, Tensor] = {}
    for name, (value, path) in parts.items():
        skeletons[name], found = split_tree(value, path)
        tensors |= found
    return skeletons, tensors


def join_optimizer(
    saved: Mapping[str, Any], tensors: Mapping[str, Tensor], names: Sequence[str], optimizer: Optimizer, what: str
) -> dict[str, Any]:
    """As `load_state_dict` takes it: state by place, and the saved groups with this device's own switches."""
    state, groups = join_tree(saved["state"], tensors), join_tree(saved["param_groups"], tensors)
    own_groups = optimizer.param_groups
    saved_names = [name for group in groups for name in group["params"]]
    if saved_names != names or [len(g["params"]) for g in groups] != [len(g["params"]) for g in own_groups]:
        raise InputError(
            f"{what}: its optimizer has {len(groups)} groups of other params than this one's {len(own_groups)}; make "
            "the optimizer as that run did"
        )
    places = iter(range(len(names)))
    merged = [
        {
            **{key: value for key, value in own.items() if key not in saved_group or key in DEVICE_KEYS},
            **{key: value for key, value in saved_group.items() if key not in DEVICE_KEYS},
            "params": [next(places) for _ in saved_group["params"]],
        }
        for saved_group, own in zip(groups, own_groups, strict=True)
    ]
    by_place = lay_out({place: state[name] for place, name in enumerate(names) if name in state}, optimizer)
    return {
        **join_tree(saved.get("own", {}), tensors),
        "state": {**by_place, **join_tree(saved.get("own_state", {}), tensors)},
        "param_groups": merged,
    }


def lay_out(state: Mapping[Any, Any], optimizer: Optimizer) -> dict[Any, Any]:
    """State by place, its tensors in memory as the optimizer itself would make them: in the order of their param.

    Files and collectives give the rows of a tensor one after the other. A fused step goes through the memory of param
    and state side by side, so beside a param in channels_last, or transposed, it would take other elements' state.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    laid_out = dict(state)  # with state that is no param's, if there is any
    for place, param in enumerate(params):
        if place in state:
            laid_out[place] = {key: _as_param_is(value, param) for key, value in state[place].items()}
    return laid_out


def _as_param_is(value: Any, param: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != param.shape or value.stride() == param.stride():
        return value
    return torch.empty_like(param, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer, what: str) -> None:
    """InputError where a checkpoint is of another optimizer: its state would mean something else, or nothing."""
    own = kind_of(optimizer)
    if (kind := saved.get("class")) is not None:
        is_other = kind != own
    else:  # neither's settings are among the other's; a version of torch, or a scheduler, may add some
        kind = "another one"
        pairs = zip(saved["param_groups"], optimizer.param_groups, strict=False)
        is_other = any(not (theirs.keys() <= ours.keys() or ours.keys() <= theirs.keys()) for theirs, ours in pairs)
    if is_other:
        raise InputError(f"{what}: its optimizer is {kind}, this run's is {own}; make the optimizer as that run did")


def _is_kept(value: Any) -> bool:
    try:
        split_tree(value, "")
    except InputError:
        return False
    return True


class RandomStates(NamedTuple):
    """As the generators give them."""

    python: Any
    numpy: Any
    cpu: Tensor  # torch's
    cuda: Tensor | None  # None where the device is another

    @classmethod
    def read(cls, device: torch.device) -> "RandomStates":
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self, device: torch.device) -> None:
        """Set all generators; that of a kind of device that is not among them goes on as it is."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if device.type == "cuda" and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


def capture_random(device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(JSON, tensors by name) of all generators, as they are now."""
    states = RandomStates.read(device)
    version, numbers, gauss = states.python
    kind, keys, *rest = states.numpy
    record = {"python": [version, gauss], "numpy": [kind, *rest]}
    tensors = {
        "random.python": torch.tensor(numbers, dtype=torch.int64),
        "random.numpy": torch.from_numpy(np.array(keys, dtype=np.int64)),
        "random.torch": states.cpu,
    }
    if states.cuda is not None:
        tensors["random.cuda"] = states.cuda
    return record, tensors


def restore_random(record: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Set all generators to what `capture_random` returned."""
    version, gauss = record["python"]
    kind, *rest = record["numpy"]
    python = (version, tuple(tensors["random.python"].tolist()), gauss)
    numpy = (kind, tensors["random.numpy"].numpy().astype(np.uint32), *rest)
    RandomStates(python, numpy, tensors["random.torch"], tensors.get("random.cuda")).restore(device)


def param_names(engine: Engine) -> list[str]:
    """The names of the optimizer's params, in its order."""
    names = {param: name for name, param in engine.model.named_parameters()}
    optimizer: Optimizer = engine.optimizer
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [names.get(param, f"unnamed.{place}") for place, param in enumerate(params)]


class Resumed:
    """A checkpoint as one rank of this run goes on from it."""

    def __init__(self, folder: Path, rank_info: RankInfo) -> None:
        self.checkpoint: Checkpoint = read_checkpoint(folder, rank_info.rank)
        self.record = self.checkpoint.record
        self.ledger = Ledger.from_json(self.record["ledger"])
        self._rank = rank_info.rank
        self._devices = [str(device) for device in rank_info.devices]

    @property
    def is_same_group(self) -> bool:
        """Whether the checkpoint is of the same devices in the same order: then everything goes on as it was."""
        return bool(self._devices == self.record["devices"])

    @property
    def _is_known(self) -> bool:
        return self._rank < len(self.checkpoint.ranks)

    @property
    def own(self) -> RankPart:
        """This rank's part; a rank that the checkpoint does not have takes rank 0's."""
        return self.checkpoint.ranks[self._rank if self._is_known else 0]

    def restore_optimizer(self, engine: Engine) -> None:
        """Give a plain optimizer its whole state."""
        engine.optimizer.load_state_dict(self._optimizer_state(engine))

    def logs(self, first: int) -> list[dict[str, Any]]:
        """What ranks of earlier segments have trained, and those of the checkpoint from this one on."""
        gone = [*self.record["earlier_logs"], *(part.record for part in self.checkpoint.ranks[first:])]
        return [{name: log[name] for name in ("log", "dropped")} for log in gone]

    def logs_of(self, members: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What these members, in rank order, have taken over as their own: with one that is lost it would be, too."""
        return dict(zip(members, self.logs(0)[len(self.record["earlier_logs"]) :], strict=False))

    def restore(self, engine: Engine) -> None:
        """Before the warm-up: model, position and past. Where the run went on here is a segment of it."""
        record, state = self.record, engine.state
        state.resume(record, self.own.record if self._is_known else None, self.logs(len(self._devices)))
        state.begin_segment({"slot": state.trained, "samples": record["samples"], **engine.rank_info.segment})
        self._restore_replica(engine)

    def go_back(self, engine: Engine) -> None:
        """In the middle of a run, where the model is whole: nothing that came after the checkpoint counts."""
        engine.state.go_back(self.record, self.own.record if self._is_known else None, self.logs(0))
        self._restore_replica(engine)
        self.restore_progress(engine)

    def _restore_replica(self, engine: Engine) -> None:
        self._load_model(engine)
        if not self._is_late(engine):
            self.restore_optimizer(engine)
        scaler = engine.step.precision.scaler
        if scaler.is_enabled() and self.own.record["scaler"]:
            scaler.load_state_dict(self.own.record["scaler"])
        if (kept := self.record.get("kept")) is not None and self.checkpoint.best is not None:
            best = self.checkpoint.best
            fields: dict[str, Any] = {
                kind: {name.removeprefix(f"{kind}."): t for name, t in best.items() if name.startswith(f"{kind}.")}
                for kind in ("params", "buffers", "optimizer")
            }
            fields["extra"] = join_tree(kept.get("extra", {}), best)
            engine.state.keep({**fields, "tied": kept["tied"], "param_groups": kept["param_groups"]}, kept["entry"])

    def restore_rest(self, engine: Engine) -> None:
        """When the group has formed, just before the first slot."""
        if self._is_late(engine):
            assert engine.load_full_state is not None, "a strategy that shards can load"
            engine.load_full_state(self.full_state(engine))
        self.restore_progress(engine)

    def full_state(self, engine: Engine) -> FullState:
        """Params, buffers and optimizer state as one process would have them."""
        return FullState(self._model_state(engine), self._optimizer_state(engine))

    def restore_progress(self, engine: Engine) -> None:
        """Schedule, losses since the last entry of the history, and random numbers; no collective."""
        engine.schedule.load_state_dict(self.record["schedule"])
        losses = [tuple(part.record["losses"]) for part in self.checkpoint.ranks]
        if not self.is_same_group:  # rank 0 has those of all ranks, in the sums of a local policy too
            losses.append(tuple(self.record["synchronizer"].get("losses", [0.0, 0.0])))
            first = (sum(each for each, _ in losses), sum(each for _, each in losses))
            losses = [first, *[(0.0, 0.0)] * (len(self._devices) - 1)]
        engine.meter.learn(losses)  # where a rank is lost before it has told its own anew
        engine.meter.restore(losses[self._rank])
        self.restore_random(engine)

    def go_on(self, engine: Engine, synchronizer: Synchronizer, callbacks: CallbackRunner) -> list[str]:
        """What needs the group: sharded state, and the policy's own where the devices are the same; lines to print."""
        self.restore_rest(engine)
        if self.is_same_group:
            synchronizer.load_state_dict(self.record["synchronizer"])
        return callbacks.load_state_dict(self.own.record["callbacks"])

    def restore_random(self, engine: Engine) -> None:
        """Once before the first slot; in a loop of the user's own again where its code goes on."""
        if self._is_known or engine.config.is_model_parallel:
            restore_random(self.own.record["random"], self.own.tensors, engine.device)
        else:  # not the masks that this rank would have drawn at the beginning of the run
            torch.manual_seed(engine.config.seed + 7919 * self._rank + 104729 * self.ledger.trained)

    def user_state(self) -> dict[str, Any]:
        """What the user's own loop had registered, by name."""
        found: dict[str, Any] = join_tree(self.own.record["user"], self.own.tensors)
        return found

    def _is_late(self, engine: Engine) -> bool:
        """Whether the optimizer is made anew when the group has formed."""
        return engine.is_replaced_by_strategy

    def _model_state(self, engine: Engine) -> dict[str, Any]:
        entries = dict(self.checkpoint.tensors)
        entries.update({name: entries[source] for name, source in self.record["tied"].items()})
        entries.update(join_tree(self.record.get("extra", {}), self.checkpoint.ranks[0].tensors))
        return {name: entries[name] for name in engine.model.state_dict() if name in entries}

    def _load_model(self, engine: Engine) -> None:
        check_model(self.checkpoint, dict(engine.model.state_dict()), engine.structure)
        engine.model.load_state_dict(self._model_state(engine))
        saved = self.checkpoint.ranks[0].tensors
        for name, buffer in engine.model.named_buffers():
            found = saved.get(f"buffer.{name}")  # None: it is in the state_dict, or the checkpoint is an older one
            if found is not None and found.shape == buffer.shape:
                buffer.copy_(found)

    def _optimizer_state(self, engine: Engine) -> dict[str, Any]:
        """As `load_state_dict` takes it."""
        is_own = self.record["is_local"] and engine.config.is_local and self._is_known
        part = self.own if is_own else self.checkpoint.ranks[0]
        what = f"checkpoint {self.checkpoint.folder}"
        return join_optimizer(part.record["optimizer"], part.tensors, param_names(engine), engine.optimizer, what)


def find_end(run: Path, slot: int, rank_info: RankInfo) -> Resumed | None:
    """The checkpoint of the end of a run that has trained so many slots; None where it is not there, or not whole."""
    at_end = [folder for folder in find_checkpoints(run) if slot_of(folder) == slot]
    found, _ = first_whole(at_end, lambda folder: Resumed(folder, rank_info))
    return found


def check_model(checkpoint: Checkpoint, model: Mapping[str, Any], structure: str | None) -> None:
    """InputError in one line where the checkpoint is of another model."""
    tied = checkpoint.record["tied"]
    saved = checkpoint.tensors
    extra = checkpoint.record.get("extra")
    if extra is None and (lost := next((name for name in model if name.endswith("_extra_state")), None)):
        raise InputError(
            f"checkpoint {checkpoint.folder}: it is of an earlier version, which did not keep {lost} of the model "
            "(get_extra_state); train anew"
        )
    known: dict[str, tuple[int, ...] | None] = {
        **{name: tuple(t.shape) for name, t in saved.items()},
        **{n: tuple(saved[s].shape) for n, s in tied.items()},
    }
    own = {name: None if name in (extra or {}) else _shape(value) for name, value in model.items()}
    known.update(dict.fromkeys(extra or {}, None))
    for name in [*own, *known]:
        if name not in known or name not in own or known[name] != own[name]:
            theirs = "no such tensor" if name not in known else _describe(known[name])
            ours = "no such tensor" if name not in own else _describe(own[name])
            raise InputError(
                f"checkpoint {checkpoint.folder} is of another model: {name} has {theirs} there and {ours} here"
            )
    if structure is not None and checkpoint.record["structure"] not in (None, structure):
        raise InputError(f"checkpoint {checkpoint.folder} is of another model: its graph computes something else")


def _describe(shape: tuple[int, ...] | None) -> str:
    return "something else than a tensor" if shape is None else f"shape {shape}"


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


@dataclass(frozen=True)
class Found:
    """A checkpoint that all ranks of a group have read; the same on all of them, but for each one's own part."""

    resumed: Resumed
    name: str
    which: int  # a number that no other checkpoint has
    notes: tuple[str, ...]  # those that were passed over, and why

    @property
    def slot(self) -> int:
        return self.resumed.ledger.trained


def has_muon(engine: Engine) -> bool:
    """Whether a MuonAdamW is divided over the ranks, of which nobody has a copy whatever the settings are."""
    return isinstance(engine.optimizer, MuonAdamW) and not engine.config.is_local


def read_newest(engine: Engine, group: Group, out: Path | None, lost: str) -> Found:
    """The newest whole checkpoint of this run, on every rank; a collective.

    One that is damaged, or that a rank cannot read, is passed over. RefusedError on all where none is left: `lost` says
    what cannot be rebuilt.
    """
    info = engine.rank_info
    left = _candidates(engine, out) if group.rank == 0 else []
    notes: list[str] = []
    while True:
        offer = broadcast_json(group, _offer(info, left, notes) if group.rank == 0 else None)
        notes = list(offer["notes"])
        if offer["folder"] is None:
            passed = f" ({notes[0].strip()})" if notes else ""
            copy = "" if has_muon(engine) else "redundancy=1 keeps a copy of every shard, "
            raise RefusedError(
                f"{lost}, and there is no whole checkpoint to go back to{passed}: {copy}save_every=... with out=... "
                "keeps a checkpoint"
            )
        resumed, fault = _read(info, group, offer)
        faults = gather_json(group, fault)
        if group.rank == 0 and info.leader is not None and offer["key"] is not None:
            info.leader.withdraw(offer["key"])
        if not any(faults):
            assert resumed is not None, "no fault"
            return Found(resumed, Path(offer["folder"]).name, int(offer["crc32"]), tuple(notes))
        notes.append(f"  passed over: {next(fault for fault in faults if fault)}")


def _candidates(engine: Engine, out: Path | None) -> list[Path]:
    """On rank 0, newest first: of this run's folder, and the one from which the run was resumed."""
    found = [] if out is None else find_checkpoints(out)
    first = engine.config.resume
    return [*found, *([first] if first is not None and first not in found else [])]


def _offer(info: RankInfo, left: list[Path], notes: list[str]) -> dict[str, Any]:
    """On rank 0: the first of those that are left which is whole; what the others need to read it, too."""

    def one_after_the_other() -> Iterator[Path]:
        while left:
            yield left.pop(0)

    found, faults = first_whole(one_after_the_other(), _read_whole)
    told = {"notes": [*notes, *(f"  passed over: {fault}" for fault in faults)], "folder": None}
    if found is None:
        return told
    names = [RECORD, *listed_files(found.record)]
    key = None
    if not info.roster.is_one_machine and info.leader is not None:
        key = secrets.token_hex(8)
        with suppress(OSError):  # then the others say that they do not get it
            info.leader.share(key, found.folder, names=names)
    folder = found.folder.absolute()
    return {**told, "folder": str(folder), "names": names, "key": key, "crc32": crc32_of(folder / RECORD)}


def _read_whole(folder: Path) -> Checkpoint:
    try:
        return read_checkpoint(folder)
    except OSError as error:
        raise InputError(f"checkpoint {folder} cannot be read: {error.strerror or error}") from error


def _read(info: RankInfo, group: Group, offer: dict[str, Any]) -> tuple[Resumed | None, str]:
    """What this rank reads of the checkpoint, or why it cannot; a collective."""
    folder, fault = Path(offer["folder"]), ""
    if not info.roster.is_one_machine:  # the first rank of each other machine copies it for all ranks there
        ranks = info.roster.local_ranks(info.rank)
        copied = ""
        if not info.is_with_first and ranks[0] == info.rank:
            try:
                copied = str(copy_checkpoint(info.leader, ranks, offer))
            except (InputError, OSError) as error:
                fault = _reason(error)
        copies = gather_json(group, copied)
        if not info.is_with_first:
            folder = Path(copies[ranks[0]])
            if not copies[ranks[0]]:
                return None, fault
    try:
        return Resumed(folder, info), ""
    except (InputError, OSError) as error:
        return None, _reason(error)


def copy_checkpoint(leader: LeaderFiles | None, ranks: tuple[int, ...], offer: dict[str, Any]) -> Path:
    """The files that these ranks read, from the leader's machine into a private folder; OSError where it fails."""
    if leader is None or offer["key"] is None:
        raise InputError("this rank was not told how to reach the leader")
    folder = leader.scratch / f"{Path(offer['folder']).name}-{offer['key']}"
    folder.mkdir()
    leader.get(offer["key"], files_of_ranks(offer["names"], ranks), folder)
    return folder


def _reason(error: Exception) -> str:
    return why_not_written(error) if isinstance(error, OSError) and error.errno is not None else str(error)
