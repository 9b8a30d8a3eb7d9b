"""`uneven run script.py`: the user's script on one process per device, as `python script.py args` would run it.

`run_script` is the command. With one device there is nothing to start: the script runs in this process (unless the
device is a slice of a GPU). Otherwise the launcher starts rank processes, and each of them calls `execute_as_rank`.
Either way `fit`, `Ddp.builder`, `Ddp.setup` and `Ddp.wrap` in the script find the process context that is set here.
"""

import atexit
import importlib.util
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from uneven.config import check_settings
from uneven.errors import NOTHING_TRAINED, InputError, RefusedError, StoppedError, Terminated
from uneven.files import check_resumed_folder, close_folder
from uneven.hardware.cores import available_cores, check_count
from uneven.hardware.device import Device, needs_ranks, parse_devices
from uneven.hardware.gpus import usable_devices
from uneven.hardware.preflight import check_device, refuse_unsupported
from uneven.launch.control.listing import Listing, listed
from uneven.launch.control.rank_log import begin_log
from uneven.launch.environment import BegunWithout, LaunchEnvironment
from uneven.launch.external.variables import read_launcher
from uneven.launch.find_script import Script, refuse_no_file, uses_uneven
from uneven.launch.signals import SIGNALS, RankSignal, SignalledRequests, Stoppable
from uneven.machines.code import digest, read_code
from uneven.results.progress import Reporter
from uneven.train.requests import GRACE_S, Requests

if TYPE_CHECKING:
    from uneven.launch.context import ProcessContext
    from uneven.launch.visitor import Visitor

CALL_UNEVEN = "call fit or Ddp.setup in it, or start it by: python"


def run_script(script: Script, settings: Mapping[str, Any], plan: Mapping[str, Any] | None = None) -> None:
    """`settings` replace those in the script; 'devices' decides where it runs. KeyboardInterrupt after Ctrl-C.

    `plan` is what was predicted for its run (launch/predicted.py).
    """
    check_script(script, settings)
    if (started := read_launcher()) is not None:
        # srun, torchrun or a pod has started this process as one of its ranks: it takes part as that one.
        if started.world_size > 1:
            refuse_plain_script(script, started.world_size, "process")
        _execute_here(script, settings, started)
        return
    names = settings.get("devices", "auto")
    devices = tuple(usable_devices()) if names == "auto" else parse_devices(names)
    for device in devices:
        check_device(device)
    check_count(devices, available_cores())
    if not needs_ranks(devices):
        _execute_here(script, settings, None, plan)
        return
    if len(devices) > 1:
        refuse_plain_script(script, len(devices))
    run_on_ranks(script, devices, Reporter("lines"), settings, plan)


def check_script(script: Script, settings: Mapping[str, Any]) -> None:
    """InputError or MachineError for what is wrong whatever the devices are; loads no torch."""
    refuse_unsupported()
    refuse_no_file(script.path)
    check_settings(settings)  # before any rank starts; the ranks check them again with the script's own
    if (resume := settings.get("resume")) not in (None, "auto"):
        check_resumed_folder(Path(resume))


def refuse_plain_script(script: Script, times: int, per: str = "device") -> None:
    """InputError for a script that cannot call uneven: every process would train all of it by itself."""
    if not uses_uneven(script):
        raise InputError(
            f"{script} never imports uneven to train with it: it would be trained {times} times, once per {per}; "
            f"{CALL_UNEVEN} {script}"
        )


def run_on_ranks(
    script: Script,
    devices: tuple[Device, ...],
    reporter: Reporter,
    settings: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    *,
    keeps: bool = True,
) -> None:
    """The script on one process per device, a single one included; `reporter` prints the launcher's own lines.

    Without `keeps` the run is not remembered: for a program of many runs.
    """
    from uneven.launch.launcher import run_ranks, without_lost  # imports torch

    order = {**script_order(script, settings or {}), "plan": plan}

    with listed(Listing(order["path"], keeps=keeps)) as listing:
        listing.attach(reporter)

        def run(requests: Requests) -> int:
            def run_on(left: tuple[Device, ...], without: BegunWithout | None) -> int:
                here = order
                if without is not None:
                    here = {**order, "settings": {**order["settings"], "devices": ",".join(map(str, left))}}
                return run_ranks(None, left, requests, reporter, unused_ranks, here, listing, without)

            return without_lost(run_on, devices, reporter)

        run_stoppable(run, order, len(devices), reporter)


