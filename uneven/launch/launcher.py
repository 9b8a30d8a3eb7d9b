"""Starts a run's rank processes on this machine and collects what they leave. launch/watch/watch.py watches over them.

Called by `fit` (launch/run.py) with a task, by `uneven run` (launch/script.py) with a script, and by bench/ with a
program. When `run_ranks` returns or raises, no process and no file of the run is left, the daemon that serves slices
of a GPU included.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from uneven.comm.store import open_store
from uneven.config import RunConfig, Task
from uneven.errors import InputError, MachineError
from uneven.hardware.device import Device
from uneven.hardware.mps import check_slices
from uneven.hardware.roster import Roster
from uneven.launch.checks.settings import begin_without, keep_step_size
from uneven.launch.control.listing import Listing, listed
from uneven.launch.environment import BegunWithout, new_member_id
from uneven.launch.local_ranks import RunPlan, local_ranks
from uneven.launch.nodes.remote import AllRanks
from uneven.launch.payload import write_payload
from uneven.launch.training import Program, read_result
from uneven.launch.watch.generations import Generations, count_ranks
from uneven.launch.watch.watch import LostAtStartError, Watch
from uneven.results.progress import Reporter
from uneven.results.state import TrainedState
from uneven.train.requests import Requests

T = TypeVar("T")


def train_on_ranks(
    task: Task,
    config: RunConfig,
    devices: tuple[Device, ...],
    requests: Requests,
    reporter: Reporter,
    program: Program | None = None,
    listing: Listing | None = None,
) -> TrainedState:
    """Train on one process per device; the state that the ranks collected. `program` trains in place of the worker.

    Without a `listing` it is a measurement of these very devices, and not begun again without one.
    """

    def run(left: tuple[Device, ...], without: BegunWithout | None) -> TrainedState:
        own = config if without is None else keep_step_size(begin_without(config, without, left), without)
        content = (task, own, program)
        return run_ranks(content, left, requests, reporter, read_result, listing=listing, without=without)

    if program is not None or listing is None:
        return run(devices, None)
    return without_lost(run, devices, reporter)


def without_lost(
    run: Callable[[tuple[Device, ...], BegunWithout | None], T], devices: tuple[Device, ...], reporter: Reporter
) -> T:
    """What `run` returns for these devices; again without those that are lost before the first step of any.

    Nothing was trained then, so whatever ranks had done is thrown away with their processes.
    """
    places = tuple(range(len(devices)))
    without: BegunWithout | None = None
    while True:
        try:
            return run(tuple(devices[place] for place in places), without)
        except LostAtStartError as lost:
            places = tuple(place for number, place in enumerate(places) if number not in lost.causes)
            them = "it" if len(lost.causes) == 1 else "them"
            begin = count_ranks(len(places), "begins", "begin")
            why = f"{'; '.join(lost.causes.values())} before the first step: {begin} without {them}"
        reporter.say([why])
        before = [] if without is None else [without.why]
        without = BegunWithout("; ".join([*before, why]), places, len(devices))


def run_ranks(
    content: tuple[Task, RunConfig, Program | None] | None,
    devices: tuple[Device, ...],
    requests: Requests,
    reporter: Reporter,
    collect: Callable[[Path], T],
    script: dict[str, Any] | None = None,
    listing: Listing | None = None,
    without: BegunWithout | None = None,
) -> T:
    """Run on one process per device, then `collect` from the folder they wrote to (rank r: `result-r`).

    In place of `content` it may be a user's script: its path, args and the settings of the command line. Ranks that
    are lost may be started again, unless a program of the caller's own trains. `listing` is the caller's to close;
    without one the run is listed while it is on, and not remembered. LostAtStartError where ranks are lost before the
    first step of any; `without` is what has become of such a try.
    """
    check_slices(devices)
    if listing is None:
        with listed(Listing(None if script is None else script["path"], keeps=False)) as own:
            return run_ranks(content, devices, requests, reporter, collect, script, own, without)
    folder = listing.folder
    store, port = open_store()
    try:
        members = tuple(new_member_id(str(device)) for device in devices)
        roster = Roster.on_one_machine(devices)
        placement = RunPlan(roster, members, ("127.0.0.1", port), without=without)
        if content is not None:
            _write_content(content, folder)
        with local_ranks(folder, placement, script, reporter.say) as processes:
            ranks = AllRanks(processes, (), folder, requests)
            has_restarts = content is not None and content[1].restarts > 0
            watch = Watch(ranks, store, folder, Generations(roster, members, without), reporter)
            watch.wait(requests, listing.hear, keeps_payload=has_restarts)
            return collect(folder)
    finally:
        reporter.leave_bars()
        listing.clear()
        del store


def _write_content(content: tuple[Task, RunConfig, Program | None], folder: Path) -> None:
    try:
        write_payload(content, folder)
    except MachineError:
        raise
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the model, optimizer, step, data set or callbacks cannot be sent to the rank processes ({why}); use "
            "functions and data that can be pickled (a callback opens its files in on_start), or one device"
        ) from error
