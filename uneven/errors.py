"""The ways a user meets a failure: a wrong input, a machine that cannot do it, a rank that failed.

The first two carry one line that names the value, what would be allowed, and the next command to type; the command
line prints that line and nothing else. Anything else is our own mistake and keeps its traceback.
"""


class InputError(ValueError):
    """A value the user gave is wrong; the command line exits with 2."""


class MachineError(RuntimeError):
    """The input is right but this machine cannot do it (no space, no data, no driver); exits with 1."""


class RankError(RuntimeError):
    """A rank failed, died or hung, and the run with it; names rank, device and cause, with its own traceback."""


class StoppedError(RuntimeError):
    """The run was asked to stop before its first step, so there is no state to return."""
