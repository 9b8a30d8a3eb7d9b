"""The command `uneven`: one module per verb, which parses its options, calls the library and prints the result.

Nothing here imports torch: verbs that need it import it inside. The first screen needs not even typer: cli/verbs.py.
`main` is the one place where an error becomes an exit code; tests/cli/test_exit_codes.py holds it for every verb.
"""

import errno
import io
import os
import sys
from types import TracebackType
from typing import Any

from uneven.cli.verbs import EXIT_CODES as EXIT_CODES
from uneven.cli.verbs import first_screen, is_colored
from uneven.errors import STOPPED, InputError, MachineError, RankError
from uneven.launch.standard_streams import open_closed_streams

_REFUSED = {
    errno.ENAMETOOLONG: InputError.exit_code,
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), MachineError.exit_code),
}


def main() -> None:
    """Run the command line; a failure the user can do something about is a message on stderr and its exit code."""
    open_closed_streams()
    _show_what_the_terminal_can()
    try:
        if sys.argv[1:] in (["--help"], ["-h"]):
            _print_first_screen()
            return
        _run()
    except (InputError, MachineError, RankError) as error:
        print(f"uneven: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except ModuleNotFoundError as error:
        _end_if_torch_is_missing(error)
        sys.excepthook = _print_from_users_frame
        raise
    except Exception as error:
        _end_if_refused_by_system(error)
        sys.excepthook = _print_from_users_frame  # here, because typer sets its own when the app is called
        raise


def _show_what_the_terminal_can() -> None:
    """A character that the terminal cannot show (ISO-8859-1, ASCII) becomes a question mark, not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def _run() -> None:
    from uneven.cli.app import Carried, app
    from uneven.install.switch import switch_to_build
    from uneven.launch.lifeline import end_with_parent

    switch_to_build()
    end_with_parent()
    try:
        app()
    except Carried as carried:
        raise carried.error from None


def _end_if_torch_is_missing(error: ModuleNotFoundError) -> None:
    """Verbs import torch where they need it, and uneven is installed without it: this is their one line."""
    from uneven.hardware.torchbuild import raise_if_missing

    try:
        raise_if_missing(error)
    except MachineError as missing:
        print(f"uneven: {missing}", file=sys.stderr)
        sys.exit(missing.exit_code)


def _end_if_refused_by_system(error: Exception) -> None:
    """One line for a name that is too long and for a full disk, behind stdout as well. What a user's script ran into
    keeps its traceback."""
    from uneven.launch.user_frames import user_place

    if not isinstance(error, OSError) or error.errno not in _REFUSED or user_place(error) is not None:
        return
    if error.filename is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # nothing is left for the end of Python to flush
    where = "output" if error.filename is None else _shown(str(error.filename))
    print(f"uneven: {where}: {error.strerror}", file=sys.stderr)
    sys.exit(_REFUSED[error.errno])


def _shown(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:100]}...{name[-20:]}"


def _print_first_screen() -> None:
    try:
        print(first_screen(is_colored(sys.stdout)), flush=True)
    except BrokenPipeError:  # uneven --help | head: as typer does, and nothing is left for the end of Python to flush
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.exit(1)


def _print_from_users_frame(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Any other exception is of the user's script, or a defect of ours: the traceback begins with the script."""
    from uneven.launch.user_frames import show_user_frames

    del traceback
    show_user_frames(error)
    sys.__excepthook__(kind, error, error.__traceback__)


def __getattr__(name: str) -> Any:
    """`uneven.cli.main.app`, the typer app itself; not at the top, since the first screen does without typer."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from uneven.cli.app import app

    return app
