"""One run of `fit` or the builder: check -> resolve the devices -> launch -> wait -> result.

`launch` checks everything that can fail before the first step, prints the resolved configuration once and returns a
Run at once; training goes on in a thread or in rank processes. `Run.join` waits for its end.
"""

import atexit
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from uneven.config import RunConfig, Task
from uneven.errors import InputError, Left, RankError, StoppedError
from uneven.files import release_out_folder
from uneven.hardware.device import Device, needs_ranks
from uneven.hardware.interference import Interference, read_counters
from uneven.launch.checks.preflight import Prepared
from uneven.launch.cleanup import end_all_runs
from uneven.launch.context import ProcessContext, process_context
from uneven.launch.control.listing import STOPPED
from uneven.launch.ended import save_interrupted, save_results
from uneven.launch.environment import OWN_LAUNCHERS
from uneven.launch.instances import rebuild_instances
from uneven.launch.launcher import train_on_ranks
from uneven.launch.signals import SIGNALS, end_process, is_main_thread
from uneven.launch.start import Start, starting
from uneven.launch.training import Program, train_as_rank
from uneven.launch.user_frames import show_user_frames
from uneven.results.progress import Reporter
from uneven.results.state import TrainedState
from uneven.train.requests import Requests
from uneven.train.saved_state import RandomStates

HEARD_S = 2.0  # for a heartbeat, which comes several times a second
Body = Callable[[Requests, Reporter], TrainedState]


