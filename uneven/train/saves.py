"""What one rank saves: the run's result, and checkpoints to go on from (train/saved_state.py reads them).

All ranks save at the same slot, where their params agree. Each adds what is its own: random states, its log and, in the
local policies, its optimizer state; rank 0 adds the rest. results/saver.py writes in the background.

[Note: snapshot for a checkpoint] Training goes on while tensors are copied. A CUDA rank enqueues its copies on the
stream that trains, so later steps cannot change them. On a CPU the saver's thread copies, and nobody changes params or
optimizer state before it has: the optimizer's step waits for it (a step pre-hook) and so does a merge. Buffers change
in forward, so they are copied at once; so is everything in a loop of the user's own, which may change params anywhere.

checkpoint_copies=2: every checkpoint is on a second machine, too, in that machine's own folder of the run (Copies). The
*keeper* is the first rank on another machine than rank 0's. When rank 0 has given a checkpoint its name it lets the
leader's file service give it out; the keeper's saver, which has just sent its own part, waits there and copies it. So
nothing else waits: training goes on meanwhile, and the next save begins when the copy is there, as with parts. A copy
is written beside its place, compared with its checksums and renamed.

Before that, whether ranks on several machines can bring their parts to one folder, and how: where the run has a leader
(`uneven run --nodes`, `uneven join`), rank 0 opens the folder to its file service. Elsewhere (torchrun, Slurm) the
machines need a file system in common: rank 0 leaves a mark with a random name in the folder and the others look for it,
because a folder of the same path may be there on every machine.
"""

import copy
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from uneven.average.replica import is_finite
from uneven.comm.gather import broadcast_json, gather_bytes, gather_json
from uneven.comm.group import Group
from uneven.comm.host_copy import copy_to_host_async
from uneven.config import RunConfig, read_every
from uneven.config.names import MonitorMode
from uneven.errors import InputError, MachineError, NotFiniteError
from uneven.files import (
    is_closed,
    make_out_folder,
    make_run_folder,
    mark_as_run,
    mark_of_run,
    partial_folder,
    why_not_written,
)
from uneven.machines.transfer import LeaderFiles
from uneven.machines.wire import WireError
from uneven.parallel.elementwise import changes_nothing
from uneven.policy.ledger import Ledger
from uneven.results.checkpoint import RankPart, Whole, put_in_place
from uneven.results.checkpoint_folders import find_checkpoints, prune, remove_partial, set_aside, slot_of
from uneven.results.record import RECORD, check_files, listed_files, read_record
from uneven.results.saver import Saver
from uneven.results.state import TrainedState, capture_state, join_state, model_fields
from uneven.results.state_tree import split_tree
from uneven.train.engine import Engine
from uneven.train.rank_info import RankInfo
from uneven.train.saved_state import capture_random, param_names, split_optimizer

Take = Callable[[], dict[str, Tensor]]
MOST_BEGUN = 50  # saves that are remembered; one of them is whole


class Survival(Protocol):
    """What knows of ranks that are lost: train/settler.py."""

    def check(self) -> None:
        """GroupLostError where a newer generation was announced."""
        ...


