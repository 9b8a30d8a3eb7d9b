"""The user's callbacks on one rank: called at fixed points of the run, and unable to hang or kill the other ranks.

Every rank calls its own copies of them, in its own process. [Note: what a callback asks for] A callback runs no
collective. What it asks for (a stop, to keep this state) and what it raises is only noted, and ranks exchange their
notes where all of them come: a stop request travels with the next step or round, and the rest in `agree`, after
on_start, evaluations and checkpoints and at the end of the run. So an exception on one rank ends the run on all ranks.
Called by train/worker.py; tests/train/test_callbacks.py.
"""

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.config import HOOKS
from uneven.errors import InputError, RankError
from uneven.train.engine import Engine


class Callback:
    """What a run calls. Override any of the methods; an object that has only some of them serves as well.

    Each rank calls its own copy in its own process: `info.is_lead` is true on one of them. A callback must not wait
    for other ranks. Attributes that it sets stay in the rank's process where a run has several devices.
    """

    def on_start(self, info: "CallbackInfo") -> None:
        """Before the first step."""

    def on_step(self, info: "CallbackInfo") -> None:
        """After a step: on every rank with the exact policies, with the local ones on the rank that trained it."""

    def on_round(self, info: "CallbackInfo") -> None:
        """After an average was merged: local policies on several devices alone."""

    def on_eval(self, info: "CallbackInfo") -> None:
        """After an evaluation, on every rank, with the same metrics on all."""

    def on_save(self, info: "CallbackInfo") -> None:
        """After a checkpoint was written to `info.path`, on every rank."""

    def on_end(self, info: "CallbackInfo") -> None:
        """After the last step, when all ranks hold the same params. A run that fails does not come here."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain JSON; each rank's is written into every checkpoint.

        A rank that joins a run begins with that of another rank.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In a resumed run, and on a rank that joins one, before on_start: what `state_dict` returned.

        Later where ranks were lost or joined: an evaluation or checkpoint that was interrupted is done again.
        """


@dataclass(frozen=True)
class CallbackInfo:
    """Where the run is. Read-only; what a callback wants changed it asks for by `stop` and `keep_state`."""

    step: int  # slots of the axis that are trained; never a rank's own count
    epoch: int  # the one that the step lies in; the first is 1
    samples: int  # of all ranks together
    total_steps: int
    metrics: Mapping[str, float]  # of the last evaluation, with its train_loss; the same on all ranks
    history: Sequence[Mapping[str, Any]]
    rank: int
    world_size: int
    path: Path | None  # on_save: the folder of the checkpoint
    stopped: str | None  # on_end: why the run ended early, where a callback asked for it
    _engine: Engine = field(repr=False)
    _requests: "_Requests" = field(repr=False)

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0: the one to print or to write a file."""
        return self.rank == 0

    @property
    def loss(self) -> float:
        """This rank's mean training loss since the last entry of the history, NaN where there is none yet.

        On CUDA it may lag a little."""
        loss = self._engine.meter.glance()
        return float("nan") if loss is None else loss

    @property
    def lr(self) -> float | None:
        """The learning rate of the first param group that has one; None with an optimizer that finds its own."""
        return self._engine.schedule.first_rate

    @property
    def model(self) -> nn.Module:
        """This rank's own model, in the middle of training; with a sharded strategy it holds shards."""
        return self._engine.model

    def stop(self, reason: str = "") -> None:
        """Ask for the end of the run: all ranks stop after the same step. The state then says why in `stopped`.

        After on_eval and on_save that is this step, after on_step and on_round on several devices a later one.
        """
        self._requests.stop(reason)

    def keep_state(self) -> None:
        """In on_eval: the run's result is to hold the tensors of this moment, unless a later call replaces them."""
        self._requests.keep()


class Agreed(NamedTuple):
    """What the callbacks of all ranks have asked for."""

    stopped: str | None = None
    keeps: bool = False


class Moment(NamedTuple):
    """The callbacks of this rank when an event begins that may have to be reached again."""

    states: list[dict[str, Any]]  # of `CallbackRunner.state_dict`
    agreed: str | None  # CallbackRunner.stopped
    stopped: str | None  # asked for, as `keeps`
    keeps: bool


