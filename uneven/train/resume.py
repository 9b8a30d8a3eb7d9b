"""Go on from a checkpoint: what train/saves.py has written, given back to one rank.

Resuming happens in two steps. `restore`, before anything is compiled or measured: params, buffers, position on the
axis, ledger, the run's past, and optimizer state where this rank holds all of it (a captured step keeps the tensors'
addresses). `restore_rest`, when the group has formed and the strategy is applied: sharded state, schedule, random
states. On other devices, or another number of them, the data order and every slot's samples stay the same: a rank
that the checkpoint does not have takes rank 0's optimizer state and random numbers of its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uneven.errors import InputError
from uneven.parallel.strategy import FullState
from uneven.policy.ledger import Ledger
from uneven.results.checkpoint import Checkpoint, RankPart, read_checkpoint
from uneven.results.checkpoint_folders import find_checkpoints, first_whole, slot_of
from uneven.results.state_tree import join_tree
from uneven.train.callbacks import CallbackRunner
from uneven.train.engine import Engine
from uneven.train.rank_info import RankInfo
from uneven.train.saved_state import join_optimizer, restore_random
from uneven.train.saves import param_names
from uneven.train.synchronizer import Synchronizer


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
        state.begin_segment({"slot": state.trained, "samples": record["samples"], "devices": self._devices})
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
