"""The two ways a user meets a failure: a wrong input, or a machine that cannot do it.

Both carry one line that names the value, what would be allowed, and the next command to type; the command
line prints that line and nothing else. Anything that is not one of these two is our own mistake and keeps
its traceback.
"""


class InputError(ValueError):
    """A value the user gave is wrong; the command line exits with 2."""


class MachineError(RuntimeError):
    """The input is right but this machine cannot do it (no space, no data, no driver); exits with 1."""