class Run:
    """A run in progress. SIGTERM, and Ctrl-C during `join`, stop it after the current step and save its state."""

    def __init__(
        self,
        body: Body,
        prepared: Prepared,
        context: ProcessContext,
        start: Start,
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        """`plan`: what was predicted for it (launch/predicted.py)."""
        self._body, self._plan = body, plan
        self._context = context
        self._config = prepared.config
        self._devices = prepared.devices
        self._reporter = prepared.reporter
        self._start = start
        self._requests, self._stoppable = start.requests, start.stoppable
        self._is_saved = False  # for a caller that was interrupted
        self._is_joined = False  # the main thread waits for the end, and learns how it came
        # Python < 3.13 takes a thread for ended when Ctrl-C hits Thread.join(), so we wait on our own event.
        self._done = threading.Event()
        self._state: TrainedState | None = None
        self._error: BaseException | None = None
        self._epochs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reporter.listen(self._epochs.put)
        # A daemon: a caller that ends without joining must not leave the process training on.
        self._thread = threading.Thread(target=self._run_body, name="uneven-run", daemon=True)
        atexit.register(self._stop_at_exit)
        start.begin()
        self._thread.start()

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(str(device) for device in self._devices)

    def stop(self) -> None:
        """Ask the run to stop after its current step; `join` then returns the state reached."""
        self._requests.stop.set()

    def checkpoint(self) -> None:
        """Ask for a checkpoint at the next slot where all ranks can meet; returns at once, and needs `out`."""
        if self._config.out is None and self._config.resume is None:
            raise InputError("run.checkpoint() needs a folder to write to: add out='runs/my-run'")
        self._requests.save.set()

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The entries of the history as they come, one per epoch and per evaluation; ends with the run.

        `join()` still has to follow. Under `uneven run` and torchrun every rank has its own.
        """
        try:
            self._is_joined = is_main_thread()
            while (entry := self._epochs.get()) is not None:
                self._is_joined = False
                yield entry
                self._is_joined = is_main_thread()
        except KeyboardInterrupt:
            self._finish_interrupted()
            raise
        if self._requests.is_terminated:
            self._done.wait()
            self._finish_terminated()

    def join(self) -> TrainedState:
        """Wait for the end; returns the trained state, or raises what went wrong."""
        self._is_joined = is_main_thread()
        try:
            self._done.wait()
        except KeyboardInterrupt:
            self._finish_interrupted()
            raise
        if self._requests.is_terminated:
            self._finish_terminated()
        elif self._context.stop_requested.is_set():
            # The Ctrl-C was the launcher's: it came as a stop request, and the run has obeyed it.
            self._finish_interrupted()
            raise KeyboardInterrupt
        self._join_thread()
        if self._error is not None:
            show_user_frames(self._error)
            raise self._error
        assert self._state is not None, "a rank that neither failed nor returned a state"
        return self._state

    def _finish_interrupted(self) -> None:
        """First Ctrl-C: stop after this step and save. A second one ends the process at once, with exit code 130."""
        self._requests.interrupt()
        self.stop()
        grace_s = self._config.grace
        try:
            if not self._done.wait(grace_s):
                why = f"not saved within grace={grace_s:g} s: ended"
                self._record_cut(why)
                end_process(signal.SIGINT, why)
        except KeyboardInterrupt:
            try:
                self._record_cut("ended at once by a second Ctrl-C")
            finally:  # a third one
                end_all_runs()
                os._exit(130)
        self._join_thread()
        self._raise_error()
        self._save_interrupted()

    def _record_cut(self, why: str) -> None:
        """Before the process is ended by force: the run stays in the history. `uneven stop` looks there as soon as the
        run's folder is gone, which `end_all_runs` removes."""
        if self._start.listing is not None:
            self._start.listing.record_end(STOPPED, why)

    def _finish_terminated(self) -> None:
        """SIGTERM, and the run has saved: the process ends, unless it is ending already."""
        self._join_thread()
        self._raise_error()
        SIGNALS.leave()

    def _raise_error(self) -> None:
        """Of a run that was told to end: where it had not begun, that is no error."""
        if isinstance(self._error, StoppedError):
            self._reporter.say([str(self._error)])
        elif self._error is not None:
            raise self._error

    def _save_interrupted(self) -> None:
        """Once, by the thread of the run after a SIGTERM, else by the caller's after Ctrl-C."""
        if self._state is not None and self._context.rank == 0 and not self._is_saved:
            self._is_saved = True
            self._start.tell_saved(save_interrupted(self._state, self._reporter))

    def _join_thread(self) -> None:
        # The interpreter must not shut down while a thread still frees tensors: torch's destructors would be unwound
        # halfway, which aborts the process ("terminate called ..."). Held by
        # test_run.py::test_a_caller_that_never_joins_ends_cleanly.
        self._thread.join()
        SIGNALS.restore()
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        """The caller exits without joining: end after the current step, for the reason in `_join_thread`."""
        self.stop()
        self._thread.join()

    def _run_body(self) -> None:
        begin = read_counters(self._context.tree_pid)
        try:
            state = self._body(self._requests, self._reporter)
            if state.folder is not None:  # of a run that was finished before
                self._state = state
                return
            interference = Interference.between(begin, read_counters(self._context.tree_pid))
            is_lead = self._context.rank == 0
            has_page = self._start.keeps and not self._requests.is_terminated  # then the time is for saving
            saved = (state, self._config, self._reporter, interference, is_lead)
            self._state = save_results(*saved, plan=self._plan, has_page=has_page)
            self._start.tell_saved(self._state.folder)
            if not state.finished and state.stopped is None:
                if self._context.environment.launcher in OWN_LAUNCHERS:
                    # It has stopped with its peers, and its own heartbeat reads the request a moment later.
                    self._context.stop_requested.wait(HEARD_S)
                if self._context.ranks.was_peer_terminated():
                    self._requests.terminate()
            for _ in range(2):  # again when no signal can come any more: one may have come since
                if self._requests.is_terminated or self._requests.is_interrupted:
                    self._save_interrupted()
                SIGNALS.discard(self._stoppable, is_joined=self._is_joined)
        except BaseException as error:  # handed to join(), which raises it in the caller's thread
            self._error = error
            self._context.tell_failure(error)
            if self._requests.is_terminated and not self._is_joined:
                self._reporter.say([str(error)])
            if self._config.out is not None and self._context.rank == 0:
                release_out_folder(self._config.out)
        finally:
            self._reporter.close()
            self._start.release_folder()
            self._context.end_saving(self._requests)
            self._start.end_listing(self._state, self._error)
            SIGNALS.discard(self._stoppable, is_joined=self._is_joined)
            self._epochs.put(None)
            self._done.set()


def launch(
    task: Task,
    config: RunConfig,
    *,
    title: str = "train",
    program: Program | None = None,
    on_epoch: Sequence[Callable[[dict[str, Any]], None]] = (),
    plan: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    keeps: bool = True,
) -> Run:
    """Check, print the configuration, start; returns at once. `program` trains in place of the worker's own loop.

    `plan` is what was predicted for this run, and `notes` are lines about its choice. Without `keeps` it leaves
    neither page nor logs, and is not remembered: for a program of many runs.
    """
    context = process_context()
    with starting(context, config, keeps=keeps) as start:
        task, copies = rebuild_instances(task)
        prepared = start.prepare(task, config, title)
        reporter, devices = prepared.reporter, prepared.devices
        reporter.say([*notes, *copies])
        for callback in on_epoch:
            reporter.listen(partial(_at_epoch_end, callback))
        if (finished := prepared.finished) is not None:
            return Run(lambda *_: finished, prepared, context, start)
        starts_ranks = context.is_alone and needs_ranks(devices)
        start.list_run(prepared, is_here=not starts_ranks)
        on_ranks = partial(train_on_ranks, program=program, listing=start.listing)
        train = on_ranks if starts_ranks else partial(_train_in_process, context)
        body = partial(train, replace(task, made=prepared.made), prepared.config, devices)
        return Run(body, prepared, context, start, plan)


def _at_epoch_end(callback: Callable[[dict[str, Any]], None], entry: dict[str, Any]) -> None:
    if not entry.get("is_inside_epoch"):
        callback(entry)


def _train_in_process(
    context: ProcessContext,
    task: Task,
    config: RunConfig,
    devices: tuple[Device, ...],
    requests: Requests,
    reporter: Reporter,
) -> TrainedState:
    """On the run's thread, in the caller's process: one device alone, or one of several ranks already started."""
    device = torch.device(devices[context.rank].torch_name)
    before = RandomStates.read(device)  # the caller goes on as if nothing had been drawn
    context.begin_run(requests)
    try:
        state = train_as_rank(context, task, config, devices, requests, reporter)
        assert state is not None, "Worker.train has a result"
        return state
    except SystemExit as error:
        if context.is_alone or error.code not in (None, 0) or isinstance(error, Left):
            raise
        # sys.exit() in a function of the user's: the process had ended well, and so had the run.
        early = "the script ended with exit code 0 before its run was over"
        raise RankError(early).with_traceback(error.__traceback__) from None
    finally:
        context.leave_group()
        before.restore(device)
