"""The failures a user is told about: a wrong input, a machine that cannot do it, a rank that failed.

InputError and MachineError carry one line that names the value, what is allowed and the next command to type; the
command line prints it and exits with `exit_code` (docs/cli.md has the table). Any other exception is a defect of
uneven or of the user's own code, and keeps its traceback.
"""

from typing import Any

STOPPED = 130  # exit code after Ctrl-C, as a shell reports it: 128 + SIGINT
TERMINATED = 143  # after SIGTERM: 128 + SIGTERM


class Terminated(SystemExit):
    """Raised in the main thread when a run that SIGTERM stopped has saved its state: the process is to end."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class Left(SystemExit):
    """Raised in a rank that was asked to leave and has handed in what it trained: its process ends well."""

    def __init__(self, why: str) -> None:
        super().__init__(0)
        self.why = why


NOTHING_TRAINED = "the run was stopped before its first step: nothing was trained, nothing was saved"


class InputError(ValueError):
    """A value the user gave is wrong."""

    exit_code = 2


class MachineError(RuntimeError):
    """The input is right but this machine or cluster cannot do it: no space, no data, no driver, unsupported system.

    Where a run was trained and only its result could not be written, `state` is the TrainedState; else None.
    """

    exit_code = 3
    state: Any = None


class TorchMissingError(MachineError, ImportError):
    """torch is not installed: uneven comes without it, so that `uneven setup` can choose the build.

    Also an ImportError, because `from uneven import fit` raises it.
    """

    def __init__(self) -> None:
        super().__init__("torch is not installed: `uneven setup` chooses and installs the build for this machine")


class RankError(RuntimeError):
    """A rank or a run failed, died or hung; names rank, device and cause, with the rank's own traceback."""

    exit_code = 1


class RefusedError(RankError):
    """The machines of a run do not fit together, or do not find each other: all of them end with the same line."""


class GroupLostError(RankError):
    """A peer is gone, or this group was given up for a newer generation: none of its collectives will complete.

    Raised by whatever waits for the group (comm/). The worker settles with whoever is left, or the run ends with it.
    """


class LeftLoopError(RankError):
    """A rank's script has left the loop that the others are still in, and does not come back: a wrong use, no fault."""


class NotFiniteError(RankError):
    """Losses, gradients or params are not finite: all ranks end the run together, none of them has failed."""


# Errors that the launcher raises again as they are when a rank reports them: the traceback would not help.
USER_ERRORS: dict[str, type[InputError] | type[MachineError] | type[RankError]] = {
    "refused": RefusedError,
    "input": InputError,
    "machine": MachineError,
    "not finite": NotFiniteError,
}


class StoppedError(RuntimeError):
    """The run was asked to stop before its first step, so there is no state to return."""