def script_order(script: Script, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank process is told about the script, as JSON."""
    as_json = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return {**script.to_json(), "settings": as_json}


def run_stoppable(
    run: Callable[[Requests], int],
    order: Mapping[str, Any],
    ranks: int,
    reporter: Reporter,
    waiting: Stoppable | None = None,
) -> None:
    """Run the ranks of a script while signals are requests to stop; `run` returns how many ranks never called uneven.

    Ctrl-C and SIGTERM ask the ranks to stop, a second one ends them; KeyboardInterrupt or Terminated either way.
    `waiting` is what signals meant until now.
    """
    requests = SignalledRequests(float(order["settings"].get("grace", GRACE_S)), ends_process=True)
    stoppable = Stoppable(lambda: requests.grace, requests.signalled)
    SIGNALS.add(stoppable, signal.SIGINT, signal.SIGTERM)
    try:
        if waiting is not None:
            SIGNALS.discard(waiting)
        unused = run(requests)
    except StoppedError as error:
        reporter.say([str(error)])
        raise (Terminated() if requests.is_terminated else KeyboardInterrupt()) from error
    finally:
        SIGNALS.discard(stoppable)
    if requests.stop.is_set():
        raise Terminated if requests.is_terminated else KeyboardInterrupt
    if unused == ranks > 1 and not {"-h", "--help"} & set(order["args"]):
        script = Script.from_json(order)
        raise InputError(
            f"{script} ended without calling uneven: it ran {unused} times, nothing was shared; {CALL_UNEVEN} {script}"
        )


def execute_as_rank(context: "ProcessContext", folder: Path, order: Mapping[str, Any], end: Callable[[], None]) -> None:
    """In a rank process, which calls `end` when its launcher cannot be reached.

    Raises what the script raises; KeyboardInterrupt whenever a stop was requested.
    """
    from uneven.launch.context import set_process_context
    from uneven.launch.predicted import hand_down

    # The launcher passes Ctrl-C on as a stop request; while no run is on, it interrupts the script.
    context.signals[signal.SIGINT] = RankSignal(signal.SIGINT, KeyboardInterrupt)
    context.start_heartbeat(lambda: {"handles_stop": True}, end)
    set_process_context(context)
    hand_down(order.get("plan"))
    if order.get("closed") is not None:
        close_folder(Path(order["closed"]))
    try:
        with _told_if_never_begun(context):
            execute(Script.from_json(order), order.get("code"))
        _end_as_python_does()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        _end_as_python_does()
    except Exception as error:
        # A rank whose peer stopped a moment earlier fails in the middle of a collective: that is no failure.
        if context.is_stop_requested():
            raise (Terminated() if context.is_terminated else KeyboardInterrupt()) from error
        raise
    if not context.was_used:
        (folder / f"unused-{context.rank}").touch()


def unused_ranks(folder: Path) -> int:
    return len(list(folder.glob("unused-*")))


def _execute_here(
    script: Script,
    settings: Mapping[str, Any],
    started: LaunchEnvironment | None,
    plan: Mapping[str, Any] | None = None,
) -> None:
    """In this process, alone or as a rank of another launcher. The settings hold to its end: a thread of the script may
    still train after its last line."""
    from uneven.launch.context import make_context, set_process_context  # imports torch
    from uneven.launch.predicted import hand_down

    if started is None:
        begin_log(None)
    context = make_context(started, settings)
    set_process_context(context)
    hand_down(plan)
    try:
        with _told_if_never_begun(context):
            execute(script)
    except SystemExit as error:
        if error.code in (None, 0):
            _warn_unused(context, script, settings)
        raise
    _warn_unused(context, script, settings)


@contextmanager
def _told_if_never_begun(context: "ProcessContext") -> Iterator[None]:
    """Of a script that is stopped while it still loads its modules and data: no run is there to say anything."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        if not context.was_used and context.rank == 0:
            print(f"uneven: {NOTHING_TRAINED}", file=sys.stderr)
        raise


def _warn_unused(context: "ProcessContext", script: Script, settings: Mapping[str, Any]) -> None:
    if not context.was_used:
        effect = f", and the settings {', '.join(settings)} had no effect" if settings else ""
        print(f"uneven: {script} ended without calling uneven: it ran as by python{effect}", file=sys.stderr)


def script_settings(script: Script, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the script itself passes to uneven, found by running it in this process up to there.

    What it prints goes to stderr. `settings` replace its own, as in a run; InputError where it never calls uneven.
    """
    from uneven.launch.visitor import WRAPPED, SettingsVisitor

    check_script(script, settings)
    with redirect_stdout(sys.stderr):
        found: Any = visit_script(script, settings, SettingsVisitor())
    if found == WRAPPED:
        raise InputError(f"{script} calls Ddp.wrap: a loop by hand passes no settings")
    if found is None:
        raise InputError(f"{script} ended without calling fit or Ddp.setup, so it has no settings")
    return dict(found)


def visit_script(script: Script, settings: Mapping[str, Any], visitor: "Visitor") -> Any:
    """Run the script in this process until the visitor leaves it, and return what that has found.

    None where the script ends by itself; SystemExit where it does so with an error.
    """
    from uneven.launch.context import make_context, set_process_context  # imports torch
    from uneven.launch.visitor import LeftScript

    context = make_context(None, settings)
    set_process_context(context)
    try:
        with context.shown_to(visitor):
            execute(script)
    except LeftScript as left:
        return left.found
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    return None


def execute(script: Script, code: Mapping[str, str] | None = None) -> None:
    """As `python script.py args` would: `__name__` is "__main__", sys.argv and sys.path are the script's own.

    As `python -m` would for a module. `code`: on a machine that joined, what was compared and alone may run.
    """
    sys.argv = [str(script.path), *script.args]
    # In the place of the folder of what runs now, which -P and PYTHONSAFEPATH have left out.
    replaced = 0 if getattr(sys.flags, "safe_path", False) else 1
    if script.module is None:
        sys.path[:replaced] = [str(script.folder)]
    else:
        sys.path[:replaced] = dict.fromkeys([str(script.folder), str(Path.cwd())])
    if code is not None:
        execute_compared(script, code)
    elif script.module is None:
        runpy.run_path(str(script.path), run_name="__main__")
    else:
        runpy.run_module(script.module, run_name="__main__", alter_sys=True)


def _end_as_python_does() -> None:
    """Join the script's threads and run its exit functions: os._exit, which ends the process, does neither."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def execute_compared(script: Script, code: Mapping[str, str]) -> None:
    """On a machine that joined: run what was compared with the leader's, the content itself and not what is there now.

    Between the comparison and the import of a file somebody may write to it, on a folder that both machines share too.
    So every file is read once, that content is compared with its digest, and compiled. `code` has digests by paths
    below the script's folder; sys.path and sys.argv are set.
    """
    known = {str(script.folder / name): value for name, value in code.items()}

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType | None:
            path = str(Path(self.path).resolve())
            if path not in known:
                return super().get_code(fullname)
            return compile(_read(path, known[path]), self.path, "exec", dont_inherit=True)  # not from __pycache__

    def find(place: str) -> Any:
        if not Path(place).resolve().is_relative_to(script.folder):
            raise ImportError("not below the folder of the script")
        return FileFinder(
            place,
            (ExtensionFileLoader, EXTENSION_SUFFIXES),
            (Loader, SOURCE_SUFFIXES),
            (SourcelessFileLoader, BYTECODE_SUFFIXES),
        )

    sys.path_hooks.insert(0, find)
    for place in [place for place in sys.path_importer_cache if Path(place).resolve().is_relative_to(script.folder)]:
        del sys.path_importer_cache[place]
    if script.module is not None:
        _check_module(script, script.module)
        runpy.run_module(script.module, run_name="__main__", alter_sys=True)
        return
    path = str(script.path)
    main = compile(_read(path, code.get(script.inner_path.as_posix(), "")), path, "exec", dont_inherit=True)
    runpy._run_module_code(main, None, "__main__", script_name=path)  # type: ignore[attr-defined]  # of run_path


def _check_module(script: Script, module: str) -> None:
    """A module of the standard library may have the same name, and be found first."""
    spec = importlib.util.find_spec(module)
    found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
    if found != script.path.resolve():
        raise RefusedError(f"-m {module}: Python finds {found} and not {script.path}, which was compared")


def _read(path: str, known: str) -> bytes:
    try:
        content = read_code(Path(path))
    except OSError as error:
        raise RefusedError(f"{path} cannot be read any more: {error.strerror}") from error
    if digest(content) != known:
        raise RefusedError(f"{path} has changed since it was compared with the leader's; start again")
    return content
