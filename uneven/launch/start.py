"""What belongs to a run from before its checks to its end: requests, signals, its folder, its place in the list.

Made by launch/run.py for `fit` and the builder, and for a loop of your own (api/fit.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.config import RunConfig
from uneven.hardware.device import Device
from uneven.launch.context import ProcessContext
from uneven.launch.control.folder_lock import HeldFolder
from uneven.launch.control.listing import FINISHED, STOPPED, Listing, describe, describe_result
from uneven.launch.signals import Stoppable
from uneven.results.progress import Reporter
from uneven.results.state import TrainedState
from uneven.train.requests import Requests


@dataclass
class Start:
    """Life cycle: made before the checks, from where on SIGTERM is the run's own; kept until the run is over."""

    requests: Requests
    stoppable: Stoppable
    has_begun: bool = False
    keeps: bool = True  # a page and logs in its folder, and a line in the history
    held: HeldFolder | None = None  # the run's folder, on the rank that writes there
    listing: Listing | None = None  # of a process alone; a launcher's ranks are in its own

    def list_run(
        self, context: ProcessContext, reporter: Reporter, config: RunConfig, devices: tuple[Device, ...] | None
    ) -> None:
        """Put the run on the list of this user's runs, unless a launcher has; with `devices` it is in this process.

        A process alone may have two runs at once, and the context shows the one whose worker was made last. So its
        figures are taken for this run only where they name the same folder.
        """
        if not context.is_alone:
            return
        try:
            self.listing = listing = Listing(keeps=self.keeps)
        except OSError:  # no place for a small file: the run is not listed, and trains
            return
        listing.attach(reporter)
        if devices is not None:
            names, hosts = [str(device) for device in devices], [str(listing.about["host"])]
            out = None if config.out is None else str(config.out)

            def read() -> dict[str, Any]:
                shown = context.show()
                return describe([shown if shown.get("out") == out else {}], names[:1], hosts)

            listing.follow(read)

    def tell_saved(self, context: ProcessContext, folder: Path | None) -> None:
        """The state of the run is in `folder`; the next heartbeat tells the launcher."""
        context.status.saved = None if folder is None else str(folder.resolve())
        if self.listing is not None:
            self.listing.saved = context.status.saved

    def release_folder(self) -> None:
        """Release the run's folder: nothing is written to it any more."""
        if self.held is not None:
            self.held.release()

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
