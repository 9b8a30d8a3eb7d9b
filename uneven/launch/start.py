"""What belongs to a run from before its checks to its end: requests, signals, its folder, its place in the list.

Made by launch/run.py for `fit` and the builder, and by api/fit.py for a loop of your own.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uneven.config import RunConfig, Task
from uneven.errors import NOTHING_TRAINED, Terminated
from uneven.files import release_out_folder
from uneven.launch.checks.preflight import Prepared, prepare
from uneven.launch.context import ProcessContext
from uneven.launch.control.folder_lock import HeldFolder
from uneven.launch.control.listing import FINISHED, STOPPED, Listing, describe, describe_result
from uneven.launch.signals import SIGNALS, SignalledRequests
from uneven.launch.standard_streams import open_closed_streams
from uneven.results.state import TrainedState


class Start:
    """Life cycle: made before the checks, from where on SIGTERM is the run's own; kept until the run is over."""

    def __init__(self, context: ProcessContext, grace: float, keeps: bool) -> None:
        """`keeps`: a page and logs in its folder, and a line in the history."""
        self.keeps = keeps
        self.requests = SignalledRequests(grace, ends_process=False)
        self.stoppable = context.stoppable(self.requests, lambda: self._may_leave())
        self.listing: Listing | None = None  # of a process alone; a launcher's ranks are in its own
        self._context = context
        self._may_leave: Callable[[], bool] = lambda: True
        self._held: HeldFolder | None = None  # the run's folder, on the rank that writes there

    def prepare(self, task: Task, config: RunConfig, title: str = "train") -> Prepared:
        """Check the run; its folder is held from then on."""
        prepared = prepare(task, config, self._context, title)
        self._held = prepared.held
        return prepared

    def begin(self, may_leave: Callable[[], bool] = lambda: False) -> None:
        """From now on a SIGTERM has the run saved before the process ends, unless nothing of it is half done.

        `may_leave`, asked on the main thread in a signal handler, says so.
        """
        self._may_leave = may_leave

    def list_run(self, prepared: Prepared, *, is_here: bool) -> None:
        """Put the run on the list of this user's runs, unless a launcher has. `is_here`: it trains in this process.

        A process alone may have two runs at once, and the context shows the one whose worker was made last. So its
        figures are taken for this run only where they name the same folder.
        """
        context, folder = self._context, prepared.config.out
        if not context.is_alone:
            return
        try:
            self.listing = listing = Listing(keeps=self.keeps)
        except OSError:  # no place for a small file: the run is not listed, and trains
            return
        listing.attach(prepared.reporter)
        if is_here:
            names, hosts = [str(device) for device in prepared.devices], [str(listing.about["host"])]
            out = None if folder is None else str(folder)

            def read() -> dict[str, Any]:
                shown = context.show()
                return describe([shown if shown.get("out") == out else {}], names[:1], hosts)

            listing.follow(read)

    def tell_saved(self, folder: Path | None) -> None:
        """The state of the run is in `folder`; the next heartbeat tells the launcher."""
        saved = None if folder is None else str(folder.resolve())
        self._context.status.saved_in(saved)
        if self.listing is not None:
            self.listing.saved = saved

    def release_folder(self) -> None:
        """Release the run's folder: nothing is written to it any more."""
        if self._held is not None:
            self._held.release()

    def end_listing(self, state: TrainedState | None, error: BaseException | None) -> None:
        """The run has ended and is saved, or has failed."""
        if self.listing is None:
            return
        if error is not None:
            self.listing.close(*describe_result(error))
        elif state is None:
            self.listing.close(STOPPED, "it was left before its end")
        else:
            self.listing.close(FINISHED if state.finished else STOPPED, state.stopped or "", state.samples)


@contextmanager
def starting(context: ProcessContext, config: RunConfig, *others: int, keeps: bool = True) -> Iterator[Start]:
    """Around the checks and the start of a run. A SIGTERM inside ends the process: there is nothing to save yet.

    `others` are signals that the run handles beside SIGTERM.
    """
    open_closed_streams()
    start = Start(context, config.grace, keeps)
    if context.gets_signals:
        SIGNALS.add(start.stoppable, signal.SIGTERM, *others)
    try:
        yield start
    except BaseException as error:
        SIGNALS.discard(start.stoppable)
        start.release_folder()
        start.end_listing(None, error)
        if context.leader is not None:
            context.leader.close()
        context.tell_failure(error)
        if isinstance(error, Terminated):
            print(f"uneven: {NOTHING_TRAINED}", file=sys.stderr, flush=True)
            if config.out is not None and context.rank == 0:
                release_out_folder(config.out)
        raise