class _Requests:
    """What the callbacks of this rank have asked for and not yet agreed upon with the other ranks."""

    def __init__(self) -> None:
        self.hook, self.caller = "", ""
        self.stopped: str | None = None
        self.keeps = False
        self.failure: dict[str, str] | None = None
        self.error: Exception | None = None

    def stop(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = f"{self.caller}: {reason}" if reason else f"{self.caller} asked for it"

    def keep(self) -> None:
        if self.hook != "on_eval":
            raise InputError(
                f"keep_state() was called in {self.hook}: only in on_eval do all ranks hold the same params"
            )
        self.keeps = True

    def fail(self, error: Exception, step: int) -> None:
        frame = next(reversed(traceback.extract_tb(error.__traceback__)), None)
        where = "" if frame is None else f" ({Path(frame.filename).name}, line {frame.lineno})"
        is_input = isinstance(error, InputError)
        cause = f"{error}" if is_input else f"{type(error).__name__}: {error}{where}"
        self.error = error
        self.failure = {"who": f"{self.caller}.{self.hook}", "when": f"at step {step}", "cause": cause}
        self.failure["kind"] = "input" if is_input else "other"


class CallbackRunner:
    """Life cycle: made with the worker; `run` at every point of the run, `agree` where all ranks come."""

    def __init__(self, callbacks: Sequence[Any], engine: Engine) -> None:
        self._engine = engine
        self._hooks = {hook: [(type(c).__name__, f) for c in callbacks if (f := _hook(c, hook))] for hook in HOOKS}
        self._callbacks = list(callbacks)
        self._requests = _Requests()
        self.is_any = any(self._hooks.values())
        self.is_active = self.is_any  # whether any rank has callbacks: then all ranks take part in `agree`
        self.awaits_saves = False  # whether any rank's have on_save, which is called when the checkpoint is written
        self.metrics: Mapping[str, float] = {}  # of the last evaluation
        self.stopped: str | None = None  # why the run ends early: agreed by all ranks

    def connect(self, *, is_active: bool, awaits_saves: bool) -> None:
        """What any rank's callbacks need: then all ranks take part."""
        self.is_active, self.awaits_saves = is_active, awaits_saves

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Those of the last evaluation."""
        self.metrics = metrics

    def has(self, hook: str) -> bool:
        return bool(self._hooks[hook]) and self._requests.failure is None

    def run(self, hook: str, step: int, history: Sequence[Mapping[str, Any]], path: Path | None = None) -> int:
        """Call every callback that has this hook; returns the ns they took. After a failure none is called."""
        if not self.has(hook):
            return 0
        began_ns = self._engine.recorder.enter("user")
        info = self._info(step, history, path)
        for name, function in self._hooks[hook]:
            self._requests.hook, self._requests.caller = hook, name
            try:
                function(info)
            except Exception as error:  # the other ranks must hear of it: `agree` raises it on all of them
                self._requests.fail(error, info.step)
                break
        return self._engine.recorder.enter("other") - began_ns

    def state_dict(self, *, is_needed: bool = True) -> list[dict[str, Any]]:
        """This rank's callbacks in order, each with its state where it keeps one; plain JSON.

        A state that cannot be kept ends the run where it `is_needed`, and else counts as none.
        """
        return [{"class": type(one).__name__, "state": self._state_of(one, is_needed)} for one in self._callbacks]

    def _state_of(self, callback: Any, is_needed: bool) -> Any:
        function = _hook(callback, "state_dict")
        if function is None or self._requests.failure is not None:
            return None
        self._requests.hook, self._requests.caller = "state_dict", type(callback).__name__
        try:
            return json.loads(json.dumps(function()))
        except Exception as error:  # the other ranks must hear of it, as in `run`
            plain = f"a callback's state must be plain JSON, without tensors or objects ({error})"
            if is_needed:
                cause = InputError(plain) if isinstance(error, TypeError) else error
                self._requests.fail(cause, self._engine.state.trained)
        return None

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> list[str]:
        """Hand every callback its state, before on_start; returns what does not fit, in words.

        The second of a class gets the state of the second: callbacks may be added, left out or put in another order.
        """
        left = [one for one in saved if one["state"] is not None]
        fresh = []
        for callback in self._callbacks:
            name = type(callback).__name__
            found = next((one for one in left if one["class"] == name), None)
            if _hook(callback, "load_state_dict") is None or self._requests.failure is not None:
                continue
            if found is None:
                fresh.append(name)
                continue
            left.remove(found)
            self._load(callback, found["state"])
        lines = [f"callback {name} has no state in the checkpoint and starts fresh" for name in fresh]
        return lines + [
            f"the checkpoint has the state of a callback {one['class']} that this run lacks" for one in left
        ]

    def _load(self, callback: Any, state: Any) -> bool:
        """Whether it has gone on from this state; one that is None, or after a failure, is not loaded."""
        function = _hook(callback, "load_state_dict")
        if function is None or state is None or self._requests.failure is not None:
            return False
        self._requests.hook, self._requests.caller = "load_state_dict", type(callback).__name__
        try:
            function(state)
        except Exception as error:  # as in `run`
            self._requests.fail(error, self._engine.state.trained)
        return True

    def moment(self) -> Moment:
        """Where the callbacks are now, for `go_back_to`."""
        return Moment(self.state_dict(is_needed=False), self.stopped, self._requests.stopped, self._requests.keeps)

    def go_back_to(self, before: Moment) -> None:
        """Forget what they have counted and asked for since then: the same hooks are called again, and ask again.

        Where one of them keeps no state, a request to keep the tensors stays: that one may know that it has asked.
        """
        stateless = [
            callback
            for callback, saved in zip(self._callbacks, before.states, strict=True)
            if not self._load(callback, saved["state"])
        ]
        asks_once = any(_hook(callback, "on_eval") is not None for callback in stateless)
        self.stopped, self._requests.stopped = before.agreed, before.stopped
        self._requests.keeps = before.keeps or (self._requests.keeps and asks_once)

    def _info(self, step: int, history: Sequence[Mapping[str, Any]], path: Path | None) -> CallbackInfo:
        axis, rank_info = self._engine.axis, self._engine.rank_info
        return CallbackInfo(
            step=step,
            epoch=axis.slot(max(0, step - 1)).epoch + 1,
            samples=self._engine.state.samples_before(step),
            total_steps=axis.total,
            metrics=MappingProxyType(self.metrics),
            history=tuple(history),
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            path=path,
            stopped=self.stopped,
            _engine=self._engine,
            _requests=self._requests,
        )

    def is_stopping(self) -> bool:
        """Whether a callback of this rank has asked for the end of the run, or failed."""
        return self._requests.stopped is not None or self._requests.failure is not None

    def forget_keep(self) -> None:
        """The evaluation is over on all ranks, with what was asked for after it. Not before: a rank may be lost."""
        self._requests.keeps = False

    def forget_requests(self) -> None:
        """What was asked for came after the checkpoint that all ranks go back to."""
        self._requests.stopped, self._requests.keeps = None, False

    def agree(self, group: Group) -> Agreed:
        """Exchange what was asked for; a collective. Raises on every rank where a callback of any rank failed."""
        if not self.is_active:
            return Agreed()
        asked = torch.tensor([self.is_stopping(), self._requests.keeps], dtype=torch.float64)
        is_ending, keeps = group.all_reduce_max(asked).wait().tolist() if group.world_size > 1 else asked.tolist()
        if not is_ending:
            return Agreed(None, bool(keeps))
        note = {"stopped": self._requests.stopped, "failure": self._requests.failure}
        notes = gather_json(group, note)
        for rank, other in enumerate(notes):
            if other["failure"] is not None:
                self._raise(rank, group, other["failure"])
        self.stopped = next(other["stopped"] for other in notes if other["stopped"] is not None)
        return Agreed(self.stopped, bool(keeps))

    def _raise(self, rank: int, group: Group, failure: Mapping[str, str]) -> None:
        message = f"callback {failure['who']} failed on rank {rank} {failure['when']}: {failure['cause']}"
        # The launcher shows the rank that failed by itself, not a peer of it: launch/watch/watch.py.
        seen = "" if rank == group.rank else f" (seen by its peer, rank {group.rank})"
        kind = InputError if failure["kind"] == "input" else RankError
        raise kind(message + seen) from (self._requests.error if rank == group.rank else None)


def _hook(callback: Any, hook: str) -> Callable[..., Any] | None:
    """The callback's method, or None where it has none of its own."""
    function = getattr(callback, hook, None)
    is_inherited = getattr(function, "__func__", None) is getattr(Callback, hook)
    return function if callable(function) and not is_inherited else None
