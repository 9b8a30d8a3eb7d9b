"""What one rank saves: the run's result, and checkpoints from which it can be resumed (train/resume.py reads them).

All ranks save at the same slot, where their params agree. Each adds what is its own: random states, its log and, in the
local policies, its optimizer state; rank 0 adds the rest. results/saver.py writes in the background.

[Note: snapshot for a checkpoint] Training goes on while tensors are copied. A CUDA rank enqueues its copies on the
stream that trains, so later steps cannot change them. On a CPU the saver's thread copies, and nobody changes params or
optimizer state before it has: the optimizer's step waits for it (a step pre-hook) and so does a merge. Buffers change
in forward, so they are copied at once; so is everything in a loop of the user's own, which may change params anywhere.
"""

import copy
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.average.replica import is_finite
from uneven.comm.gather import broadcast_json
from uneven.comm.group import Group
from uneven.comm.host_copy import copy_to_host_async
from uneven.config import read_every
from uneven.config.names import MonitorMode
from uneven.errors import InputError, NotFiniteError
from uneven.parallel.elementwise import changes_nothing
from uneven.policy.ledger import Ledger
from uneven.results.checkpoint import RankPart, Whole
from uneven.results.checkpoint_folders import prune, remove_partial
from uneven.results.saver import Saver
from uneven.results.state import TrainedState, capture_state, join_state, model_fields
from uneven.results.state_tree import split_tree
from uneven.train.copies import Copies, open_to_machines
from uneven.train.engine import Engine
from uneven.train.saved_state import capture_random, split_optimizer

Take = Callable[[], dict[str, Tensor]]
MOST_BEGUN = 50  # saves that are remembered; one of them is whole


class Survival(Protocol):
    """What knows of ranks that are lost: train/elastic/settler.py."""

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
                self.wait_taken()

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


def param_names(engine: Engine) -> list[str]:
    """The names of the optimizer's params, in its order."""
    names = {param: name for name, param in engine.model.named_parameters()}
    optimizer: Optimizer = engine.optimizer
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [names.get(param, f"unnamed.{place}") for place, param in enumerate(params)]


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
