"""The user's script inside this process, as `python script.py args` would run it.

`execute` is all there is to it on one device. A rank that `uneven run` started is seated first, so that `fit`,
`Ddp.builder`, `Ddp.setup` and `Ddp.wrap` in the script find themselves among the others.
"""

import atexit
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def execute(script: Path, args: list[str]) -> None:
    """`__name__` is "__main__", sys.argv and sys.path are the script's own."""
    sys.argv = [str(script), *args]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def execute_as_rank(folder: Path, rank: int, plan: dict[str, Any]) -> None:
    """Raises what the script raises; KeyboardInterrupt when the launcher asked to stop, whatever came of it."""
    from uneven.hardware.device import parse_devices
    from uneven.launch.cleanup import end_orphaned_run
    from uneven.launch.context import ProcessContext, set_process_context
    from uneven.launch.environment import Started

    size = len(plan["devices"])
    started = Started("uneven run", rank, size, rank, size, "127.0.0.1", plan["port"], "")
    context = ProcessContext(started, parse_devices(plan["devices"]), plan["script"]["settings"])
    # The launcher passes Ctrl-C on as a request; where no run is there to obey it, it interrupts the script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    context.post(lambda: end_orphaned_run(folder))
    set_process_context(context)
    try:
        execute(Path(plan["script"]["path"]), plan["script"]["args"])
        _end_as_python_does()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        _end_as_python_does()
    except Exception as error:
        # A rank whose peer obeyed a moment earlier fails in the middle of a sum: that is no failure.
        if context.was_asked():
            raise KeyboardInterrupt from error
        raise
    context.stop_posting()


def _end_as_python_does() -> None:
    """The process ends by os._exit, which asks nobody: wait for the script's threads, run its exit functions."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
