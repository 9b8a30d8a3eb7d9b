"""A rank process: `python -P -m uneven.launch.rank FOLDER NUMBER`, started by launch/local_ranks.py.

The launcher has written FOLDER (private, on this machine): plan-N.json and, for `fit`, the payload and its tensors. The
process runs one of two programs, the task of the payload or a user's script, in the same process context. It leaves
result-N/ or error-N.json with its own traceback. It ends with os._exit: torch's Gloo threads sometimes abort a clean
interpreter shutdown. Torch is imported only once this process runs on its own cores.
"""

import gc
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uneven.errors import USER_ERRORS, Left, LeftLoopError, NotFiniteError, Terminated
from uneven.launch.cleanup import end_cut_off_rank, end_rank, record_pid, watch_launcher
from uneven.launch.control.rank_log import FOLDER as LOGS
from uneven.launch.control.rank_log import begin_log, end_log, rank_file
from uneven.launch.late_dynamo import load_dynamo_late
from uneven.launch.processes import INTERRUPTED, leave_error
from uneven.launch.signals import RankSignal
from uneven.launch.standard_streams import open_closed_streams

if TYPE_CHECKING:
    from uneven.launch.context import ProcessContext

RESULT_POLL_S = 0.01


def main(folder: Path, number: int) -> None:
    open_closed_streams()
    # Ctrl-C reaches the whole terminal's process group; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sigterm = RankSignal(signal.SIGTERM, Terminated)
    plan = json.loads((folder / f"plan-{number}.json").read_text())
    record_pid(folder, number)
    begin_log(folder / LOGS / rank_file(plan["rank"]), folder)
    watch_launcher(folder, plan["launcher_pid"])
    code = 0
    context: ProcessContext | None = None
    try:
        context = _make_context(plan, number)
        context.signals[signal.SIGTERM] = sigterm
        end = partial(_end_cut_off, context, folder, number, own_member(plan))
        if plan["script"] is None:
            _train(context, folder, number, end)
        else:
            from uneven.launch.script import execute_as_rank

            execute_as_rank(context, folder, plan["script"], end)
        context.close_heartbeat()
    except (KeyboardInterrupt, Terminated):
        code = INTERRUPTED
        if context is not None:
            with suppress(RuntimeError):  # the launcher may be gone
                context.close_heartbeat()  # it says where the state was saved
    except Left:
        pass  # it has handed in what it trained, and the others go on without it
    except BaseException as error:
        code = 1
        if isinstance(error, NotFiniteError) and context is not None:
            context.close_heartbeat()  # it carries the lines about the steps that were skipped
        _report_error(error, folder, number, own_member(plan), context)
    sys.stdout.flush()
    sys.stderr.flush()
    end_log()
    end_rank(folder, plan["launcher_pid"], code)


def _make_context(plan: dict[str, Any], number: int) -> "ProcessContext":
    """Place the process on its cores, then load torch and say who it is.

    What is loaded stays: the collector would go through all of torch's objects three times meanwhile, and again with
    every full collection of the training.
    """
    from uneven.hardware.cores import pin

    pin(plan["cores"])
    load_dynamo_late()
    gc.disable()
    import torch

    from uneven.hardware.roster import Roster
    from uneven.launch.context import ProcessContext
    from uneven.launch.environment import BegunWithout, LaunchEnvironment

    gc.freeze()
    gc.enable()
    torch.set_num_threads(plan["threads"])
    if plan["address"] is not None:
        from uneven.hardware.network import read_interfaces
        from uneven.launch.external.interface import keep_gloo_at

        keep_gloo_at(plan["address"], read_interfaces())
    roster = Roster.from_json(plan)
    rank, (host, port) = plan["rank"], plan["store"]
    environment = LaunchEnvironment(
        "fit" if plan["script"] is None else "uneven run",
        rank=rank,
        world_size=len(roster.devices),
        local_rank=number,
        local_world_size=len(roster.local_ranks(rank)),
        host=host,
        port=port,
        member=own_member(plan),
        door=None if plan["door"] is None else tuple(plan["door"]),
        without=None if plan["without"] is None else BegunWithout(**plan["without"]),
    )
    settings = {} if plan["script"] is None else plan["script"]["settings"]
    return ProcessContext(environment, roster, settings, joins=plan["joins"])


def own_member(plan: dict[str, Any]) -> str:
    """The identity of this process."""
    return str(plan["members"][plan["rank"]])


def _train(context: "ProcessContext", folder: Path, number: int, end: Callable[[], None]) -> None:
    """Run the payload: the worker trains, or the program that came with it; rank 0 leaves the collected state. `end` is
    called when the launcher cannot be reached.

    Every rank has that state, and stays until it is written: where rank 0 is lost meanwhile, the next one writes it.
    """
    from uneven.launch.checks.trial import compare_in_rank
    from uneven.launch.context import set_process_context
    from uneven.launch.payload import read_payload
    from uneven.launch.run_status import SentLines
    from uneven.launch.training import has_result, train_as_rank, write_state
    from uneven.train.requests import Requests
    from uneven.train.worker import Worker

    requests, devices = Requests(), context.devices("auto")
    output = SentLines()
    context.begin_run(requests)
    context.start_heartbeat(lambda: output.status, end)
    task, config, program = read_payload(folder)
    task = compare_in_rank(task, output.say) if context.rank == 0 else task
    set_process_context(context)  # for what the user's functions ask of it, as Ddp.rank()
    output.loaded()
    own_folder = folder / f"result-{number}"
    own_folder.mkdir()
    run = Worker.train if program is None else lambda worker: program(worker, own_folder)
    state = train_as_rank(context, task, config, devices, requests, output, run)
    while state is not None and not has_result(folder):
        if context.ranks.is_first(context.rank):
            write_state(state, own_folder)
        else:
            time.sleep(RESULT_POLL_S)
    context.end_run()


def _end_cut_off(context: "ProcessContext", folder: Path, number: int, member: str) -> None:
    end_cut_off_rank(lambda error: _report_error(error, folder, number, member, context))


def _report_error(
    error: BaseException, folder: Path, number: int, member: str, context: "ProcessContext | None"
) -> None:
    """Leave error-N.json for the launcher."""
    from uneven.launch.user_frames import show_user_frames, user_place

    place = user_place(error)
    show_user_frames(error)
    known = {**USER_ERRORS, "left": LeftLoopError}
    report = {
        "time": time.time(),
        "member": member,
        "kind": next((name for name, kind in known.items() if isinstance(error, kind)), "other"),
        "message": str(error),
        "what": f"{type(error).__name__}: {error}",
        "place": place,
        "slot": 0 if context is None else context.slot,
        "has_trained": context is not None and context.has_trained,
        "traceback": "".join(traceback.format_exception(error)),
    }
    end_log(str(report["traceback"]))
    leave_error(folder, number, report)


if __name__ == "__main__":
    if sys.version_info < (3, 11):
        del sys.path[0]  # see OWN_PATH in launch/local_ranks.py
    main(Path(sys.argv[1]), int(sys.argv[2]))