class Saves:
    """Life cycle: made with the worker, `connect` once the group has formed, `save` on all ranks at once, `finish`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saver: Saver | None = None
        self._last: Path | None = None
        self._begun: list[tuple[int, Path]] = []  # every save of this run, whole or not
        self._token = ""
        self._notes: list[str] = []
        self._copies = Copies()
        self._has_hooks = False  # of the optimizer, that wait for a copy
        self.out: Path | None = None  # rank 0's: others need not have been given any
        self._survival: Survival | None = None  # where the run can go on without a rank
        self.why_not: str | None = None  # no checkpoint can be taken of ranks on several machines; all know the same

    def connect(self) -> None:
        """When the group has formed; a collective: all ranks write to one folder, under a name no other run has."""
        info, out = self._engine.rank_info, self._engine.config.out
        token = secrets.token_hex(4)
        own = {"out": None if out is None else str(out.absolute()), "token": token, "run": self._copies.run or token}
        agreed = broadcast_json(info.group, own)
        self.out, self._token = None if agreed["out"] is None else Path(agreed["out"]), agreed["token"]
        leader = None if info.is_with_first else info.leader
        self._saver = Saver(info.rank, info.world_size, self._token, places=info.places, leader=leader)
        if self.out is not None and info.rank == 0:
            remove_partial(self.out)
            if self._engine.config.resume is not None:
                self._prune(self.out)  # a disk that is full, or a larger keep_last before: room for the next one
        if self.out is not None and (why_not := self._open(self.out)) is not None:
            if (save_every := self._engine.config.save_every) is not None:
                raise InputError(f"save_every={save_every!r}: {why_not}")
            self._note(f"Ctrl-C and SIGTERM will save the state, and no checkpoint to go on from: {why_not}")
        elif self.out is not None and self._engine.config.checkpoint_copies > 1:
            for line in self._copies.connect(info, self._engine.config, self.out, self._token, agreed["run"]):
                self._note(line)
        if self._copies_late and not self._has_hooks:
            self._has_hooks = True

            @changes_nothing
            def wait(*_: object) -> None:
                if self._saver is not None:
                    self._saver.wait_taken()

            for optimizer in (self._engine.optimizer, *getattr(self._engine.optimizer, "inner_optimizers", ())):
                optimizer.register_step_pre_hook(wait)

    def _open(self, folder: Path) -> str | None:
        """Let all ranks bring their parts to a folder of rank 0's; why they cannot, the same on all; a collective."""
        self.why_not = open_to_machines(self._engine.rank_info, folder, self._token)
        return self.why_not

    def folder_when_stopped(self) -> Path | None:
        """Where a run that stops is saved: a new folder if it has no `out`; None where it cannot be; a collective."""
        folder = self.out
        if folder is None:
            folder = folder_of_stopped_run(self._engine.rank_info.group)
            self._open(folder)
        return folder if self.can_save() else None

    def can_save(self) -> bool:
        """The same on all ranks; where not, rank 0 says why."""
        if self.why_not is not None:
            self._note(f"no checkpoint is saved: {self.why_not}")
        return self.why_not is None

    def _note(self, line: str) -> None:
        if self._engine.rank_info.rank == 0:
            self._notes.append(line)

    def name_at(self, slot: int) -> str:
        """The folder's name of a checkpoint at this slot."""
        axis, every = self._engine.axis, read_every(self._engine.config.save_every)
        epochs = axis.epochs_before(slot)
        is_epoch = every is not None and every.unit == "epochs" and axis.ends_epoch(slot)
        return f"epoch-{epochs}" if is_epoch else f"step-{slot}"

    def newest(self) -> int | None:
        """The slot of the newest checkpoint that this run can go back to; on the first machine, from any thread."""
        found = next((slot for slot, folder in reversed(self._begun) if folder.exists()), None)
        return self._engine.state.ledger.trained if found is None and self._engine.config.resume is not None else found

    def wait_taken(self) -> None:
        """Before params or optimizer state are changed: [Note: snapshot for a checkpoint]."""
        if self._saver is not None:
            self._saver.wait_taken()

    def save(
        self,
        folder: Path,
        cause: str,
        ledger: Ledger,
        state: Mapping[str, Any],
        callbacks: Sequence[Any],
        stopped: str | None,
    ) -> None:
        """Take a checkpoint here and write it in the background.

        `state` is that of synchronizer and loop, of which all ranks have the same; `callbacks` that of this rank's own.
        """
        assert self._saver is not None, "connected when the group has formed"
        engine = self._engine
        info = self._engine.rank_info
        is_lead = info.rank == 0
        full = engine.full_state() if engine.full_state is not None else None
        values = {**dict(engine.model.named_buffers()), **dict(engine.model.named_parameters())}
        fields, _ = model_fields(engine.model, values if full is None else full.model, engine.optimizer)
        self.check_finite(fields["params"])
        state_dict = engine.optimizer.state_dict() if full is None else full.optimizer
        optimizer, optimizer_tensors = self._saved_state(state_dict)
        random, random_tensors = capture_random(engine.device)
        user, user_tensors = split_tree(engine.state.user_values(), "user")
        scaler = engine.step.precision.scaler
        own = {
            **engine.state.own(),
            "losses": engine.meter.totals.tolist(),
            "optimizer": optimizer,
            "random": random,
            "scaler": scaler.state_dict() if scaler.is_enabled() else None,
            "user": user,
            "callbacks": callbacks,
        }
        late = self._snapshot(optimizer_tensors)
        early = {name: tensor.clone() for name, tensor in {**random_tensors, **user_tensors}.items()}
        if is_lead:
            early |= unsaved_buffers(engine.model) | split_tree(fields["extra"], "extra")[1]
        whole = self._whole(fields, cause, ledger, state, stopped) if is_lead else None

        def take() -> tuple[RankPart, Whole | None]:
            return RankPart({**early, **late()}, own), None if whole is None else whole()

        self.finish()  # the one before: a rank that is lost would be waited for
        self._last = folder
        self._begun = [*self._begun[-MOST_BEGUN:], (ledger.trained, folder)]
        self._saver.start(folder, take, self._after(self._saver, folder))

    def _after(self, saver: Saver, folder: Path) -> Callable[[], None] | None:
        """What the saver's thread does when this rank's files are in place, and on rank 0 the checkpoint is."""
        info = self._engine.rank_info
        copies = self._copies
        partial = saver.next_partial(folder)
        leader, is_lead = info.leader, info.rank == 0

        def give_out() -> None:
            if self.out == folder.parent:
                self._prune(folder.parent)
                copies.give_out(leader, folder, partial)

        def fetch() -> None:
            if copies.fetch(leader, folder.name, partial, lambda: saver.is_closing) and copies.folder is not None:
                self._prune(copies.folder)

        is_keeper = copies.folder is not None and self.out == folder.parent
        return give_out if is_lead else fetch if is_keeper else None

    def _whole(
        self, fields: dict[str, Any], cause: str, ledger: Ledger, state: Mapping[str, Any], stopped: str | None
    ) -> Callable[[], Whole]:
        """What rank 0 adds: the agreed params and buffers, and the record."""
        engine = self._engine
        info = self._engine.rank_info
        params = self._snapshot(fields["params"])
        buffers = {name: tensor.to("cpu", copy=True) for name, tensor in fields["buffers"].items()}
        record = {
            **self._state(fields, stopped=stopped).record(),
            **engine.state.checkpoint(ledger),
            "cause": cause,
            "world_size": info.world_size,
            "devices": [str(device) for device in info.devices],
            "is_local": engine.config.is_local and info.world_size > 1,
            "slot_size": engine.axis.slot_size,
            "order": f"{engine.order.fingerprint(engine.config.epochs):08x}",
            "train_seconds": self.train_seconds,
            "schedule": engine.schedule.state_dict(first_needed=self._first_needed(ledger)),
            **state,
        }
        record = copy.deepcopy(record)  # it is written while training goes on and changes lists that are in it
        best: dict[str, Tensor] | None = None
        if engine.state.kept is not None:
            kept, entry = engine.state.kept
            best = {
                f"{kind}.{name}": tensor
                for kind in ("params", "buffers", "optimizer")
                for name, tensor in kept[kind].items()
            }
            extra, extra_tensors = split_tree(kept["extra"], "extra")
            best |= extra_tensors
            record["kept"] = {"entry": entry, "extra": extra, **{name: kept[name] for name in ("tied", "param_groups")}}
        return lambda: Whole({**params(), **buffers}, record, best)

    def _first_needed(self, ledger: Ledger) -> int:
        return self._engine.schedule_position(ledger.first_untrained)

    @property
    def train_seconds(self) -> float:
        """Over all segments of the run."""
        return self._engine.state.train_seconds + self._engine.recorder.account().training_s

    def finish(self) -> None:
        """Wait until the last checkpoint is written, or until the group is lost, with a rank whose part is missing."""
        if self._saver is not None:
            self._saver.finish(self._check)

    def _check(self) -> None:
        if self._survival is not None:
            self._survival.check()

    def expect_losses(self, survival: Survival) -> None:
        """From now on whoever waits for a checkpoint asks whether a rank was lost."""
        self._survival = survival

    def close(self) -> None:
        info = self._engine.rank_info
        if info.rank == 0 and info.leader is not None and self._token:
            info.leader.withdraw(self._token)
        if self._saver is not None:
            self._saver.close()

    def abandon(self) -> None:
        """The group is lost: a checkpoint that still waits for a rank's part is given up."""
        if self._saver is not None:
            self._saver.close()
            self._notes += self._saver.take_notes()
            self._saver = None

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes if self._saver is None else notes + self._saver.take_notes()

    def result(self, stopped: str | None) -> TrainedState:
        """What the run returns: its last tensors, or those that a callback has kept."""
        tensors, entry = (self.tensors(), None) if self._engine.state.kept is None else self._engine.state.kept
        state = self._state(tensors, entry, stopped)
        self.check_finite(state.params)
        return state

    def tensors(self) -> dict[str, Any]:
        """Copies on the host of the tensor fields of a TrainedState; a collective where something is sharded."""
        engine = self._engine
        if engine.full_state is None:
            return capture_state(engine.model, engine.optimizer)
        full = engine.full_state()
        return join_state(engine.model, engine.optimizer, full.model, full.optimizer)

    def check_finite(self, params: Mapping[str, Tensor]) -> None:
        """NotFiniteError before params are saved that an update has spoilt; on all ranks alike, which hold the same."""
        for name, param in self._engine.model.named_parameters():
            if param.requires_grad and not is_finite(params[name]):
                raise NotFiniteError(
                    f"{name} is not finite after slot {self._engine.state.trained - 1} on rank "
                    f"{self._engine.rank_info.rank}, though losses and gradients were; such params are not saved: the "
                    "learning rate may be too high"
                )

    def _formed_backend(self) -> dict[str, Any]:
        """The transport that is used and the order of its sums, for a replay: ranks that could not share memory after
        all took Gloo, and those on several machines sum machine by machine."""
        group = self._engine.rank_info.group
        found = {name: getattr(group, name, None) for name in ("backend", "machines")}
        return {name: value for name, value in found.items() if value is not None}

    def _state(
        self, tensors: dict[str, Any], best: dict[str, Any] | None = None, stopped: str | None = None
    ) -> TrainedState:
        engine, trained = self._engine, self._engine.state.trained
        is_finished = trained == engine.axis.total
        return TrainedState(
            **tensors,
            history=list(engine.state.history),
            config={**engine.config.to_json(), **self._formed_backend()},
            slot=trained,
            samples=engine.state.samples_before(trained) - engine.state.dropped.samples,
            skipped=list(engine.state.skipped),
            dataset_samples=engine.axis.epoch_samples,
            finished=is_finished,
            stopped=None if is_finished else stopped,
            best=best,
            structure=engine.structure,
            checkpoint=self._last if self._last is not None and self._last.exists() else None,
        )

    def _saved_state(self, state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        """The optimizer's state by param name; None on ranks whose state is that of rank 0."""
        engine = self._engine
        is_own = engine.config.is_local and engine.rank_info.world_size > 1
        if engine.rank_info.rank > 0 and not is_own:
            return None, {}
        return split_optimizer(state, param_names(engine), engine.optimizer_made)

    @property
    def _copies_late(self) -> bool:
        engine = self._engine
        return engine.device.type == "cpu" and engine.full_state is None and not engine.is_own_loop

    def _snapshot(self, tensors: Mapping[str, Tensor]) -> Take:
        """A function for the saver's thread that returns copies on the host of the tensors as they are now."""
        if self._copies_late:
            return lambda: {name: tensor.detach().clone() for name, tensor in tensors.items()}
        copies = {name: copy_to_host_async(tensor) for name, tensor in tensors.items()}
        return lambda: {name: copied() for name, copied in copies.items()}

    def _prune(self, out: Path) -> None:
        config = self._engine.config
        if config.keep_last is not None or config.keep_best is not None:
            name = self._engine.state.monitored or config.monitor  # before the first evaluation nothing is the best
            prune(out, config.keep_last, config.keep_best, name, best_of(name or "", config.monitor_mode))


def folder_of_stopped_run(group: Group) -> Path:
    """A new folder for a run without `out`, that of rank 0 on all ranks; a collective."""
    own = Path("runs") / time.strftime("interrupted-%Y%m%d-%H%M%S")
    first = Path(broadcast_json(group, str(own.absolute())))
    return own if group.rank == 0 else first


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers that are in no state_dict (persistent=False): forward may have changed them."""
    entries = model.state_dict()
    found = {name: tensor for name, tensor in model.named_buffers() if name not in entries}
    return {f"buffer.{name}": tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}


def best_of(metric: str, mode: MonitorMode) -> str:
    """Whether the least ("min") or the largest ("max") value of a metric is the best."""
    if mode != "auto":
        return mode
    return "min" if any(part in metric.lower() for part in ("loss", "error", "perplexity", "mse", "mae")) else "max"


class Copies:
    """Life cycle: made with the run's saves, `connect` with every group; then the saver's thread calls the rest."""

    def __init__(self) -> None:
        self.run = ""  # its id, by which a keeper knows copies of this run from those of another
        self._is_told = False
        self.folder: Path | None = None  # on the keeper: where the copies are
        self._gives_out = False  # on rank 0: there is a keeper
        self._shared = ""  # the last checkpoint that was given out

    def connect(self, info: RankInfo, config: RunConfig, out: Path, token: str, run: str) -> list[str]:
        """Find the keeper and see that it can keep copies; lines for the user. A collective, after `out` was opened.

        `token` is of this group, `run` the id that rank 0 has known since the first one. By an id of its own a machine
        that had left and come back took its copies for those of another run, and moved or removed them.

        InputError on all ranks where it cannot, before the first step; later that is a line like any other.
        """
        self.folder = None
        self._gives_out = False
        self.run = run
        given = f"checkpoint_copies={config.checkpoint_copies}"
        others = [rank for rank in range(info.world_size) if info.roster.machines[rank] != info.roster.machines[0]]
        if not others:
            return self._once(f"  {given}: there is no other machine, so each checkpoint is on this one alone")
        own = (config.out or out).absolute()
        found = broadcast_json(info.group, self._look(info, config, out, own, token, others[0]), others[0])
        host = info.roster.host(others[0])
        if found["is_same"]:
            return self._once(f"  {given}: {host} sees {out}, too, so there is no copy beside it")
        if found["fault"]:
            why = f"{given}: {host} cannot keep copies: {found['fault']}"
            if info.generation == 0:
                raise InputError(why)
            return [f"  {why}; each checkpoint is on {info.roster.host(0)} alone"]
        self._gives_out = info.rank == 0
        self.folder = own if info.rank == others[0] else None
        return self._once(f"  {given}: each checkpoint is copied to {found['folder']} on {host}")

    def _look(self, info: RankInfo, config: RunConfig, out: Path, own: Path, token: str, keeper: int) -> dict[str, Any]:
        """What the keeper finds; a collective. Rank 0 leaves a mark, since machines may have a folder in common."""
        mark = f".state.partial-{token}"  # a name that the next run removes where this one is killed
        fault = "" if info.leader is not None else "it needs 'uneven run --nodes' and 'uneven join'"
        try:
            if info.rank == 0:
                make_run_folder(out)
                (out / mark).touch()
            gather_bytes(info.group, b"")
            is_same = (own / mark).exists()
            if info.rank == keeper and not is_same and not fault:
                fault = self._prepare(config, own)
            gather_bytes(info.group, b"")
        finally:
            if info.rank == 0:
                (out / mark).unlink(missing_ok=True)
        return {"fault": fault, "is_same": is_same, "folder": str(own)}

    def _prepare(self, config: RunConfig, own: Path) -> str:
        """Make the keeper's folder ready, once in a run; why it cannot be. Other runs' files in it are moved aside."""
        try:
            if mark_of_run(own) == self.run:
                pass  # this machine was the keeper before, by another rank or another process
            elif config.resume is None or is_closed(own):
                make_out_folder(own, config.overwrite)
            else:
                slot = slot_of(config.resume) or 0
                set_aside(own, [folder for folder in find_checkpoints(own) if (slot_of(folder) or 0) > slot])
                make_run_folder(own)
            mark_as_run(own, run_id=self.run)
            remove_partial(own)
        except (InputError, MachineError, OSError) as error:
            return str(error)
        return ""

    def _once(self, line: str) -> list[str]:
        lines, self._is_told = [] if self._is_told else [line], True
        return lines

    def give_out(self, leader: LeaderFiles | None, folder: Path, partial: Path) -> None:
        """On rank 0, when a checkpoint is whole: the keeper may read it, and the one before no longer."""
        if not self._gives_out or leader is None:
            return
        names = [RECORD, *listed_files(read_record(folder))]
        before, self._shared = self._shared, _key(partial)
        leader.share(self._shared, folder, names=names)
        if before:
            leader.withdraw(before)

    def fetch(self, leader: LeaderFiles | None, name: str, partial: Path, is_closing: Callable[[], bool]) -> bool:
        """On the keeper, when its part is sent: copy the checkpoint once it is whole. False where it never will be.

        OSError where it cannot be copied (a WireError, too), InputError where it is damaged; nothing is left then.
        """
        assert self.folder is not None, "called on the keeper"
        if leader is None:
            return False
        draft = partial_folder(self.folder / name, partial.name.rpartition("-")[2])
        try:
            draft.mkdir(parents=True)
            if not leader.get_awaited(_key(partial), partial.name, RECORD, draft, is_closing):
                return False
            record: dict[str, Any] = read_record(draft)
            leader.get(_key(partial), list(listed_files(record)), draft)
            check_files(draft, record)
            put_in_place(draft, self.folder / name)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True


def _key(partial: Path) -> str:
    """Under which a checkpoint is given out: the run's token and the number of the save."""
    return partial.name.rpartition("-")[2] + "_whole"


def open_to_machines(info: RankInfo, folder: Path, token: str) -> str | None:
    """None where all ranks can bring parts to this folder of rank 0's, else why not, the same on all; a collective."""
    if info.roster.is_one_machine:
        return None
    if info.leader is not None:
        return _open_at_leader(info, folder, token)
    mark = folder / f".state.partial-{token}"  # a name that the next run removes where this one is killed
    fault = ""
    if info.rank == 0:
        try:
            make_run_folder(folder)
            mark.touch()
        except OSError as error:
            fault = f"cannot write to {folder}: {why_not_written(error)}"
    if fault := broadcast_json(info.group, fault):
        return str(fault)
    seen = gather_json(info.group, mark.exists())
    if info.rank == 0:
        mark.unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty where it is in use
            folder.rmdir() if not all(seen) else None
    hosts = dict.fromkeys(info.roster.host(rank) for rank, is_seen in enumerate(seen) if not is_seen)
    if not hosts:
        return None
    verb = "does" if len(hosts) == 1 else "do"
    return (
        f"{', '.join(hosts)} {verb} not see {folder.absolute()} of {info.roster.host(0)}, where every rank writes its "
        "part of a checkpoint; pass as out=... a folder that all machines share, or start with 'uneven run --nodes' "
        "and 'uneven join', which need none"
    )


def _open_at_leader(info: RankInfo, folder: Path, token: str) -> str | None:
    fault = ""
    if info.rank == 0 and info.leader is not None:
        try:
            info.leader.share(token, folder, places=info.places)
        except (WireError, OSError) as error:
            fault = f"the leader does not take the parts of other machines: {error}"
    return broadcast_json(info.group, fault) or None
